"""One of 1, 2 or 4 processes with 8 devices together: host-local arrays and global ones.

It stops with an error where a result is wrong.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from tests.core.processes import expect
from tests.pods.multihost.specs import all_specs, blocks, host_local_part
from xlashard import Array, Mesh, NamedSharding, P, device_put, pjit
from xlashard.errors import (
    ArgumentError,
    BoxError,
    CompileError,
    PlacementError,
    ProcessesError,
    UnequalError,
)
from xlashard.multihost import (
    global_array_to_host_local_array,
    host_local_array_to_global_array,
)

jax.distributed.initialize()

PROCESSES, ME = jax.process_count(), jax.process_index()
DEVICES = np.array(jax.devices())
AXES: tuple[str, ...] = ("x", "y", "z")
GRID = DEVICES.reshape(2, 2, 2)


def meshes() -> list[Mesh]:
    """Return meshes in which the processes cross different axes, also backwards within each."""
    backwards = np.array(sorted(jax.devices(), key=lambda d: (d.process_index, -d.id)))
    return [
        Mesh(grid.transpose(order), AXES)
        for grid in (GRID, backwards.reshape(2, 2, 2))
        for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0))
    ]


def check_all_specs() -> None:
    count = 0
    for mesh in meshes():
        for ndim in range(4):
            whole = np.arange(8**ndim, dtype=np.int32).reshape((8,) * ndim)
            for spec in all_specs(AXES, ndim):
                check_spec(mesh, spec, whole)
                count += 1
                if mesh.devices.tolist() == GRID.tolist():
                    check_beside_jax(mesh, spec, whole)
    assert count == 8 * (1 + 16 + 49 + 106), count


def check_spec(mesh: Mesh, spec: P, whole: np.ndarray) -> None:
    mine = host_local_part(whole, mesh, spec, ME)
    x = host_local_array_to_global_array(mine, mesh, spec)
    assert type(x) is Array and x.shape == whole.shape and x.dtype == whole.dtype
    assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
    at = {device: at for at, device in np.ndenumerate(mesh.devices)}
    for shard in x.addressable_shards:
        there = dict(zip(AXES, at[shard.device], strict=True))
        piece = whole[blocks(spec, whole.shape, dict(mesh.shape), there)]
        assert np.asarray(shard.data).tobytes() == piece.tobytes(), (mesh, spec, shard)
    back = global_array_to_host_local_array(x, mesh, spec)
    assert type(back) is Array and back.is_fully_addressable
    assert np.asarray(back).tobytes() == mine.tobytes() and back.shape == mine.shape
    assert back.devices() == set(jax.local_devices())
    assert pointers(back) == pointers(x), "nothing is copied"
    again = host_local_array_to_global_array(back, mesh, spec)
    assert pointers(again) == pointers(x), "nor on the way there"


def check_beside_jax(mesh: Mesh, spec: P, whole: np.ndarray) -> None:
    mine = host_local_part(whole, mesh, spec, ME)
    x = host_local_array_to_global_array(mine, mesh, spec)
    of_jax = multihost_utils.host_local_array_to_global_array(mine, mesh, spec)
    assert x.sharding.is_equivalent_to(of_jax.sharding, x.ndim) and x.shape == of_jax.shape
    for ours, their in zip(x.addressable_shards, of_jax.addressable_shards, strict=True):
        assert ours.device == their.device and np.array_equal(ours.data, their.data)


def pointers(x: Array) -> dict[Any, int]:
    return {s.device: s.data.unsafe_buffer_pointer() for s in x.addressable_shards}


def check_gaps() -> None:
    if PROCESSES == 1:
        return
    # Every second device: no process has a box.
    mixed = Mesh(DEVICES.reshape(2, 4).T.reshape(2, 2, 2)[::, ::-1], AXES)
    diagonal = DEVICES[[0, 1, 6, 7, 4, 5, 2, 3]].reshape(2, 2, 2)
    for mesh in (mixed, Mesh(diagonal, AXES)):
        has_gap = not all(is_box(mesh, process) for process in range(PROCESSES))
        for use in (host_local_array_to_global_array, global_array_to_host_local_array):
            if not has_gap:
                use(np.zeros(8, np.float32), mesh, P())
                continue
            error = expect(
                BoxError,
                r"devices of process \d are not a contiguous box of global_mesh \('x'=2, 'y'=2, "
                r"'z'=2\): \d devices span .*the device at 'x'=\d.*at 'x'=0:\n +\d \d\n.*"
                r"sorted\(global_mesh.*reshape\(2, 2, 2\), \('x', 'y', 'z',\)\).*"
                "make_array_from_process_local_data",
                lambda use=use, mesh=mesh: use(np.zeros(8), mesh, P("x")),
            )
            fixed = Mesh(
                np.array(sorted(mesh.devices.flat, key=lambda d: (d.process_index, d.id))).reshape(
                    2, 2, 2
                ),
                ("x", "y", "z"),
            )
            assert "process 0" in str(error) or is_box(mesh, 0)
            use(np.zeros(8), fixed, P("x"))
    assert not is_box(Mesh(diagonal, AXES), 0) or PROCESSES == 4


def is_box(mesh: Mesh, process: int) -> bool:
    places = [at for at, d in np.ndenumerate(mesh.devices) if d.process_index == process]
    extents = [len(range(min(c), max(c) + 1)) for c in zip(*places, strict=True)]
    return int(np.prod(extents)) == len(places)


MESH = Mesh(GRID.reshape(4, 2), ("data", "model"))
ROWS = P("data")


def check_kinds_of_values() -> None:
    n = 8 // PROCESSES
    keys = jax.random.split(jax.random.key(ME), n)
    inputs = {
        "batch": np.full((n, 2), ME, np.float64),
        "flag": True,
        "scale": 2.5,
        "half": jnp.full((n, 2), ME, jnp.bfloat16),
        "keys": keys,
        "none": None,
        "empty": np.zeros((n, 0), np.int8),
        "ours": device_put(np.arange(n, dtype=np.int32) + n * ME, jax.local_devices()[-1]),
    }
    specs = {
        **dict.fromkeys(inputs, ROWS),
        "flag": None,
        "scale": P(),
        "none": None,
    }
    out = host_local_array_to_global_array(inputs, MESH, specs)
    assert out["batch"].dtype == np.float32 and out["batch"].shape == (8, 2)
    assert out["half"].dtype == jnp.bfloat16 and out["none"] is None
    assert out["flag"].dtype == bool and bool(out["flag"])
    assert float(out["scale"]) == 2.5 and out["scale"].weak_type
    assert out["keys"].shape == (8,) and out["empty"].shape == (8, 0)
    assert out["ours"].to_host("gather").tolist() == list(range(8))
    every = out["batch"].to_host("gather")
    assert every[:, 0].tolist() == [row // n for row in range(8)]
    back = global_array_to_host_local_array(out, MESH, specs)
    assert (jax.random.key_data(back["keys"]) == jax.random.key_data(keys)).all()
    assert back["half"].dtype == jnp.bfloat16 and back["none"] is None
    assert host_local_array_to_global_array([inputs["batch"]], MESH, (ROWS,))[0].shape == (8, 2)
    # Arrays that are global, or local, already are returned as they are.
    if PROCESSES > 1:
        assert host_local_array_to_global_array(out["batch"], MESH, ROWS) is out["batch"]
        assert global_array_to_host_local_array(back["batch"], MESH, ROWS) is back["batch"]


def check_resharding() -> None:
    """A global array whose sharding differs from its spec is resharded first."""
    v = np.arange(64, dtype=np.float32).reshape(8, 8)
    x = device_put(v, NamedSharding(MESH, P(None, "data")))
    mine = host_local_part(v, MESH, ROWS, ME)
    assert np.array_equal(global_array_to_host_local_array(x, MESH, ROWS), mine)
    # A NumPy array is the whole value.
    assert np.array_equal(global_array_to_host_local_array(v, MESH, ROWS), mine)


def check_transformations() -> None:
    rows = 8 // PROCESSES
    mine = np.arange(rows, dtype=np.float32) + rows * ME
    squared = pjit(lambda x: x * x)

    def there_and_back(x: Any) -> Any:
        there = host_local_array_to_global_array(x, MESH, ROWS)
        return global_array_to_host_local_array(squared(there), MESH, ROWS)

    assert np.array_equal(there_and_back(mine), mine**2)
    assert np.array_equal(jax.grad(lambda x: there_and_back(x).sum())(mine), 2 * mine)
    out, tangent = jax.jvp(there_and_back, (mine,), (np.ones_like(mine),))
    assert np.array_equal(out, mine**2) and np.array_equal(tangent, 2 * mine)
    total = jax.grad(lambda x: jnp.sum(squared(host_local_array_to_global_array(x, MESH, ROWS))))
    assert np.array_equal(total(mine), 2 * mine), "a loss over all processes"
    # Each is the transpose of the other.
    _, back = jax.vjp(lambda x: host_local_array_to_global_array(x, MESH, ROWS), mine)
    whole = np.arange(8, dtype=np.float32)
    (cotangent,) = back(whole)
    assert np.array_equal(cotangent, mine) and cotangent.shape == mine.shape
    wide = np.stack([mine, mine + 1, mine + 2], axis=1)
    assert np.array_equal(jax.vmap(there_and_back, in_axes=1, out_axes=1)(wide), wide**2)
    two = wide[:, :2]
    dealt = jax.vmap(there_and_back, in_axes=1, out_axes=1, spmd_axis_name="model")(two)
    assert np.array_equal(dealt, two**2)
    assert dealt.sharding.spec == P("data", "model")
    doubly = jax.vmap(jax.grad(lambda x: there_and_back(x).sum()), in_axes=1)(wide)
    assert np.array_equal(doubly, 2 * wide.T)
    shape = jax.eval_shape(lambda x: host_local_array_to_global_array(x, MESH, ROWS), mine).shape
    assert shape == (8,)


def check_in_programs() -> None:
    rows = 8 // PROCESSES
    mine = np.arange(rows, dtype=np.float32)

    def step(x: Any, spec: P) -> Any:
        return host_local_array_to_global_array(x, MESH, spec) * 2

    for compiled in (jax.jit, pjit):
        for spec in (P(), P("model")) if MESH.local_mesh.shape["model"] == 2 else (P(),):
            out = compiled(lambda x, spec=spec: step(x, spec))(mine)
            assert out.sharding.is_equivalent_to(NamedSharding(MESH, spec), 1)
            for shard in out.addressable_shards:
                assert np.array_equal(shard.data, 2 * mine[shard.index])
        if PROCESSES > 1:
            expect(
                CompileError,
                rf"changes the shape \({rows},\) to \(8,\) .*P\('data'\)\); y = pjit\(f\)\(x\)",
                lambda compiled=compiled: compiled(lambda x: step(x, ROWS))(mine),
            )
            continue
        out = compiled(lambda x: step(x, ROWS))(mine)
        assert out.sharding.is_equivalent_to(NamedSharding(MESH, ROWS), 1)
        assert np.array_equal(out, mine * 2)
        slope = compiled(jax.grad(lambda x: step(x, ROWS).sum()))(mine)
        assert np.array_equal(slope, [2] * 8)


def check_mistakes() -> None:
    odd = {"w": np.zeros(3, np.float32)}
    if PROCESSES < 4:
        expect(
            PlacementError,
            r"local_inputs\['w'\] under P\('data'\) on .*'data'=.*size 3",
            lambda: host_local_array_to_global_array(odd, MESH, ROWS),
        )
    expect(
        PlacementError,
        r"global_inputs\['w'\] .*size 3.*4 tiles \('data'=4\)",
        lambda: global_array_to_host_local_array(odd, MESH, {"w": ROWS}),
    )
    expect(
        ArgumentError,
        r"local_inputs\['w'\]: .*entry of pspecs is 'data' \(str\).*P\('data'\)",
        lambda: host_local_array_to_global_array(odd, MESH, "data"),
    )
    if PROCESSES > 1:
        few = Mesh(np.array(jax.local_devices(process_index=0)), ("data",))
        if ME != 0:
            expect(
                BoxError,
                rf"global_mesh has no device of this process, {ME}; .* belongs? to process 0",
                lambda: host_local_array_to_global_array(np.zeros(4), few, ROWS),
            )
        else:
            x = host_local_array_to_global_array(np.arange(4.0), few, ROWS)
            assert np.array_equal(x, np.arange(4))


def check_checks() -> None:
    """All processes report parts that do not fit together, and equal parts are checked once."""
    n = 8 // PROCESSES
    last = ME == PROCESSES - 1
    tree = {"rows": np.full(n, ME, np.float32), "all": np.arange(4.0), "half": np.ones(2)}
    specs = {"rows": ROWS, "all": P(), "half": P("model")}
    for check in ("never", "once", "always"):
        out = convert(tree, specs, check)
        assert np.asarray(out["all"]).tolist() == [0, 1, 2, 3]
    if PROCESSES == 1:
        expect(ArgumentError, "'once'.*not 'often'", lambda: convert(tree, specs, "often"))
        return
    odd = {**tree, "all": np.where(last, 7, tree["all"])}
    convert(odd, specs, "once")  # checked already
    convert(odd, specs)
    error = expect(
        UnequalError,
        rf"local_inputs\['all'\] under P\(\).*at \[0\] it is 0.0 in process.*7.0 in process "
        rf"{PROCESSES - 1}; .*broadcast_one_to_all\(x\)",
        lambda: convert(odd, specs, "always"),
    )
    assert error.processes == (PROCESSES - 1,)
    expect(
        UnequalError,
        r"local_inputs\['half'\] under P\('model'\).*differs between processes 0, 1",
        lambda: convert({**tree, "half": np.full(2, float(last))}, specs, "always"),
    )
    expect(
        ProcessesError,
        rf"local_inputs\['rows'\].*int8\[8\].*int8\[16\] under P\('data'\) in process "
        rf"{PROCESSES - 1}",
        lambda: convert({**tree, "rows": np.zeros(n * (1 + last), np.int8)}, specs, "once"),
    )
    if last:
        expect(ArgumentError, "'rows'.*of str", lambda: convert({"rows": "a"}, ROWS, "always"))
    else:
        text = rf"failed in process {PROCESSES - 1}; .*local_inputs\['rows'\]"
        expect(ProcessesError, text, lambda: convert({"rows": tree["rows"]}, ROWS, "always"))


def convert(tree: Any, specs: Any, check: Any = "never") -> Any:
    return host_local_array_to_global_array(tree, MESH, specs, check=check)


def check_meshes_of_some_processes() -> None:
    some = list(range(PROCESSES))[1:3]
    if PROCESSES == 1:
        return
    mesh = Mesh(np.array([d for d in DEVICES if d.process_index in some]), ("data",))
    n = len(jax.local_devices())
    if ME not in some:
        text = (
            rf"this process, {ME}; .* belongs? to process(es)? \[?{some[0]}.*if jax.process_index"
        )
        expect(BoxError, text, lambda: host_local_array_to_global_array(np.ones(n), mesh, ROWS))
        return
    x = host_local_array_to_global_array(np.full(n, ME), mesh, ROWS, check="always")
    assert x.shape == (n * len(some),)
    assert global_array_to_host_local_array(x, mesh, ROWS).tolist() == [ME] * n


def check_migration_guide() -> None:
    """The guide's own example: a mesh of 2x2x2 and a host-local input sharded over all its axes."""
    n = 8 // PROCESSES
    mesh, spec = Mesh(GRID, AXES), P(AXES)
    local = np.arange(n, dtype=np.float32) + n * ME
    with mesh:
        inputs = host_local_array_to_global_array(local, mesh, spec)
        out = pjit(lambda x: x * 2, in_shardings=spec, out_shardings=spec)(inputs)
        assert np.array_equal(global_array_to_host_local_array(out, mesh, spec), local * 2)
        if PROCESSES > 1:
            expect(
                ValueError,
                "host_local_array_to_global_array",
                lambda: pjit(lambda x: x, in_shardings=spec, out_shardings=spec)(local),
            )


for check in (
    check_all_specs,
    check_gaps,
    check_kinds_of_values,
    check_resharding,
    check_transformations,
    check_in_programs,
    check_mistakes,
    check_checks,
    check_meshes_of_some_processes,
    check_migration_guide,
):
    check()
    multihost_utils.sync_global_devices(check.__name__)
print("all agree")
