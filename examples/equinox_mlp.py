"""Train an equinox MLP with fully sharded data parallelism: parameters and batch over all devices.

    python examples/equinox_mlp.py

It learns to which arm of two spirals a point belongs. No device holds all parameters: a step
gathers each weight where it is used, and adds up the gradients.
"""

import os

# Eight emulated devices on the CPU. JAX prefers GPUs and TPUs where it finds them.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import xlashard as xs
from xlashard import P

POINTS, STEPS = 512, 200

mesh = xs.Mesh(np.array(jax.devices()), ("data",))
whole, rows = xs.NamedSharding(mesh, P()), xs.NamedSharding(mesh, P("data"))
optimizer = optax.adam(3e-3)


def place(leaf):
    """Return the sharding of a leaf: its rows over all devices if they divide, else whole."""
    return rows if np.ndim(leaf) and np.shape(leaf)[0] % mesh.size == 0 else whole


# equinox keeps functions, such as the activation, in the model: only its arrays are sharded.
model = eqx.nn.MLP(2, "scalar", width_size=256, depth=3, key=jax.random.key(0))
params, functions = eqx.partition(model, eqx.is_array)
state = (params, optimizer.init(params))
layout = jax.tree.map(place, state)
state = xs.device_put(state, layout)


def spirals(random):
    """Return points [points, 2] on two noisy spirals, and on which of them each one is."""
    arm = random.integers(2, size=POINTS)
    turn = random.uniform(0.5, 4.5, size=POINTS) * np.pi
    points = np.stack([np.cos(turn + arm * np.pi), np.sin(turn + arm * np.pi)], axis=1)
    points = points * turn[:, None] / 14 + random.normal(scale=0.02, size=(POINTS, 2))
    return points.astype(np.float32), arm.astype(np.float32)


def scores(params, points):
    """Return a number for each point; above 0 for the second arm."""
    return jax.vmap(eqx.combine(params, functions))(points)


def loss_of(params, points, arm):
    """Return the mean loss of a batch."""
    return optax.sigmoid_binary_cross_entropy(scores(params, points), arm).mean()


def train_step(state, points, arm):
    """Return the state after one step, and the loss before it."""
    params, optimizer_state = state
    loss, gradients = jax.value_and_grad(loss_of)(params, points, arm)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state)
    return (eqx.apply_updates(params, updates), optimizer_state), loss


# The new state has the sharding of the old one, and reuses its buffers.
step = xs.pjit(
    train_step,
    in_shardings=(layout, rows, rows),
    out_shardings=(layout, whole),
    donate_argnums=0,
)

random = np.random.default_rng(0)
for number in range(STEPS + 1):
    batch = xs.device_put(spirals(random), rows)
    state, loss = step(state, *batch)
    if number % 25 == 0:
        print(f"step {number:3}  loss {loss:.4f}", flush=True)

points, arm = spirals(random)
right = jnp.mean((xs.pjit(scores)(state[0], points) > 0) == arm)
print(f"new points on the right arm: {right:.1%}")

print("\nWhere a weight lies:\n")
print(xs.visualize(state[0].layers[1].weight))
print("\nWhat a step sends between the devices, and what it holds:\n")
print(xs.explain(step, state, *batch))
