"""Run in its own process: current libraries, in a program with the era's names installed."""

import pathlib
import sys
import tempfile

import xlashard.legacy.install  # isort: skip

import equinox
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import serialization
from flax.training import train_state
from jax.experimental.maps import Mesh as MeshThen
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
assert isinstance(MeshThen(mesh.devices, mesh.axis_names), type(mesh))
rows = NamedSharding(mesh, P("data"))


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return nn.Dense(4)(nn.relu(nn.Dense(8, kernel_init=init)(x)))


# flax and optax: a training step, with names of mesh axes on the parameters.
model = Layers()
x = jax.device_put(jnp.ones((8, 4)), rows)
variables = model.init(jax.random.PRNGKey(0), x)
specs = nn.get_partition_spec(variables)
params = nn.unbox(variables)["params"]
placed = jax.tree.map(
    lambda p, s: jax.device_put(p, NamedSharding(mesh, s)),
    params,
    specs["params"],
)
assert placed["Dense_1"]["kernel"].sharding.spec[1] == "model"
state = train_state.TrainState.create(apply_fn=model.apply, params=placed, tx=optax.adamw(1e-2))


@jax.jit
def step(state, x):
    def loss(params):
        return (state.apply_fn({"params": params}, x) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


first = step(state, x)[1]
for _ in range(5):
    state, last = step(state, x)
assert last < first
assert serialization.from_bytes(params, serialization.to_bytes(params))

# equinox.
layer = equinox.nn.Linear(4, 2, key=jax.random.key(0))
assert equinox.filter_jit(layer)(jnp.ones(4)).shape == (2,)

# orbax: saved, and restored under a different sharding.
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "saved"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state.params)
        checkpointer.wait_until_finished()
        whole = NamedSharding(mesh, P())
        types = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=whole), state.params
        )
        read = checkpointer.restore(path, types)
for old, new in zip(jax.tree.leaves(state.params), jax.tree.leaves(read), strict=True):
    np.testing.assert_array_equal(np.asarray(old), np.asarray(new))
    assert new.sharding.is_fully_replicated

xlashard.legacy.install.uninstall()
assert not hasattr(jax, "tree_map")
assert step(state, x)[1] < last
print("done", file=sys.stdout)
