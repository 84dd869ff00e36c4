"""Train a small transformer in plain JAX, with the batch and the weights sharded over a mesh.

    python examples/plain_transformer.py

It predicts the next character of the help texts that come with Python. Every weight has a
`PartitionSpec`, by its name; the optimizer's state follows.
"""

import os
import pydoc_data.topics

# Eight emulated devices on the CPU. JAX prefers GPUs and TPUs where it finds them.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import xlashard as xs
from xlashard import P

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH, STEPS = 128, 64, 4, 2, 64, 32, 60

# Two devices along "model", which cuts the weights; the others along "data", which cuts the batch.
devices = np.array(jax.devices())
mesh = xs.Mesh(devices.reshape(-1, min(2, devices.size)), ("data", "model"))
optimizer = optax.adam(3e-3)

# By name of the weight: which mesh axis each of its dimensions is sharded over.
SPECS = {
    "qkv": P(None, None, "model"),  # [3, width, heads, width / heads]
    "out": P("model"),  # [heads, width / heads, width]
    "up": P(None, "model"),  # [width, 4 width]
    "down": P("model"),  # [4 width, width]
}


def initialize(key):
    """Return the parameters and the optimizer's state."""
    keys = iter(jax.random.split(key, 2 + 4 * LAYERS))

    def weight(*shape, inputs=WIDTH):
        return jax.random.normal(next(keys), shape) / np.sqrt(inputs)

    def layer():
        return {
            "qkv": weight(3, WIDTH, HEADS, WIDTH // HEADS),
            "out": weight(HEADS, WIDTH // HEADS, WIDTH),
            "up": weight(WIDTH, 4 * WIDTH),
            "down": weight(4 * WIDTH, WIDTH, inputs=4 * WIDTH),
        }

    params = {
        "embedding": weight(VOCABULARY, WIDTH),
        "position": weight(LENGTH, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
    }
    return params, optimizer.init(params)


def loss_of(params, text):
    """Return the mean loss of predicting each next character, for `text` as [batch, length + 1]."""
    x = params["embedding"][text[:, :-1]] + params["position"]
    for layer in params["layers"]:
        q, k, v = jnp.einsum("btd,ndhk->nbthk", jax.nn.standardize(x), layer["qkv"])
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x += jnp.einsum("bthk,hkd->btd", attended, layer["out"])
        x += jax.nn.relu(jax.nn.standardize(x) @ layer["up"]) @ layer["down"]
    logits = jax.nn.standardize(x) @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def train_step(params, optimizer_state, text):
    """Return the parameters and the optimizer's state after one step, and the loss before it."""
    loss, gradients = jax.value_and_grad(loss_of)(params, text)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
    return optax.apply_updates(params, updates), optimizer_state, loss


def spec_of(path, _):
    """Return the spec of a parameter, and of its optimizer state, by its name."""
    return SPECS.get(getattr(path[-1], "key", None), P())


def batches():
    """Yield random pieces of the text, as [batch, length + 1]."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")
    characters = np.frombuffer(text, np.uint8)
    random = np.random.default_rng(0)
    while True:
        starts = random.integers(len(characters) - LENGTH, size=(BATCH, 1))
        yield characters[starts + np.arange(LENGTH + 1)].astype(np.int32)


with jax.set_mesh(mesh):
    key = jax.random.key(0)
    layout = jax.tree.map_with_path(spec_of, jax.eval_shape(initialize, key))
    # Each device makes its own part of every weight; none holds the whole.
    params, optimizer_state = xs.pjit(initialize, out_shardings=layout)(key)
    step = xs.pjit(
        train_step,
        in_shardings=(*layout, P("data")),
        out_shardings=(*layout, P()),
        donate_argnums=(0, 1),  # the new state takes over the memory of the old
    )
    texts = batches()
    for number in range(STEPS + 1):
        text = next(texts)
        params, optimizer_state, loss = step(params, optimizer_state, text)
        if number % 10 == 0:
            print(f"step {number:3}  loss {loss:.3f}", flush=True)

    print("\nWhere a weight lies:\n")
    print(xs.visualize(params["layers"][0]["up"]))
    print("\nWhat a step sends between the devices, and what it holds:\n")
    print(xs.explain(step, params, optimizer_state, text))
