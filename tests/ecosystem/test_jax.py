"""The parts of JAX around its arrays: trees, debugging, export, profiles, callbacks."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import io_callback, layout, multihost_utils

from tests.core.array.cases import DEVICES, MESH, SHARDINGS, named, same, value
from tests.core.pjit.random_programs.running import under
from xlashard import Array, NamedSharding, P, device_put, pjit, with_sharding_constraint

pytestmark = pytest.mark.partitioner

V = value(np.float32)


@pytest.fixture
def x() -> Array:
    return device_put(V, named("x", "y"))


def near(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weights", "bias"], meta_fields=["name"]
)
@dataclasses.dataclass(frozen=True)
class Layer:
    weights: Array
    bias: Array
    name: str


@pytest.mark.slow
def test_trees(x: Array) -> None:
    layer = Layer(x, x[0], "first")
    doubled = jax.tree.map(lambda leaf: leaf * 2, layer)
    assert type(doubled.weights) is Array and doubled.name == "first"
    near(doubled.weights, 2 * V)
    flat, _ = jax.tree.flatten_with_path(layer)
    assert [jax.tree_util.keystr(path) for path, _ in flat] == [".weights", ".bias"]
    assert jax.tree.structure(pjit(lambda t: t)(layer)) == jax.tree.structure(layer)
    near(jax.tree.reduce(jnp.add, {"a": x, "b": x}), 2 * V)
    near(jax.tree.reduce_associative(jnp.add, [x, x, x]), 3 * V)
    assert jax.tree.all(jax.tree.map(jnp.allclose, layer, layer))
    outer = jax.tree.transpose(
        jax.tree.structure({"a": 0}), jax.tree.structure([0, 0]), {"a": [x, x]}
    )
    assert outer[1]["a"] is x
    assert jax.tree.leaves(jax.tree.broadcast(3, {"a": x})) == [3]


@pytest.mark.slow
def test_raveling_a_tree(x: Array) -> None:
    tree = {"a": x, "b": [x[0], device_put(np.float32(1), named())]}
    flat, unravel = jax.flatten_util.ravel_pytree(tree)
    assert flat.shape == (8 * 16 + 16 + 1,)
    for back in (unravel(flat), unravel(device_put(np.asarray(flat), named()))):
        assert jax.tree.structure(back) == jax.tree.structure(tree)
        near(back["a"], V)


@pytest.mark.slow
def test_printing_and_callbacks(x: Array, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def look(value: Any) -> None:
        seen.append(np.asarray(value).sum())

    for run in (lambda f: f, jax.jit, pjit):
        run(lambda t: jax.debug.callback(look, t))(x)
        run(lambda t: jax.debug.print("sum {s}", s=t.sum()))(x)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    near(io_callback(lambda t: np.asarray(t) * 2, shape, x), 2 * V)
    jax.effects_barrier()
    assert seen == [V.sum()] * 3
    assert capsys.readouterr().out.count("sum 8128.0") == 3


def test_looking_at_shardings(x: Array, capsys: pytest.CaptureFixture[str]) -> None:
    jax.debug.visualize_array_sharding(x)
    drawn = capsys.readouterr().out
    assert all(f"{DEVICES[0].platform.upper()} {n}" in drawn for n in range(8))
    seen = []
    jax.debug.inspect_array_sharding(x, callback=seen.append)
    for run in (jax.jit, pjit):
        run(lambda t: jax.debug.inspect_array_sharding(t, callback=seen.append))(x)
    assert len(seen) == 3
    assert all(sharding.is_equivalent_to(x.sharding, 2) for sharding in seen)


@pytest.fixture
def shardy() -> Iterator[None]:
    """Set Shardy: JAX can't call functions exported with shardings under the other partitioner."""
    with under("shardy"):
        yield


EXPORTED = {
    "jax.jit": lambda f, **places: jax.jit(f, **places),
    "pjit": lambda f, **places: pjit(f, **places),
    "jax.jit of pjit": lambda f, **places: jax.jit(pjit(f, **places)),
}


@pytest.mark.slow
@pytest.mark.usefixtures("shardy")
@pytest.mark.parametrize("compiled", EXPORTED.values(), ids=EXPORTED)
def test_exporting(compiled: Any, x: Array) -> None:
    def scale(x: Any, by: Any) -> Any:
        return {"scaled": x * by["factor"]}

    exported = export.export(compiled(scale))(x, {"factor": x[0, 1]})
    assert exported.fun_name == "scale" and exported.nr_devices == 8
    out = exported.call(x, {"factor": x[0, 2]})["scaled"]
    near(out, V * 2)
    assert out.sharding.is_equivalent_to(x.sharding, 2)
    again = pjit(exported.call)(x, {"factor": x[0, 2]})["scaled"]
    assert type(again) is Array and same(again, np.asarray(out))
    gradient = jax.grad(lambda t: exported.call(t, {"factor": x[0, 2]})["scaled"].sum())(x)
    near(gradient, np.full_like(V, 2))


