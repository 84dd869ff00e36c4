"""Train a flax nnx MLP over eight devices, in plain JAX, without importing xlashard.

    python examples/nnx.py
    xlashard explain -- python examples/nnx.py

It learns the product of two numbers. `explain` runs it as it is and reports its programs.
"""

import os

# Eight emulated devices on the CPU. JAX prefers GPUs and TPUs where it finds them.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, BATCH, STEPS = 512, 1024, 75

# Two devices along "model", which cuts the weights; the others along "data", which cuts the batch.
count = jax.device_count()
shape = (count // min(2, count), min(2, count))
mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


class Multiplier(nnx.Module):
    """Three dense layers, whose weights name their mesh axes."""

    def __init__(self, rngs):
        def named(*names):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)

        self.up = nnx.Linear(2, WIDTH, rngs=rngs)
        self.wide = nnx.Linear(WIDTH, WIDTH, kernel_init=named(None, "model"), rngs=rngs)
        self.down = nnx.Linear(WIDTH, 1, kernel_init=named("model", None), rngs=rngs)

    def __call__(self, x):
        """Return products [batch, 1] of the columns of `x`, [batch, 2]."""
        return self.down(nnx.gelu(self.wide(nnx.gelu(self.up(x)))))


@nnx.jit
def create():
    """Return a model whose weights are sharded as it names, and its optimizer."""
    model = Multiplier(nnx.Rngs(0))
    state = nnx.state(model)
    nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, x, y):
    """Update the model, and return the loss before the step."""

    def loss_of(model):
        return ((model(x) - y) ** 2).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


with jax.set_mesh(mesh):
    model, optimizer = create()
    rows = NamedSharding(mesh, P("data"))
    random = np.random.default_rng(0)
    for number in range(STEPS + 1):
        x = random.uniform(-1, 1, size=(BATCH, 2)).astype(np.float32)
        batch = jax.device_put((x, x[:, :1] * x[:, 1:]), rows)
        loss = train_step(model, optimizer, *batch)
        if number % 25 == 0:
            print(f"step {number:3}  loss {loss:.4f}", flush=True)
