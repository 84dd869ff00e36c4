"""Train a flax nnx transformer whose modules name the axes of their weights.

    python examples/nnx_transformer.py

It learns to sort digits: [3, 1, 2] becomes [1, 2, 3]. The modules name the dimensions of their
weights; one table lists the mesh axis that each name is sharded over.
"""

import os

# Eight emulated devices on the CPU. JAX prefers GPUs and TPUs where it finds them.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from flax import nnx

import xlashard as xs
from xlashard import P

WIDTH, HEADS, LAYERS, LENGTH, BATCH, STEPS = 64, 4, 2, 12, 128, 100

# Two devices along "model", which cuts the weights; the others along "data", which cuts the batch.
devices = np.array(jax.devices())
mesh = xs.Mesh(devices.reshape(-1, min(2, devices.size)), ("data", "model"))
RULES = [("embed", None), ("hidden", "model"), ("heads", "model")]


def named(*names):
    """Return an initializer of weights whose dimensions have names."""
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


class Block(nnx.Module):
    """Attention and two dense layers, each added to its input."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(
            num_heads=HEADS,
            in_features=WIDTH,
            kernel_init=named("embed", "heads", None),
            out_kernel_init=named("heads", None, "embed"),
            decode=False,
            rngs=rngs,
        )
        up, down = named("embed", "hidden"), named("hidden", "embed")
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, kernel_init=up, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, kernel_init=down, use_bias=False, rngs=rngs)

    def __call__(self, x):
        """Return values of the shape of `x`, [batch, length, width]."""
        x += self.attention(jax.nn.standardize(x))
        return x + self.down(nnx.relu(self.up(jax.nn.standardize(x))))


class Sorter(nnx.Module):
    """Transformer from digits [batch, length] to logits of the sorted ones."""

    def __init__(self, rngs):
        self.digit = nnx.Embed(10, WIDTH, rngs=rngs)
        self.position = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.logits = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, digits):
        """Return logits [batch, length, 10]."""
        x = self.digit(digits) + self.position(np.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.logits(jax.nn.standardize(x))


def create():
    """Return the model and its optimizer."""
    model = Sorter(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)


def train_step(state, digits, target):
    """Return the state of model and optimizer after one step, and the loss before it."""
    model, optimizer = nnx.merge(graph, state)

    def loss_of(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(digits), target).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return nnx.state((model, optimizer)), loss


with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
    # Modules without arrays, and by the names of their axes a spec for each array.
    graph, shapes = nnx.split(nnx.eval_shape(create))
    layout = nnx.get_partition_spec(shapes)
    # Each device makes its own part of every weight; none holds the whole.
    state = xs.pjit(lambda: nnx.state(create()), out_shardings=layout)()
    step = xs.pjit(
        train_step,
        in_shardings=(layout, P("data"), P("data")),
        out_shardings=(layout, P()),
        donate_argnums=0,  # the new state takes over the memory of the old
    )
    random = np.random.default_rng(0)
    for number in range(STEPS + 1):
        digits = random.integers(10, size=(BATCH, LENGTH))
        state, loss = step(state, digits, np.sort(digits))
        if number % 20 == 0:
            print(f"step {number:3}  loss {loss:.3f}", flush=True)

    model, _ = nnx.merge(graph, state)
    digits = random.integers(10, size=(BATCH, LENGTH))
    right = (model(digits).argmax(-1) == np.sort(digits)).mean()
    print(f"new digits at the right place: {right:.1%}")

    print("\nWhere a weight lies:\n")
    print(xs.visualize(model.blocks[0].up.kernel.get_value()))
    print("\nWhat a step sends between the devices, and what it holds:\n")
    print(xs.explain(step, state, digits, digits))