@pytest.mark.slow
@pytest.mark.usefixtures("shardy")
def test_exporting_with_places_and_symbolic_shapes(x: Array) -> None:
    placed = pjit(lambda t: t + 1, in_shardings=named("x"), out_shardings=named(None, "y"))
    exported = export.export(placed)(V)
    out = exported.call(device_put(V, named("x")))
    near(out, V + 1)
    assert exported.nr_devices == 8 and out.sharding.is_equivalent_to(named(None, "y"), 2)
    shapes = jax.ShapeDtypeStruct(export.symbolic_shape("rows, 16"), np.float32)
    exported = export.export(pjit(lambda t, n: t * n, static_argnums=1))(shapes, 3)
    for rows in (2, 5):
        near(exported.call(V[:rows]), V[:rows] * 3)
    assert export.export(pjit(jnp.sin), platforms=("cpu", "tpu"))(V).platforms == ("cpu", "tpu")


@pytest.mark.slow
@pytest.mark.usefixtures("shardy")
def test_exported_functions_as_files(x: Array, tmp_path: Path) -> None:
    file = tmp_path / "program"
    file.write_bytes(export.export(pjit(lambda t: t @ t.T))(x).serialize(vjp_order=1))
    loaded = export.deserialize(bytearray(file.read_bytes()))
    near(loaded.call(x), V @ V.T)
    assert jax.grad(lambda t: loaded.call(t).sum())(x).shape == V.shape


def test_multihost_utils_in_one_process(x: Array) -> None:
    tree = {"x": x, "one": device_put(V, DEVICES[2])}
    for tiled, shape in ((True, (8, 16)), (False, (1, 8, 16))):
        gathered = multihost_utils.process_allgather(tree, tiled=tiled)
        assert all(type(v) is np.ndarray and v.shape == shape for v in gathered.values())
        assert all(same(v.reshape(8, 16), V) for v in gathered.values())
    near(multihost_utils.broadcast_one_to_all(tree)["x"], V)
    multihost_utils.assert_equal(tree)
    multihost_utils.sync_global_devices("here")
    whole = multihost_utils.host_local_array_to_global_array(x, MESH, P("x", "y"))
    near(whole, V)
    assert whole.sharding.is_equivalent_to(x.sharding, 2)
    near(multihost_utils.global_array_to_host_local_array(x, MESH, P("x", "y")), V)


def test_profiles_and_counts(x: Array) -> None:
    assert jax.profiler.device_memory_profile()
    assert any(y is x._handle for y in jax.live_arrays())
    with jax.profiler.TraceAnnotation("here"), jax.named_scope("there"):
        near(pjit(lambda t: t + 1)(x), V + 1)


@pytest.mark.slow
def test_custom_rules(x: Array) -> None:
    @jax.custom_vjp
    def clipped(t: Any) -> Any:
        return t * 3

    clipped.defvjp(lambda t: (t * 3, t), lambda saved, g: (jnp.clip(g * saved, -1, 1),))
    near(jax.grad(lambda t: clipped(t).sum())(x), np.clip(V, -1, 1))

    @jax.custom_jvp
    def square(t: Any) -> Any:
        return t**2

    square.defjvp(lambda p, t: (p[0] ** 2, 5 * t[0]))
    near(jax.jvp(square, (x,), (x,))[1], 5 * V)
    # The same array as the cotangent of several results is added to itself.
    near(jax.vjp(lambda t: (t, t * 2), x)[1]((x, x))[0], 3 * V)
    near(jax.linear_transpose(lambda t: t * 2, x)(x)[0], 2 * V)
    near(jax.linearize(jnp.sin, x)[1](x), np.cos(V) * V)
    remat = jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.dots_saveable)
    near(jax.grad(lambda t: remat(t).sum())(x), np.cos(V))


def test_layouts_and_references(x: Array) -> None:
    near(layout.with_layout_constraint(x, x.layout), V)
    reference = jax.new_ref(x)
    reference[0] = x[1]
    near(jax.freeze(reference)[0], V[1])
    near(x, V)
    near(with_sharding_constraint(x, named("y")), V)


@pytest.mark.slow
def test_special_functions(x: Array) -> None:
    small = x / 100
    near(jax.nn.softmax(small), np.exp(V / 100) / np.exp(V / 100).sum(-1, keepdims=True))
    near(jax.scipy.special.logsumexp(small), np.log(np.exp(V / 100).sum()))
    near(jax.scipy.linalg.expm(x[:2, :2] * 0), np.eye(2))
    assert jax.image.resize(x, (4, 8), "linear").shape == (4, 8)
    groups = device_put(np.arange(8) // 2)
    near(jax.ops.segment_sum(x, groups, num_segments=4), V.reshape(4, 2, 16).sum(1))
    near(jax.lax.associative_scan(jnp.add, x), np.cumsum(V, 0))
    near(jax.lax.top_k(x, 2)[0], V[:, :-3:-1])
    key = jax.random.key(0)
    split = jax.shard_map(
        lambda k, t: t + jax.random.uniform(k[0]),
        mesh=MESH,
        in_specs=(P("x"), P("x")),
        out_specs=P("x"),
    )(jax.random.split(key, 2), x)
    assert split.shape == V.shape and float(split[0, 0]) != float(split[4, 0] - V[4, 0])


@pytest.mark.parametrize("name", SHARDINGS)
def test_plain_python(name: str) -> None:
    x = device_put(V, SHARDINGS[name])
    assert json.loads(json.dumps(x.tolist())) == V.tolist()
    assert x == pytest.approx(V)
    assert isinstance(x, jax.Array) and isinstance(x, jax.typing.ArrayLike)
    np.testing.assert_array_equal(x, V)
    one = NamedSharding(MESH, P())
    near(jax.device_put(x, one), V)
