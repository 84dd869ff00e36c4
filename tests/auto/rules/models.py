"""Steps of small models, as jaxprs with the primitives of real programs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

type Step = Callable[[], Any]


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def tokens(*dims: int) -> jax.ShapeDtypeStruct:
    return shape(*dims, dtype=jnp.int32)


def trained(loss: Any, parameters: Any, *batch: Any, optimizer: Any = None) -> Any:
    """Return the jaxpr of a training step of a loss function."""
    optimizer = optimizer or optax.adam(1e-3)

    def step(parameters: Any, state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, *batch)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    state = jax.eval_shape(optimizer.init, parameters)
    return jax.make_jaxpr(step)(parameters, state, *batch)


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)])
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(64, 16, rngs=rngs)
        self.blocks = nnx.List([Block(16, rngs) for _ in range(2)])

    def __call__(self, ids: Any) -> Any:
        x = self.table(ids)
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return self.table.attend(x)


def transformer() -> Any:
    made = nnx.eval_shape(lambda: Transformer(nnx.Rngs(0)))
    graph, parameters, rest = nnx.split(made, nnx.Param, ...)

    def loss(parameters: Any, rest: Any, ids: Any) -> Any:
        model = nnx.merge(graph, parameters, rest, copy=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(model(ids[:, :-1]), ids[:, 1:])
        return losses.mean()

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    return trained(loss, parameters, rest, tokens(4, 9), optimizer=optimizer)


class ConvNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, 8, (7, 7), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.depthwise = nnx.Conv(8, 8, (3, 3), feature_group_count=8, rngs=rngs)
        self.group_norm = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.up = nnx.ConvTranspose(8, 8, (3, 3), strides=2, rngs=rngs)
        self.head = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(nnx.relu(self.norm(self.stem(x))), (3, 3), (2, 2), "SAME")
        x = x + nnx.swish(self.group_norm(self.depthwise(x)))
        x = nnx.avg_pool(self.up(x), (2, 2), (2, 2))
        x = jax.image.resize(x, (*x.shape[:1], 8, 8, 8), "bilinear")
        return self.head(x.mean((1, 2)))


def conv_net() -> Any:
    made = nnx.eval_shape(lambda: ConvNet(nnx.Rngs(0)))
    graph, parameters, rest = nnx.split(made, nnx.Param, ...)

    def loss(parameters: Any, rest: Any, images: Any, labels: Any) -> Any:
        logits = nnx.merge(graph, parameters, rest, copy=True)(jnp.flip(images, 2))
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 10)).mean()

    optimizer = optax.chain(optax.trace(0.9, nesterov=True), optax.scale_by_learning_rate(0.1))
    images = shape(4, 32, 32, 3)
    return trained(loss, parameters, rest, images, tokens(4), optimizer=optimizer)


def experts() -> Any:
    def loss(parameters: Any, x: Any) -> Any:
        router, up, down = parameters
        weights, chosen = lax.top_k(jax.nn.softmax(x @ router), 2)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=4)
        hidden = jax.nn.silu(lax.ragged_dot(x[order // 2], up, sizes))
        made = lax.ragged_dot(hidden, down, sizes)[jnp.argsort(order)]
        return (made.reshape(*chosen.shape, -1) * weights[..., None]).sum(1).var()

    parameters = (shape(16, 4), shape(4, 16, 32), shape(4, 32, 16))
    return trained(loss, parameters, shape(24, 16), optimizer=optax.lion(1e-3))


def dispatched_experts() -> Any:
    def loss(parameters: Any, x: Any) -> Any:
        router, up, down = parameters
        gates = jax.nn.softmax(x @ router)
        mask = jax.nn.one_hot(jnp.argmax(gates, -1), 4)
        place = jnp.cumsum(mask, 1) * mask - 1
        slots = jax.nn.one_hot(place.max(-1).astype(int), 6) * mask.max(-1, keepdims=True)
        sent = jnp.einsum("gse,gsc,gsm->egcm", mask, slots, x)
        hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", sent, up))
        made = jnp.einsum("egch,ehm->egcm", hidden, down)
        return jnp.einsum("gse,gsc,egcm->gsm", gates * mask, slots, made).var()

    parameters = (shape(16, 4), shape(4, 16, 32), shape(4, 32, 16))
    return trained(loss, parameters, shape(2, 12, 16), optimizer=optax.adafactor(1e-3))


def state_space() -> Any:
    def loss(parameters: Any, x: Any) -> Any:
        decay, inward, outward, kernel = parameters
        x = lax.conv_general_dilated(
            x,
            kernel,
            (1,),
            [(3, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=8,
        )
        a = jnp.exp(-jax.nn.softplus(x[..., None] * decay))
        b = x[..., None] * inward

        def join(left: Any, right: Any) -> Any:
            return left[0] * right[0], left[1] * right[0] + right[1]

        _, state = lax.associative_scan(join, (a, b), axis=1)
        spectrum = jnp.fft.irfft(jnp.fft.rfft(x, axis=1) * 0.5, axis=1)
        return ((state * outward).sum(-1) + spectrum).var()

    parameters = (shape(8, 4), shape(8, 4), shape(8, 4), shape(4, 1, 8))
    return trained(loss, parameters, shape(2, 16, 8))


def graph_net() -> Any:
    def loss(parameters: Any, nodes: Any, senders: Any, receivers: Any) -> Any:
        for weight in parameters:
            sent = (nodes @ weight)[senders]
            scores = jax.ops.segment_max(sent.sum(-1), receivers, 12)
            share = jnp.exp(sent.sum(-1) - scores[receivers])
            total = jax.ops.segment_sum(share, receivers, 12)
            nodes = jax.ops.segment_sum(sent * (share / total[receivers])[:, None], receivers, 12)
        return jnp.linalg.norm(nodes)

    parameters = [shape(8, 8), shape(8, 8)]
    return trained(loss, parameters, shape(12, 8), tokens(30), tokens(30))


def decoding() -> Any:
    def step(weights: Any, cache: Any, token: Any, position: Any, key: Any) -> Any:
        x = weights["table"][token]
        angles = position / 100.0 ** (jnp.arange(4) / 4)
        a, b = jnp.split(x @ weights["q"], 2, -1)
        q = jnp.concatenate([a * jnp.cos(angles) - b, b + a * jnp.sin(angles)], -1)
        cache = lax.dynamic_update_slice(cache, (x @ weights["k"])[:, None], (0, position, 0))
        seen = jnp.arange(cache.shape[1]) <= position
        scores = jnp.where(seen, jnp.einsum("bd,btd->bt", q, cache), -jnp.inf)
        logits = jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), cache) @ weights["out"]
        best, _ = lax.top_k(logits, 5)
        logits = jnp.where(logits < best[:, -1:], -jnp.inf, logits)
        key, own = jax.random.split(key)
        return jax.random.categorical(own, logits), cache, key

    weights = {"table": shape(64, 8), "q": shape(8, 8), "k": shape(8, 8), "out": shape(8, 64)}
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.make_jaxpr(step)(weights, shape(4, 32, 8), tokens(4), tokens(), key)


def recommender() -> Any:
    def loss(parameters: Any, dense: Any, sparse: Any, labels: Any) -> Any:
        tables, weight = parameters
        found = [
            table.at[sparse[:, i]].get(mode="fill", fill_value=0) for i, table in enumerate(tables)
        ]
        x = jnp.stack([dense @ weight, *found], 1)
        pairs = jnp.einsum("bid,bjd->bij", x, x)[:, *np.tril_indices(3, -1)]
        return optax.sigmoid_binary_cross_entropy(pairs.sum(-1), labels).mean()

    parameters = ([shape(100, 8), shape(50, 8)], shape(4, 8))
    batch = (shape(16, 4), tokens(16, 2), shape(16))
    return trained(loss, parameters, *batch, optimizer=optax.adagrad(0.1))


def orthogonalized() -> Any:
    """Return a step of Muon, whose optimizer holds matrix products in a loop."""
    optimizer = optax.contrib.muon(0.1)
    batch = shape(4, 16)
    return trained(lambda w, x: jnp.tanh(x @ w).var(), shape(16, 8), batch, optimizer=optimizer)


MODELS: tuple[Step, ...] = (
    *(transformer, conv_net, experts, dispatched_experts, state_space, graph_net, decoding),
    *(recommender, orthogonalized),
)
