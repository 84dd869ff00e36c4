"""The era's array modes in every process of a pod; see test_array_modes_in_a_pod.py."""

import json
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np

from tests.core.processes import expect, join_the_others
from xlashard import FROM_GDA, Array, legacy, multihost
from xlashard import PartitionSpec as P
from xlashard._jax.runtime.transfer import HandleType
from xlashard.errors import BoxError, PlacementError, ResourceError
from xlashard.legacy.arrays.device_arrays import ShardedDeviceArray
from xlashard.legacy.arrays.gda import GlobalDeviceArray
from xlashard.legacy.modes.config_flags import PositionalSemantics, positional_semantics
from xlashard.legacy.modes.host_local import HostLocal

join_the_others()
ME, MANY = jax.process_index(), jax.process_count()
PER = 8 // MANY
DEVICES = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
# Processes lie along x; each has whole rows.
MESH = jax.sharding.Mesh(np.array(DEVICES).reshape(4, 2), ("x", "y"))
# Every process has devices all over it.
SCATTERED = jax.sharding.Mesh(np.array(DEVICES).reshape(MANY, PER).T.reshape(8), ("x",))
WHOLE = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)
ROWS = 8 // MANY
MINE = WHOLE[ME * ROWS : (ME + 1) * ROWS]


def off() -> object:
    return legacy.jax_array(False)


def gda() -> object:
    return legacy.parallel_functions_output_gda(True)


def host_local() -> None:
    """NumPy arrays in, this process's part out, and results are arguments again."""
    traced = []

    def step(x, scale, y):
        traced.append((x.shape, y.shape))
        return {"rows": x * scale, "mean": (x.sum() + y.sum()) / 2, "columns": y.T}

    resources = (P("x"), None, P(None, "x"))
    outs = {"rows": P("x", "y"), "mean": None, "columns": P("x")}
    f = legacy.pjit(step, resources, outs)
    y = MINE.T.copy()
    for x in (MINE, f(MINE, 1.0, y)["rows"]):
        out = f(x, 2.0, y)
        assert (
            type(out["rows"]) is ShardedDeviceArray and type(out["columns"]) is ShardedDeviceArray
        )
        assert isinstance(out["mean"], ShardedDeviceArray) and out["mean"].is_fully_addressable
        np.testing.assert_array_equal(out["rows"], MINE * 2)
        np.testing.assert_array_equal(out["columns"], MINE)
        assert out["mean"] == WHOLE.sum()
    assert traced == [((8, 6), (6, 8))]


def no_copies() -> None:
    """Arrays on their resource's sharding keep their buffers, as arguments and as results."""
    same = legacy.pjit(lambda x: x + 0, P("x"), P("x"))
    part = same(MINE)
    edge = HostLocal(same._function, MESH)
    (whole,) = edge.lift((part,))
    assert whole.shape == (8, 6)
    pieces = [s.data.unsafe_buffer_pointer() for s in part.addressable_shards]
    assert [s.data.unsafe_buffer_pointer() for s in whole.addressable_shards] == pieces
    again = edge.lower(whole)
    assert [s.data.unsafe_buffer_pointer() for s in again.addressable_shards] == pieces


