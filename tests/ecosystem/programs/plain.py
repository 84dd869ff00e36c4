"""Programs in plain JAX, with their own parameters and mesh code."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.ecosystem.programs import jit, program


def devices_mesh(**axes):
    shape = tuple(axes.values())
    return Mesh(mesh_utils.create_device_mesh(shape), tuple(axes))


def dense(key, *shape):
    return jax.random.normal(key, shape) / np.sqrt(shape[0])


def haiku_style(apply):
    """Pure functions made of a closure that requests parameters by name, as in Haiku."""

    class Frame:
        params = None
        key = None

    def parameter(name, shape):
        if Frame.params is None:
            Frame.key, key = jax.random.split(Frame.key)
            Frame.made[name] = dense(key, *shape)
            return Frame.made[name]
        return Frame.params[name]

    def init(key, *args):
        Frame.params, Frame.key, Frame.made = None, key, {}
        apply(parameter, *args)
        return Frame.made

    def run(params, *args):
        Frame.params = params
        return apply(parameter, *args)

    return init, run


@program
def haiku_closure():
    def mlp(parameter, x):
        for i, width in enumerate((32, 32, 8)):
            x = jnp.tanh(x @ parameter(f"linear_{i}/w", (x.shape[-1], width)))
        return x

    init, run = haiku_style(mlp)
    x = np.ones((16, 32), np.float32)
    params = init(jax.random.key(0), x)
    mesh = devices_mesh(data=8)

    def loss(params, x):
        return (run(params, x) ** 2).mean()

    step = jax.value_and_grad(loss)
    return jit, step, {}, params, jax.device_put(x, NamedSharding(mesh, P("data")))


@program
def optax_loop():
    mesh = devices_mesh(data=4, model=2)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    params = {"w": jnp.ones((16, 32)), "b": jnp.zeros(32)}
    cut = {"w": NamedSharding(mesh, P(None, "model")), "b": NamedSharding(mesh, P("model"))}
    params = jax.device_put(params, cut)
    state = (params, jax.jit(optimizer.init)(params))

    def train(state, batches):
        def step(state, batch):
            params, opt = state
            loss, grads = jax.value_and_grad(
                lambda p: jnp.mean((batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2)
            )(params)
            updates, opt = optimizer.update(grads, opt, params)
            return (optax.apply_updates(params, updates), opt), loss

        return jax.lax.scan(step, state, batches)

    rows = NamedSharding(mesh, P(None, "data"))
    batches = {"x": np.ones((3, 8, 16), np.float32), "y": np.ones((3, 8, 32), np.float32)}
    return jit, train, {"donate_argnums": 0}, state, jax.device_put(batches, rows)


class BatchNorm(NamedTuple):
    scale: jax.Array
    mean: jax.Array


@program
def resnet():
    mesh = devices_mesh(data=8)
    keys = jax.random.split(jax.random.key(0), 6)
    blocks = [(dense(keys[2 * i], 3, 3, 8, 8), dense(keys[2 * i + 1], 3, 3, 8, 8)) for i in (0, 1)]
    params = {"stem": dense(keys[4], 3, 3, 3, 8), "blocks": blocks, "head": dense(keys[5], 8, 10)}
    norm = BatchNorm(jnp.ones(8), jnp.zeros(8))

    def conv(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(params, norm, images, labels):
        x = conv(images, params["stem"])
        mean = x.mean((0, 1, 2))
        x = (x - mean) * norm.scale
        for first, second in params["blocks"]:
            x = x + conv(jax.nn.relu(conv(x, first)), second)
        logits = x.mean((1, 2)) @ params["head"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, norm._replace(mean=0.9 * norm.mean + 0.1 * mean)

    def step(params, norm, images, labels):
        grads, norm = jax.grad(loss, has_aux=True)(params, norm, images, labels)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), norm

    rows = NamedSharding(mesh, P("data"))
    images = jax.device_put(np.ones((8, 8, 8, 3), np.float32), rows)
    labels = jax.device_put(np.zeros(8, np.int32), rows)
    return jit, step, {"donate_argnums": (0, 1)}, params, norm, images, labels


@program
def shard_map_ring():
    mesh = devices_mesh(ring=8)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("ring"), P("ring")), out_specs=P("ring")
    )
    def ring_attention(q, kv):
        def rotate(carry, _):
            total, kv = carry
            total = total + jax.nn.softmax(q @ kv.T) @ kv
            pairs = [(i, (i + 1) % 8) for i in range(8)]
            return (total, jax.lax.ppermute(kv, "ring", pairs)), None

        start = jax.lax.pcast(jnp.zeros(q.shape), "ring", to="varying")
        return jax.lax.scan(rotate, (start, kv), None, length=8)[0][0]

    rows = NamedSharding(mesh, P("ring"))
    x = jax.device_put(np.ones((64, 16), np.float32), rows)
    return jit, ring_attention, {}, x, x


@program
def scan_rnn():
    mesh = devices_mesh(batch=8)
    params = {"in": dense(jax.random.key(0), 16, 96), "hidden": dense(jax.random.key(1), 32, 96)}

    def gru(params, hidden, x):
        z, r, n = jnp.split(x @ params["in"] + hidden @ params["hidden"], 3, axis=-1)
        z, r = jax.nn.sigmoid(z), jax.nn.sigmoid(r)
        return (1 - z) * jnp.tanh(r * n) + z * hidden

    def loss(params, xs):
        start = jnp.zeros((xs.shape[1], 32))
        _, hiddens = jax.lax.scan(lambda h, x: (new := gru(params, h, x), new), start, xs)
        return (hiddens**2).mean()

    xs = jax.device_put(np.ones((12, 16, 16), np.float32), NamedSharding(mesh, P(None, "batch")))
    return jit, jax.value_and_grad(loss), {}, params, xs


@program
def ragged_moe():
    mesh = devices_mesh(data=8)
    experts = jax.random.normal(jax.random.key(0), (4, 16, 16))
    router = dense(jax.random.key(1), 16, 4)

    def layer(router, experts, x):
        choice = jnp.argmax(x @ router, axis=-1)
        order = jnp.argsort(choice)
        sizes = jnp.bincount(choice, length=4)
        outputs = jax.lax.ragged_dot(x[order], experts, sizes.astype(jnp.int32))
        return outputs[jnp.argsort(order)]

    rows = NamedSharding(mesh, P("data"))
    return (
        jit,
        layer,
        {"out_shardings": rows},
        router,
        experts,
        jax.device_put(np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32), rows),
    )


@program
def diffusion_unet():
    mesh = devices_mesh(data=4, model=2)
    key = jax.random.split(jax.random.key(0), 4)
    params = {
        "down": dense(key[0], 3, 3, 4, 16),
        "middle": dense(key[1], 3, 3, 16, 16),
        "up": dense(key[2], 3, 3, 16, 4),
        "time": dense(key[3], 8, 16),
    }
    numbers = ("NHWC", "HWIO", "NHWC")

    def unet(params, noisy, time):
        embedded = jnp.sin(time[:, None] * jnp.arange(1, 9)) @ params["time"]
        down = jax.lax.conv_general_dilated(
            noisy, params["down"], (2, 2), "SAME", dimension_numbers=numbers
        )
        middle = jax.lax.conv_general_dilated(
            jax.nn.silu(down + embedded[:, None, None]),
            params["middle"],
            (1, 1),
            "SAME",
            dimension_numbers=numbers,
        )
        up = jax.image.resize(middle + down, (*noisy.shape[:3], 16), "nearest")
        return jax.lax.conv_general_dilated(
            up, params["up"], (1, 1), "SAME", dimension_numbers=numbers
        )

    def step(params, images, key):
        noise = jax.random.normal(key, images.shape)
        time = jax.random.uniform(key, (images.shape[0],))
        noisy = images + time[:, None, None, None] * noise
        loss = lambda p: jnp.mean((unet(p, noisy, time) - noise) ** 2)  # noqa: E731
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    images = np.ones((8, 8, 8, 4), np.float32)
    images = jax.device_put(images, NamedSharding(mesh, P("data")))
    return jit, step, {"donate_argnames": "params"}, params, images, jax.random.key(1)


@program
def kv_cache_decode():
    mesh = devices_mesh(data=4, heads=2)
    cut = NamedSharding(mesh, P("data", None, "heads"))
    cache = {n: jax.device_put(jnp.zeros((4, 32, 4, 8)), cut) for n in ("k", "v")}
    weights = {n: dense(jax.random.key(i), 32, 32) for i, n in enumerate("qkvo")}

    def decode(weights, cache, token, position):
        heads = lambda name: (token @ weights[name]).reshape(-1, 1, 4, 8)  # noqa: E731
        cache = {
            name: jax.lax.dynamic_update_slice(old, heads(name), (0, position, 0, 0))
            for name, old in cache.items()
        }
        scores = jnp.einsum("bqhd,bkhd->bhqk", heads("q"), cache["k"])
        seen = jnp.arange(32) <= position
        weights_of = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights_of, cache["v"])
        return cache, mixed.reshape(-1, 32) @ weights["o"]

    token = jax.device_put(np.ones((4, 32), np.float32), NamedSharding(mesh, P("data")))
    return jit, decode, {"donate_argnames": ("cache",)}, weights, cache, token, 3


@program
def maxtext_like():
    """Logical axis names, rules, a mesh of its own, abstract state and out_shardings."""
    mesh = devices_mesh(data=1, fsdp=4, tensor=2)
    rules = {"batch": ("data", "fsdp"), "embed": "fsdp", "mlp": "tensor", "vocab": "tensor"}
    spec = lambda *names: P(*[rules.get(n) for n in names])  # noqa: E731
    logical = {
        "embedding": ("vocab", "embed"),
        "layers": {"wi": (None, "embed", "mlp"), "wo": (None, "mlp", "embed")},
    }
    shapes = {"embedding": (64, 32), "layers": {"wi": (2, 32, 64), "wo": (2, 64, 32)}}
    is_names = lambda x: isinstance(x, tuple)  # noqa: E731
    shardings = jax.tree.map(
        lambda names: NamedSharding(mesh, spec(*names)), logical, is_leaf=is_names
    )
    state = jax.tree.map(
        lambda shape, s: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=s),
        shapes,
        shardings,
        is_leaf=is_names,
    )
    rows = NamedSharding(mesh, spec("batch"))

    def loss(params, tokens):
        x = params["embedding"][tokens]
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec("batch", None, None)))

        @jax.checkpoint
        def block(x, layer):
            hidden = jax.nn.relu(x @ layer["wi"])
            hidden = jax.lax.with_sharding_constraint(
                hidden, NamedSharding(mesh, spec("batch", None, "mlp"))
            )
            return x + hidden @ layer["wo"], None

        x, _ = jax.lax.scan(block, x, params["layers"])
        logits = x @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    def train_step(params, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    options = {
        "in_shardings": (shardings, rows),
        "out_shardings": (shardings, None),
        "donate_argnums": 0,
    }
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    return jit, train_step, options, state, tokens


@program
def lora():
    mesh = devices_mesh(data=4, model=2)
    base = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, P(None, "model")))
    adapters = {"a": dense(jax.random.key(0), 64, 4), "b": jnp.zeros((4, 64))}

    def loss(adapters, x):
        # The frozen base is closed over.
        return ((x @ base + (x @ adapters["a"]) @ adapters["b"]) ** 2).mean()

    def step(adapters, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, adapters, jax.grad(loss)(adapters, x))

    x = jax.device_put(np.ones((16, 64), np.float32), NamedSharding(mesh, P("data")))
    return jit, step, {"donate_argnums": (0,)}, adapters, x


@program
def graph_network():
    mesh = devices_mesh(edges=8)

    def message_passing(nodes, senders, receivers, weight):
        for _ in range(2):
            messages = jnp.tanh(nodes[senders] @ weight)
            nodes = nodes + jax.ops.segment_sum(messages, receivers, num_segments=nodes.shape[0])
        return nodes

    cut = NamedSharding(mesh, P("edges"))
    rng = np.random.default_rng(0)
    ends = [jax.device_put(rng.integers(0, 20, 64).astype(np.int32), cut) for _ in range(2)]
    return jit, message_passing, {}, jnp.ones((20, 8)), *ends, jnp.ones((8, 8))


@program
def recommender():
    mesh = devices_mesh(data=2, table=4)
    tables = jax.device_put(jnp.ones((4, 100, 8)), NamedSharding(mesh, P("table")))

    def click(tables, ids, features):
        looked_up = jax.vmap(lambda table, i: table[i], in_axes=(0, 1), out_axes=1)(tables, ids)
        return jax.nn.sigmoid(jnp.einsum("btd,bd->b", looked_up, features))

    rows = NamedSharding(mesh, P("data"))
    ids = jax.device_put(np.zeros((16, 4), np.int32), rows)
    return jit, click, {}, tables, ids, jax.device_put(np.ones((16, 8), np.float32), rows)


@program
def state_space():
    mesh = devices_mesh(data=8)

    def mamba(x, decay):
        gates = jax.nn.sigmoid(x * decay)

        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        return jax.lax.associative_scan(combine, (gates, x), axis=1)[1]

    x = jax.device_put(np.ones((8, 32, 16), np.float32), NamedSharding(mesh, P("data")))
    return jit, mamba, {}, x, jnp.ones(16)


@program
def pmapped():
    @functools.partial(jax.pmap, axis_name="devices")
    def step(params, x):
        grads = jax.grad(lambda p: ((x @ p) ** 2).mean())(params)
        return params - 0.1 * jax.lax.pmean(grads, "devices")

    return step, np.ones((8, 16, 4), np.float32), np.ones((8, 2, 16), np.float32)


class Trainer:
    """A class whose methods are jitted, with itself as a static argument."""

    def __init__(self, rate):
        self.rate = rate

    @functools.partial(jax.jit, static_argnums=0, static_argnames="train", donate_argnums=1)
    def step(self, weights, batch, *, train=True):
        grads = jax.grad(lambda w: jnp.abs(batch @ w).sum())(weights)
        return weights - self.rate * grads if train else weights


@program
def method_of_a_trainer():
    mesh = devices_mesh(data=8)
    batch = jax.device_put(np.ones((16, 8), np.float32), NamedSharding(mesh, P("data")))
    step = functools.partial(Trainer(0.5).step, train=True)
    return step, jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P())), batch


@program
def explicit_mesh():
    mesh = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Explicit,) * 2)

    on = lambda *spec: NamedSharding(mesh, P(*spec))  # noqa: E731

    def forward(x, w_in, w_out):
        hidden = jnp.einsum("bd,dh->bh", x, w_in, out_sharding=on("data", "model"))
        out = jnp.einsum("bh,hd->bd", hidden, w_out, out_sharding=on("data", None))
        return jax.sharding.reshard(out, on(None, "model"))

    put = lambda x, *spec: jax.device_put(x, on(*spec))  # noqa: E731
    return (
        jit,
        forward,
        {},
        put(jnp.ones((16, 8)), "data"),
        put(jnp.ones((8, 32)), None, "model"),
        put(jnp.ones((32, 8)), "model"),
    )


@program
def contrastive():
    mesh = devices_mesh(data=8)

    @jax.custom_vjp
    def scaled(x):
        return x * 2.0

    scaled.defvjp(lambda x: (scaled(x), None), lambda _, g: (g * 2.0,))

    def loss(towers, images, texts):
        def embed(w, x):
            y = scaled(x @ w)
            return y / jnp.linalg.norm(y, axis=-1, keepdims=True)

        logits = embed(towers["image"], images) @ embed(towers["text"], texts).T
        labels = jnp.arange(logits.shape[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    towers = {"image": dense(jax.random.key(0), 32, 16), "text": dense(jax.random.key(1), 32, 16)}
    rows = NamedSharding(mesh, P("data"))
    x = jax.device_put(np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32), rows)
    return jit, jax.value_and_grad(loss), {}, towers, x, x
