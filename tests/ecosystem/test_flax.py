"""flax: parameters with named axes, both kinds of modules, and its serialization."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, serialization
from flax.training import train_state

from tests.core.array.cases import MESH, named, same
from xlashard import Array, NamedSharding, P, device_put, pjit

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


class Named(linen.Module):
    """Layer whose parameters name their axes."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        kernel = linen.with_partitioning(linen.initializers.lecun_normal(), ("x", "y"))
        x = linen.Dense(16, kernel_init=kernel)(x)
        logical = linen.with_logical_partitioning(linen.initializers.lecun_normal(), ("in", "out"))
        return linen.Dense(4, kernel_init=logical)(linen.relu(x))


RULES = [("in", "y"), ("out", None), ("x", "x"), ("y", "y")]


@pytest.mark.slow
def test_logical_axis_names_become_shardings() -> None:
    model = Named()
    shapes = jax.eval_shape(model.init, jax.random.key(0), X)
    specs = linen.get_partition_spec(shapes)
    shardings = linen.logical_to_mesh_sharding(specs, MESH, RULES)
    ours = jax.tree.map(lambda s: NamedSharding(MESH, s.spec), shardings)
    for sharding in (ours, shardings):
        variables = pjit(model.init, out_shardings=sharding)(jax.random.key(0), X)
        params = linen.unbox(variables)["params"]
        assert params["Dense_0"]["kernel"].sharding.spec == P("x", "y")
        assert params["Dense_1"]["kernel"].sharding.spec == P("y", None)
        assert all(type(x) is Array for x in jax.tree.leaves(variables))
    assert isinstance(variables["params"]["Dense_0"]["kernel"], linen.Partitioned)
    placed = device_put(linen.unbox(model.init(jax.random.key(0), X)), linen.unbox(ours))
    for a, b in zip(*map(jax.tree.leaves, (placed, variables)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert a.sharding == b.sharding


def make_state() -> train_state.TrainState:
    model = linen.Dense(4)
    params = device_put(model.init(jax.random.key(0), X)["params"], named())
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.1))


@pytest.mark.slow
def test_a_train_state_is_trained_written_and_read() -> None:
    state = make_state()

    def step(state: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return (state.apply_fn({"params": params}, x) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    compiled, x = pjit(step), device_put(X, named("x"))
    trained, first = compiled(state, x)
    trained, second = compiled(trained, x)
    assert float(second) < float(first)
    for dump, load in (
        (serialization.to_bytes, serialization.from_bytes),
        (serialization.to_state_dict, serialization.from_state_dict),
    ):
        read = load(state, dump(trained))
        assert jax.tree.structure(read) == jax.tree.structure(trained)
        assert all(map(same, jax.tree.leaves(read), map(np.asarray, jax.tree.leaves(trained))))
    third = compiled(trained, x)[1]
    np.testing.assert_allclose(compiled(read, x)[1], third, rtol=1e-6)


@pytest.mark.slow
def test_msgpack_keeps_values_and_dtypes() -> None:
    tree = {
        name: device_put(np.arange(16).astype(dtype), named("x"))
        for name, dtype in (("f", np.float32), ("b", jnp.bfloat16), ("i", np.int8), ("t", bool))
    } | {"scalar": device_put(np.float32(2), named())}
    read = serialization.msgpack_restore(serialization.msgpack_serialize(tree))
    assert all(same(read[name], np.asarray(x)) for name, x in tree.items())
    flat = flax.traverse_util.flatten_dict({"a": tree})
    assert flat[("a", "f")] is tree["f"]
    frozen = flax.core.freeze(tree)
    assert type(jax.tree.map(lambda x: x + 1, frozen)["f"]) is Array


def test_replicating_over_devices() -> None:
    """The replication helpers of pmap programs, with a row for each device."""
    from flax import jax_utils

    tree = {"w": device_put(X, named("x"))}
    rows = jax_utils.replicate(tree)
    assert rows["w"].shape == (8, 8, 8)
    assert same(jax_utils.unreplicate(rows)["w"], X)


@pytest.mark.slow
def test_nnx_modules_hold_arrays() -> None:
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    before = np.asarray(model.kernel[...])
    graph, state = nnx.split(model)
    state = device_put(state, named())
    assert all(type(x) is Array for x in jax.tree.leaves(state))
    nnx.update(model, state)
    assert isinstance(model.kernel.get_value(), Array)
    assert same(model.kernel[...], before)
    model.kernel[...] = device_put(before * 2, named(None, "y"))
    assert same(nnx.merge(graph, nnx.state(model)).kernel[...], before * 2)
    assert isinstance(nnx.Param(device_put(X, named())).get_value(), Array)

    @pjit
    def apply(state: Any, x: Any) -> Any:
        return nnx.merge(graph, state)(x)

    out = apply(nnx.state(model), device_put(X, named("x")))
    np.testing.assert_allclose(out, X @ (before * 2) + np.asarray(model.bias[...]), rtol=1e-5)


@pytest.mark.slow
def test_nnx_optimizers_and_shardings() -> None:
    class Layer(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            values = jax.random.normal(rngs.params(), (8, 4))
            self.w = nnx.Param(values, out_sharding=("x", "y"))

        def __call__(self, x: Any) -> Any:
            return x @ self.w[...]

    with jax.set_mesh(MESH):
        model = Layer(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        specs = nnx.get_partition_spec(nnx.state(model))
        shardings = jax.tree.map(lambda spec: NamedSharding(MESH, spec), specs)
        nnx.update(model, device_put(nnx.state(model), shardings))
        x = device_put(X, named("x"))
        losses = []
        for _ in range(3):
            loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
            optimizer.update(model, grads)
            losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert model.w[...].sharding.spec == P("x", "y")
