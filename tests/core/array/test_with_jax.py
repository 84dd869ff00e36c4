"""JAX accepts an Array as it is: one small test for each part of JAX."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import xlashard
from tests.core.array.cases import DEVICES, MESH, named, same, value
from tests.message_patterns import naming
from xlashard import Array, NamedSharding, P, SingleDeviceSharding, device_put, key_shards
from xlashard import numpy as xnp

V = value(np.float32)


@pytest.fixture
def x() -> Array:
    return device_put(V, named("x", "y"))


def near(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.slow
def test_jnp(x: Array) -> None:
    near(jnp.sin(x), np.sin(V))
    near(jnp.add(x, x), 2 * V)
    near(jnp.dot(x, x.T), V @ V.T)
    near(jnp.where(x > 3, x, 0), np.where(V > 3, V, 0))
    near(jnp.concatenate([x, x]), np.concatenate([V, V]))
    near(jnp.stack([x, jnp.zeros_like(x)])[0], V)
    near(jnp.einsum("ij,kj->ik", x, x), V @ V.T)
    assert jnp.sin(x).devices() == x.devices()
    assert jnp.shape(x) == V.shape and jnp.ndim(x) == 2 and jnp.size(x) == V.size
    assert jnp.result_type(x, 1.0) == jnp.float32
    near(jnp.array(x), V)
    near(jnp.asarray(x, jnp.int32), V)
    assert isinstance(x, jax.Array) and isinstance(x, jnp.ndarray)


@pytest.mark.slow
def test_jit(x: Array) -> None:
    f = jax.jit(lambda a, b, *, c: (a + b) * c)
    near(f(x, x.to_jax(), c=x), 2 * V * V)
    near(jax.jit(lambda t: t + x)(1.0), V + 1)
    placed = jax.jit(lambda t: t, in_shardings=named("y"), out_shardings=named(None, "y"))
    assert placed(device_put(V, named("y"))).sharding.is_equivalent_to(named(None, "y"), 2)
    static = jax.jit(lambda t, n: t * n, static_argnums=1)
    near(static(x, 3), V * 3)
    assert jax.jit(lambda t: t).lower(x).compile()(x).shape == V.shape


def test_donation_to_jit_deletes() -> None:
    x = device_put(V, named("x"))
    near(jax.jit(lambda t: t + 1, donate_argnums=0)(x), V + 1)
    assert x.is_deleted()
    with pytest.raises(RuntimeError, match=naming("float32[8,16]", "delete()")):
        x.sum()
    with pytest.raises(RuntimeError, match="deleted"):
        jnp.sin(x)


@pytest.mark.slow
def test_gradients(x: Array) -> None:
    near(jax.grad(lambda t: (t * t).sum())(x), 2 * V)
    loss, grads = jax.value_and_grad(lambda tree: (tree["w"] ** 3).sum())({"w": x})
    near(loss, (V**3).sum())
    near(grads["w"], 3 * V**2)
    out, pull = jax.vjp(jnp.sin, x)
    near(pull(jnp.ones_like(out))[0], np.cos(V))
    near(jax.jvp(jnp.sin, (x,), (x,))[1], np.cos(V) * V)
    near(jax.jacfwd(lambda t: t**2)(x[0, :3]), np.diag(2 * V[0, :3]))
    near(jax.hessian(lambda t: (t**3).sum())(x[0, :3]), np.diag(6 * V[0, :3]))
    near(jax.grad(jax.checkpoint(lambda t: jnp.sin(t).sum()))(x), np.cos(V))


def test_vmap(x: Array) -> None:
    near(jax.vmap(lambda row: row.sum())(x), V.sum(1))
    near(jax.vmap(lambda row, y: row * y, in_axes=(0, None))(x, x[0]), V * V[0])


@pytest.mark.slow
def test_control_flow(x: Array) -> None:
    total, rows = lax.scan(lambda c, row: (c + row, c), jnp.zeros(16), x)
    near(total, V.sum(0))
    assert rows.shape == V.shape
    near(lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0], V * 8)
    near(lax.while_loop(lambda t: t.sum() < 1e5, lambda t: t * 2, x), V * 16)
    near(lax.fori_loop(0, 3, lambda i, t: t + i, x), V + 3)
    near(lax.cond(x[0, 1] > 0, lambda t: t + 1, lambda t: t, x), V + 1)
    near(lax.map(lambda row: row * 2, x), V * 2)
    near(lax.switch(1, [lambda t: t, lambda t: -t], x), -V)


def test_lax(x: Array) -> None:
    near(lax.add(x, x), 2 * V)
    near(lax.dynamic_slice_in_dim(x, 2, 3), V[2:5])
    near(lax.dot_general(x, x, (((1,), (1,)), ((), ()))), V @ V.T)
    near(lax.stop_gradient(x), V)


def test_placement_by_jax(x: Array) -> None:
    for place in (
        DEVICES[2],
        named(None, "y"),
        SingleDeviceSharding(DEVICES[1]),
        jax.sharding.NamedSharding(MESH, P("y")),
    ):
        near(jax.device_put(x, place), V)
    near(jax.device_put(x, named("x", "y")), V)
    assert same(jax.device_get(x), V)
    assert same(jax.device_get({"a": [x]})["a"][0], V)
    assert jax.block_until_ready(x) is x
    assert jax.block_until_ready({"a": x})["a"] is x
    jax.copy_to_host_async({"a": x})
    near(jax.lax.with_sharding_constraint(x, named(None, "y")), V)


@pytest.mark.devices(8)
@pytest.mark.slow
def test_jax_puts_shards_together(x: Array) -> None:
    shards = [shard.data for shard in x.addressable_shards]
    mixed = [shards[0].to_jax(), *shards[1:]]
    for pieces in (shards, tuple(shards[::-1]), mixed):
        whole = jax.make_array_from_single_device_arrays(V.shape, x.sharding, pieces)
        assert same(whole, V) and whole.sharding == x.sharding
        pointers = [a.unsafe_buffer_pointer() for a in whole._arrays]
        assert pointers == [a.unsafe_buffer_pointer() for a in shards]
    keys = device_put(jax.random.split(jax.random.key(0), 8), named(("x", "y")))
    same_keys = jax.make_array_from_single_device_arrays(
        (8,), keys.sharding, [shard.data for shard in key_shards(keys)]
    )
    assert same(jax.random.key_data(same_keys), np.asarray(jax.random.key_data(keys)))
    near(jax.make_array_from_callback(V.shape, x.sharding, lambda index: x[index]), V)
    near(jax.make_array_from_callback(V.shape, named(), lambda _: x), V)
    with pytest.raises(ValueError):
        jax.make_array_from_single_device_arrays(V.shape, x.sharding, [x] * 8)
    # A program of JAX that takes the buffers takes them from the array, too; older ones copy.
    jax.jit(lambda t: t + 1, donate_argnums=0)(whole).block_until_ready()
    if shards[1].is_deleted():
        with pytest.raises(RuntimeError, match="deleted"):
            x.sum()
    else:
        assert jax.__version_info__ < (0, 12) and same(x, V)


def test_shapes_and_trees(x: Array) -> None:
    out = jax.eval_shape(lambda t: t @ t.T, x)
    assert (out.shape, out.dtype) == ((8, 8), jnp.float32)
    leaves, treedef = jax.tree.flatten({"a": x, "b": [x]})
    assert len(leaves) == 2 and all(leaf is x for leaf in leaves)
    assert treedef.unflatten(leaves)["b"][0] is x
    near(jax.tree.map(lambda t: t * 2, {"a": x})["a"], 2 * V)
    assert jax.typeof(x) == jax.typeof(x.to_jax())
    assert jax.make_jaxpr(lambda t: t + 1)(x).in_avals[0].shape == V.shape
    assert jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding).shape == V.shape


@pytest.mark.slow
def test_random(x: Array) -> None:
    key = jax.random.key(0)
    noise = jax.random.normal(key, x.shape) * x
    assert noise.shape == V.shape
    assert jax.random.choice(key, x[0]).shape == ()
    assert jax.random.permutation(key, x).shape == V.shape
    assert jax.random.bernoulli(key, x / 200).shape == V.shape
    old = device_put(np.array([0, 1], np.uint32), named())
    near(jax.random.uniform(old, (2,)), jax.random.uniform(np.array([0, 1], np.uint32), (2,)))


def test_callbacks_and_debugging(x: Array, capsys: pytest.CaptureFixture[str]) -> None:
    near(
        jax.pure_callback(lambda t: np.asarray(t) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
        2 * V,
    )
    jax.debug.print("total {}", x.sum())
    jax.effects_barrier()
    assert "total 8128" in capsys.readouterr().out


def test_shard_map(x: Array) -> None:
    summed = jax.shard_map(
        lambda t: lax.psum(t.sum(), ("x", "y")),
        mesh=MESH,
        in_specs=P("x", "y"),
        out_specs=P(),
    )
    near(summed(x), V.sum())


def test_numpy_functions(x: Array) -> None:
    near(np.sin(x), np.sin(V))
    near(np.matmul(x, x.T), V @ V.T)
    near(np.linalg.norm(x), np.linalg.norm(V))
    near(np.where(x > 3, x, 0), np.where(V > 3, V, 0))
    assert np.shape(x) == V.shape
    assert np.isfinite(x).all()
    np.testing.assert_array_equal(x, V)


@pytest.mark.slow
def test_an_optax_loop() -> None:
    params = {"w": device_put(np.ones((16, 4), np.float32), named("x", "y")), "b": device_put(0.0)}
    batch = device_put(np.eye(16, dtype=np.float32), named("x"))
    tx = optax.adamw(0.1)
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        def loss_of(p: Any) -> Any:
            return ((batch @ p["w"] + p["b"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(5):
        params, state, loss = step(params, state)
        params = jax.tree.map(Array.from_jax, params)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    updates, state = tx.update(params, state, params)
    near(optax.apply_updates(params, updates)["w"], np.asarray(params["w"] + updates["w"]))


@pytest.mark.slow
def test_a_flax_linen_module() -> None:
    model = nn.Sequential([nn.Dense(8), nn.relu, nn.LayerNorm(), nn.Dense(2)])
    x = device_put(V, named("x"))
    variables = device_put(model.init(jax.random.key(0), x), named())
    assert all(type(leaf) is Array for leaf in jax.tree.leaves(variables))
    out = model.apply(variables, x)
    near(out, model.apply(jax.tree.map(np.asarray, variables), V))
    grads = jax.grad(lambda v: model.apply(v, x).sum())(variables)
    assert jax.tree.structure(grads) == jax.tree.structure(variables)


@pytest.mark.slow
def test_a_flax_nnx_module() -> None:
    graph, state = nnx.split(nnx.Linear(16, 4, rngs=nnx.Rngs(0)))
    x = device_put(V, named("x"))
    model = nnx.merge(graph, device_put(state, named()))
    near(model(x), V @ np.asarray(model.kernel[...]) + np.asarray(model.bias[...]))
    grads = nnx.grad(lambda m: m(x).sum())(model)
    assert grads["kernel"][...].shape == (16, 4)


def test_results_of_jax_are_wrapped_by_from_jax() -> None:
    sharding = NamedSharding(MESH, P("x"))
    y = jax.jit(lambda t: t * 2)(device_put(V, sharding))
    wrapped = Array.from_jax(y)
    assert wrapped.sharding.is_equivalent_to(sharding, 2)
    assert same(wrapped, V * 2)


EXPLICIT = jax.make_mesh((len(DEVICES),), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
REPLACED = {
    jax: (
        *("jit", "device_put", "device_get", "shard_map", "live_arrays"),
        "make_array_from_callback",
        "make_array_from_process_local_data",
        "make_array_from_single_device_arrays",
    ),
    jax.sharding: ("reshard",),
    lax: ("with_sharding_constraint",),
}
"""Functions that programs replace by those of this package, by module."""


def scaled_loss(x: Any, y: Any) -> Any:
    return jnp.sum(jnp.sin(x) * y + 1)


def add_in_loop(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, x: x + 1, lax.with_sharding_constraint(x, named("x")))


USES = {
    "jit": lambda x: jax.jit(scaled_loss)(x, x),
    "jit of a loop": lambda x: jax.jit(add_in_loop)(x),
    "jit with donation": lambda x: jax.jit(jnp.sin, donate_argnums=0)(x),
    "jit inside": lambda x: jax.jit(lambda x: jax.jit(add_in_loop)(x) * 2)(x),
    "grad": lambda x: jax.grad(jax.jit(scaled_loss))(x, x),
    "grad inside": lambda x: jax.jit(jax.grad(scaled_loss))(x, x),
    "vmap": lambda x: jax.vmap(jax.jit(scaled_loss))(x, x),
    "jvp": lambda x: jax.jvp(jax.jit(add_in_loop), (x,), (x,)),
    "scan": lambda x: lax.scan(lambda c, row: (jax.jit(scaled_loss)(c, row), row), 1.0, x),
    "compile": lambda x: jax.jit(add_in_loop).lower(x).compile()(x),
    "trace": lambda x: jax.jit(add_in_loop).trace(x).lower().compile()(x),
    "eval_shape": lambda x: jax.jit(add_in_loop).eval_shape(x).shape,
    "export": lambda x: jax.export.export(jax.jit(add_in_loop))(x).call(x),
    "explain": lambda x: len(xlashard.explain(jax.jit(scaled_loss), x, x).collectives),
    "auto": lambda x: xlashard.pjit(scaled_loss, in_shardings=xlashard.AUTO)(x, x),
    "shard_map": lambda x: jax.shard_map(jnp.sin, mesh=MESH, in_specs=P("x"), out_specs=P("x"))(x),
    "reshard": lambda x: jax.sharding.reshard(V, NamedSharding(EXPLICIT, P("x"))),
    "constraint": lambda x: lax.with_sharding_constraint(x, named("y")),
    "device_put": lambda x: jax.device_put(jax.device_put(x, named("y")), named(None, "x")),
    "device_put of an uneven shape": lambda x: jax.device_put(np.ones(7), jax.devices()[0]),
    "device_get": lambda x: jax.device_get({"x": x, "key": jax.random.key(0)}["x"]),
    "from a callback": lambda x: jax.make_array_from_callback(V.shape, named("x"), lambda i: V[i]),
    "from shards": lambda x: jax.make_array_from_single_device_arrays(
        V.shape, x.sharding, [shard.data for shard in x.addressable_shards]
    ),
    "from local data": lambda x: jax.make_array_from_process_local_data(named("x"), V),
    "live_arrays": lambda x: len(jax.live_arrays()) > 0,
    "indexing": lambda x: (x[0], x[1:3, 2], x.at[0].set(1.0)),
    "iteration": lambda x: list(x),
    "reshape of a buffer": lambda x: device_put(V, jax.devices()[0]).reshape(-1),
    "numpy": lambda x: (xnp.sin(x), xnp.dot(x, x.T), xnp.where(x > 3, x, 0), xnp.linspace(0, 1, 3)),
    "numpy.linalg": lambda x: xnp.linalg.norm(x),
    "numpy inside": lambda x: jax.jit(lambda x: xnp.concatenate([x, xnp.zeros_like(x)]))(x),
}


@pytest.mark.slow
def test_functions_of_jax_may_be_replaced_by_ours(monkeypatch) -> None:
    x = device_put(V, named("x", "y"))

    # JAX itself can't call an export with constraints under GSPMD.
    unable = () if jax.config.jax_use_shardy_partitioner else ("export",)
    uses = {use: call for use, call in USES.items() if use not in unable}

    def results() -> dict[str, Any]:
        return {
            use: jax.tree.map(np.asarray, call(xlashard.numpy.copy(x)))
            for use, call in uses.items()
        }

    wanted = results()
    for module, names in REPLACED.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(xlashard, name))
    jax.clear_caches()
    got = results()
    for use in uses:
        jax.tree.map(near, got[use], wanted[use])
