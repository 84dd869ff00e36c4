"""Script that trains through libraries, and prints what it reads back after each step."""

import tempfile

import equinox as eqx
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import xlashard

mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
rows, everywhere = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
x = jax.device_put(np.linspace(0, 1, 128, dtype=np.float32).reshape(8, 16), rows)
y = jax.device_put(np.ones((8, 4), np.float32), rows)
optimizer = optax.adam(1e-2)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


@nnx.jit
def nnx_step(model, state, x, y):
    loss, gradient = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
    state.update(model, gradient)
    return loss


@eqx.filter_jit
def eqx_step(model, state, x, y):
    loss, gradient = eqx.filter_value_and_grad(
        lambda model: ((jax.vmap(model)(x) - y) ** 2).mean()
    )(model)
    updates, state = optimizer.update(gradient, state, model)
    return eqx.apply_updates(model, updates), state, loss


gram = xlashard.pjit(lambda x: x @ x.T, out_shardings=everywhere)


@jax.jit
def outer(x):
    return gram(x).sum()


def device_mean(x):
    return jax.lax.pmean(x, "i")


mean = jax.pmap(device_mean, axis_name="i")

model = Model(nnx.Rngs(0))
nnx.update(model, jax.device_put(nnx.state(model), everywhere))
state = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
layer = eqx.nn.Linear(16, 4, key=jax.random.key(0))
layer = jax.tree.map(lambda leaf: jax.device_put(leaf, everywhere), layer)
layer_state = jax.device_put(optimizer.init(layer), everywhere)
with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder) as manager:
    for number in range(2):
        print("nnx", f"{float(nnx_step(model, state, x, y)):.5f}")
        layer, layer_state, loss = eqx_step(layer, layer_state, x, y)
        print("eqx", f"{loss.item():.5f}")
        manager.save(number, args=ocp.args.StandardSave({"w": layer.weight}))
    manager.wait_until_finished()
    restored = manager.restore(1, args=ocp.args.StandardRestore({"w": layer.weight}))
weight = np.asarray(restored["w"])
print("saved", bool((weight == layer.weight).all()), f"{weight.std():.5f}")
print("pjit", f"{float(outer(x)):.3f}", f"{float(gram(x)[1, 2]):.3f}")
print("pmap", f"{float(mean(x)[0, 0]):.5f}")