def global_arrays() -> None:
    """GDAs in and out: shapes are global, and repeat calls stay with the dispatcher."""
    traced = []

    def step(state, batch):
        traced.append(batch.shape)
        return state + batch, batch.sum()

    make = legacy.pjit(lambda x: x, P("x"), P("x"))
    with gda():
        state = make(MINE)
        assert type(state) is GlobalDeviceArray and state.shape == (8, 6)
        f = legacy.pjit(step, FROM_GDA, (P("x"), None))
        mixed = legacy.pjit(step, (FROM_GDA, P("x")), (P("x"), None))
        for _ in range(3):
            state, total = f(state, state)
        assert type(total) is GlobalDeviceArray and traced == [(8, 6)]
        assert f._cache_size() == 1
        np.testing.assert_array_equal(np.asarray(state.local_data(0)), 8 * MINE[: 8 // 4])
        new, _ = mixed(state, MINE)
        assert new.shape == (8, 6) and traced[-1] == (8, 6)
        wrong = legacy.pjit(step, (P("y"), P("x")), None)
        error = expect(ResourceError, "FROM_GDA", lambda: wrong(state, MINE))
        assert "P('x')" in str(error)
    part, _ = mixed(state, MINE)
    assert type(part) is ShardedDeviceArray and part.shape == MINE.shape
    np.testing.assert_array_equal(part, 9 * MINE)


def replicated_keys() -> None:
    """Values equal in every process need no conversion: a seed, a number, a device array."""
    f = legacy.pjit(lambda key, x: x * jax.random.uniform(key), (None, FROM_GDA), P("x"))
    with gda():
        state = legacy.pjit(lambda x: x, P("x"), P("x"))(MINE)
        for key in (jax.random.PRNGKey(0), np.asarray(jax.random.PRNGKey(0))):
            out = f(key, state)
            assert type(out) is GlobalDeviceArray
        here = jax.sharding.NamedSharding(MESH.local_mesh, P())
        for place in (jax.local_devices()[-1], here):
            for key in (jax.random.PRNGKey(0), jax.random.key(0)):
                again = f(jax.device_put(key, place), state)
                np.testing.assert_array_equal(again.local_data(0), out.local_data(0))


def scattered() -> None:
    """A mesh in which processes leave gaps works for GDAs and replicated values."""
    with SCATTERED:
        same = legacy.pjit(lambda x: x * 2, None, None)
        for x in (WHOLE[0], jnp.ones(3), jax.device_put(np.ones(3), jax.local_devices()[-1])):
            out = same(np.float32(3) if x is None else x)
            assert out.is_fully_addressable and len(out.sharding.device_set) == PER
        cut = legacy.pjit(lambda x: x * 2, P("x"), P("x"))
        error = expect(BoxError, "not a contiguous box of global_mesh", lambda: cut(MINE))
        assert "by process" in str(error) and "contiguous_submeshes" in str(error)
        with gda():
            whole = GlobalDeviceArray.from_callback((8, 6), SCATTERED, P("x"), lambda i: WHOLE[i])
            assert cut(whole).shape == (8, 6)
        expect(BoxError, "not a contiguous box of global_mesh", lambda: cut(whole))


def stages() -> None:
    """Lower for this process's part, or for global shapes."""
    f = legacy.pjit(lambda n, x, s: x * s + n, (P("x"), None), P("x"), static_argnums=0)
    compiled = f.lower(1, MINE, 2.0).compile()
    out = compiled(MINE, 2.0)
    assert type(out) is ShardedDeviceArray and out.shape == MINE.shape
    np.testing.assert_array_equal(out, MINE * 2 + 1)
    shapes = jax.ShapeDtypeStruct(MINE.shape, MINE.dtype)
    assert f.lower(1, shapes, 2.0).compile()(out, 1.0).shape == MINE.shape
    assert f.eval_shape(1, MINE, 2.0).shape == MINE.shape
    assert f.lower(1, MINE, 2.0).out_info.shape == WHOLE.shape
    with gda():
        whole = f(1, MINE, 2.0)
        assert whole.shape == WHOLE.shape
        compiled = f.lower(1, whole, 2.0, _global_avals=True).compile()
        assert type(compiled(whole, np.float32(2))) is GlobalDeviceArray
        assert type(f.lower(1, MINE, 2.0).compile()(MINE, 2.0)) is GlobalDeviceArray


def inside_traces() -> None:
    """Traced values are global, also where results are parts or GDAs."""
    inner = legacy.pjit(lambda x: x * 2, P("x"), P("x"))
    seen = []

    def outer(x):
        seen.append(inner(x).shape)
        return inner(x).sum()

    assert legacy.pjit(outer, P("x"), None)(MINE) == 2 * WHOLE.sum()
    assert seen == [(8, 6)]
    slope = legacy.pjit(jax.grad(outer), P("x"), P("x"))(MINE)
    np.testing.assert_array_equal(slope, np.full_like(MINE, 2))
    shapes = jax.eval_shape(inner, jax.ShapeDtypeStruct((8, 6), np.float32))
    assert shapes.shape == (8, 6)


def semantics() -> None:
    """A thread may declare its shapes global."""
    whole = multihost.host_local_array_to_global_array(MINE, MESH, P("x"))
    same = legacy.pjit(lambda x: x + 1, P("x"), P("x"))
    with positional_semantics(PositionalSemantics.GLOBAL):
        out = same(whole)
        assert type(out) is Array and out.shape == (8, 6)
    assert type(same(MINE)) is ShardedDeviceArray
    assert same(whole).shape == MINE.shape
    replicated = legacy.pjit(lambda x: x + 1, None, P("x"))
    for _ in range(3):
        assert replicated(np.ones((8, 6), np.float32)).shape == MINE.shape


def donation() -> None:
    """Donated buffers are deleted, in whichever view."""
    f = legacy.pjit(lambda n, x: x + n, P("x"), P("x"), static_argnums=0, donate_argnums=1)
    part = f(0, MINE)
    f(1, part)
    assert part.is_deleted()
    with gda():
        whole = f(0, MINE)
        again = f(1, whole)
        assert whole.is_deleted() and not again.is_deleted()


def errors() -> None:
    """Errors name the argument and today's replacement."""
    f = legacy.pjit(lambda state: state["w"] * 2, ({"w": P("x", "y")},), P("x", "y"))
    odd = np.ones((ROWS, 7), np.float32)
    expect(PlacementError, r"state\['w'\] \(host-local\).*P\('x', 'y'\)", lambda: f({"w": odd}))
    with legacy.jax_array(True):
        advice = "host_local_array_to_global_array"
        expect(ResourceError, advice, lambda: legacy.pjit(lambda x: x, P("x"), P("x"))(MINE))


def worlds_side_by_side() -> None:
    """Call one function in each mode in turn, and back."""
    f = legacy.pjit(lambda x: x * 2, P("x"), P("x"))
    whole = multihost.host_local_array_to_global_array(MINE, MESH, P("x"))
    for _ in range(2):
        with legacy.jax_array(True):
            assert type(f(whole)) is HandleType
        assert type(f(MINE)) is ShardedDeviceArray
        with gda():
            made = f(MINE)
            assert type(made) is GlobalDeviceArray
            with legacy.jax_array(True):
                assert type(f(f(whole))) is HandleType
                again = legacy.pjit(lambda x: x * 2, FROM_GDA, P("x"))(made)
                assert type(again) is HandleType
                np.testing.assert_array_equal(again.addressable_data(0), 4 * MINE[: 8 // 4])


def shapes() -> None:
    """Local parts become global arrays and back, for specs and shapes of all kinds."""
    rng = np.random.default_rng(0)
    for spec in (
        P("x"),
        P("y"),
        P(("x", "y")),
        P("y", "x"),
        P(None, ("y", "x")),
        P("x", None, "y"),
    ):
        local = MESH.local_mesh.shape
        rank = max(len(spec), 2)
        dims = [1 if e is None else e for e in (*spec, *(None,) * (rank - len(spec)))]
        names = [() if e == 1 else (e,) if isinstance(e, str) else e for e in dims]
        size = [int(rng.integers(1, 4)) * int(np.prod([local[n] for n in ns])) for ns in names]
        factor = [int(np.prod([MESH.shape[n] // local[n] for n in ns])) for ns in names]
        seen = []
        x = rng.normal(size=size).astype(np.float32)
        out = legacy.pjit(lambda x, seen=seen: (seen.append(x.shape), x)[1], spec, spec)(x)
        assert seen == [tuple(a * b for a, b in zip(size, factor, strict=True))], (spec, size, seen)
        np.testing.assert_array_equal(out, x)


def logged() -> None:
    """`jax_distributed_debug` logs every run, also repeat ones."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("xlashard.legacy.distributed_debug")
    logger.addHandler(handler)
    f = legacy.pjit(lambda x: x * 5, P("x"), P("x"))
    f(MINE)
    legacy.config.update("jax_distributed_debug", True)
    try:
        f(MINE)
        f(MINE)
    finally:
        legacy.config.update("jax_distributed_debug", False)
    f(MINE)
    logger.removeHandler(handler)
    assert len(lines) == 2 and "float32[8,6]" in lines[0], lines


def spmd_modes() -> None:
    """`jax_spmd_mode` decides which computations accept arrays that span processes."""
    with legacy.jax_array(True), legacy.installed():
        x = jax.experimental.multihost_utils.host_local_array_to_global_array(MINE, MESH, P("x"))
        add = jax.jit(lambda x: x + 1)
        add_by_pjit = legacy.pjit(lambda x: x + 1)
        eager = {
            "add": lambda: x + 1,
            "sin": lambda: jnp.sin(x),
            "sum": lambda: x.sum(),
            "gather": lambda: x[1:3],
            "concatenate": lambda: jnp.concatenate([x, x]),
        }
        for _ in range(2):
            for name, operation in eager.items():
                error = expect(RuntimeError, "spans several processes", operation)
                assert name in str(error) and "float32[8,6]" in str(error), error
                assert "jax_spmd_mode='allow_jit'" in str(error), error
            assert add(x).shape == add_by_pjit(x).shape == (8, 6)
            np.testing.assert_array_equal(jnp.ones(3) + 1, np.full(3, 2))
            with jax.spmd_mode("allow_all"):
                assert (x + 1).shape == (8, 6) and float(x.sum()) == WHOLE.sum()
            with jax.spmd_mode("allow_pjit"):
                error = expect(RuntimeError, "spans several processes", lambda: add(x))
                assert "jax.jit" in str(error) and "inside pjit" in str(error), error
                assert add_by_pjit(x).shape == (8, 6)
                np.testing.assert_array_equal(add(np.ones(3)), np.full(3, 2))
    assert (x + 1).shape == (8, 6)


CHECKS = (
    host_local,
    no_copies,
    global_arrays,
    replicated_keys,
    scattered,
    stages,
    inside_traces,
    semantics,
    donation,
    errors,
    worlds_side_by_side,
    shapes,
    logged,
    spmd_modes,
)

if __name__ == "__main__":
    with MESH, off():
        for check in CHECKS if len(sys.argv) < 2 else [globals()[n] for n in sys.argv[1:]]:
            check()
    print(json.dumps([check.__name__ for check in CHECKS]))
