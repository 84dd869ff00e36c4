"""Decoder-only transformer in plain JAX functions, over bytes or other tokens, and its text.

RMSNorm, rotary positions, grouped-query attention, and a feed-forward layer or experts.
Parameters are a dict of arrays in the structure of `declare`.
Letters in shapes: B batch, L length, W width, H query heads, K key and value heads, D features of
one head, M hidden features of the feed-forward part, N layers, V tokens of the vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

import xlashard
from xlashard.train.config.settings import ModelSettings, Settings
from xlashard.train.model.attention import (
    STREAM,
    WHOLE,
    attend,
    attention_layer,
    norm,
    project,
    project_out,
    rotary_angles,
    with_kernel_of,
)
from xlashard.train.model.blockwise import cross_entropy
from xlashard.train.model.experts import mix_dropless, mix_experts
from xlashard.train.model.layout import HEAD, Axes, Layout, declare, placed, unplaced
from xlashard.train.model.products import product

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}


def forward(
    parameters: dict[str, Any],
    tokens: jax.Array,
    model: ModelSettings,
    place: Layout = unplaced,
) -> jax.Array:
    """Return the logits of the next token at every position.

    Args:
        parameters: Arrays in the structure of `declare`.
        tokens: Integers [B, L].
        model: The shape of the model.
        place: Constrains activations on a mesh.

    Returns:
        Unnormalised log-probabilities [B, L, V], float32.
    """
    x, _ = _features(parameters, tokens, model, place)
    return _scores(x, _head(parameters, x.dtype, model, place), place)


def loss(
    parameters: dict[str, Any],
    tokens: jax.Array,
    model: ModelSettings,
    place: Layout = unplaced,
) -> jax.Array:
    """Return the mean cross-entropy of the next token, in nats per token.

    Args:
        parameters: Arrays in the structure of `declare`.
        tokens: Integers [B, L + 1]; every token but the first is predicted.
        model: The shape of the model.
        place: Constrains activations on a mesh.

    Returns:
        A float32 scalar.
    """
    return measure(parameters, tokens, model, place)[1]["loss"]


def measure(
    parameters: dict[str, Any],
    tokens: jax.Array,
    model: ModelSettings,
    place: Layout = unplaced,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the training objective and its components.

    Args:
        parameters: Arrays in the structure of `declare`.
        tokens: Integers [B, L + 1]; every token but the first is predicted.
        model: The shape of the model.
        place: Constrains activations on a mesh.

    Returns:
        The objective, a float32 scalar, and float32 scalars: ``loss``, the cross-entropy in nats
        per token, and for a model of experts ``balance`` and ``dropped``, means over the layers.
    """
    tokens = tokens.astype(jnp.int32)
    x, measured = _features(parameters, tokens[:, :-1], model, place)
    if model.vocab_parts > 1:
        head = _output_matrix(parameters, x.dtype, model)
        value = cross_entropy(x, head, tokens[:, 1:], model.vocab_parts, place)
    else:
        dtype = jnp.dtype(model.logits)
        scores = _scores(x, _head(parameters, x.dtype, model, place), place, dtype)
        scores = scores.astype(jnp.float32)
        # A sum over a mask, not a gather: the vocabulary may be sharded.
        is_next = tokens[:, 1:, None] == jnp.arange(model.vocab)
        chosen = jnp.sum(jnp.where(is_next, scores, 0.0), axis=-1)
        value = jnp.mean(jax.nn.logsumexp(scores, axis=-1) - chosen)
    total = value + model.balance * measured["balance"] if measured else value
    return total, {"loss": value, **measured}


def empty_cache(batch: int, length: int, model: ModelSettings) -> dict[str, jax.Array]:
    """Return an empty cache: keys and values [N, B, length, K, D]."""
    sizes = {
        "key": model.head_size + model.rope_size * bool(model.latent),
        "value": model.head_size,
    }
    shape = (model.layers, batch, length, model.kv_heads)
    dtype = jnp.dtype(model.compute)
    return {name: jnp.zeros((*shape, size), dtype) for name, size in sizes.items()}


def decode(
    parameters: dict[str, Any],
    cache: dict[str, jax.Array],
    token: jax.Array,
    position: jax.Array,
    model: ModelSettings,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the logits after one more token, from the cached keys and values.

    The cache is a ring buffer: once full, each token replaces the oldest one.

    Args:
        parameters: Arrays in the structure of `declare`.
        cache: From `empty_cache` or the previous call.
        token: Integers [B].
        position: Position of `token` in the text, a scalar from 0.
        model: The shape of the model.

    Returns:
        Logits [B, V], equal to those of `forward` at this position, and the updated cache.
    """
    dtype = jnp.dtype(model.compute)
    angles = rotary_angles(position[None], model)
    room = cache["key"].shape[2]
    slot = position % room
    seen = (jnp.arange(room) <= position)[None, :]
    near = seen & ((position - jnp.arange(room)) % room < (model.window or room))
    wide = jnp.arange(model.layers) % model.window_cycle == model.window_cycle - 1

    def layer(x: jax.Array, slices: tuple[dict[str, Any], jax.Array, jax.Array, jax.Array]):
        weights, keys, values, is_wide = slices
        q, k, v = project(x, weights["attention"], angles, model, unplaced)
        keys = jax.lax.dynamic_update_slice_in_dim(keys, k, slot, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(values, v, slot, axis=1)
        mixed = attend(q, keys, values, jnp.where(is_wide, seen, near))
        stream = x + project_out(mixed, weights["attention"], model, unplaced)
        added, _ = _feed_forward(x if model.parallel else stream, weights, model, unplaced)
        return stream + added, (keys, values)

    x = _embed(parameters, token[:, None].astype(jnp.int32), model, unplaced)
    layers = _cast(parameters["layers"], dtype)
    x, (keys, values) = jax.lax.scan(layer, x, (layers, cache["key"], cache["value"], wide))
    x = norm(x, parameters["norm"].astype(dtype))
    scores = _scores(x, _head(parameters, dtype, model, unplaced), unplaced)
    return scores[:, 0], {"key": keys, "value": values}


def _features(
    parameters: dict[str, Any], tokens: jax.Array, model: ModelSettings, place: Layout
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the input of the head [B, L, W], and the metrics averaged over the layers."""
    model = with_kernel_of(place.platform, model)
    dtype = jnp.dtype(model.compute)
    angles = rotary_angles(jnp.arange(tokens.shape[1]), model)
    axes = jax.tree.map(lambda x: x.axes[1:], declare(model)["layers"])

    def layer(
        x: jax.Array, weights: dict[str, Any], window: int
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        weights = jax.tree.map(lambda w, named: _whole(w, named, model, place), weights, axes)
        x = checkpoint_name(x, "input")
        stream = x + attention_layer(x, weights["attention"], angles, window, model, place)
        stream = checkpoint_name(place(stream, STREAM), "stream")
        added, measured = _feed_forward(x if model.parallel else stream, weights, model, place)
        return place(stream + added, STREAM), measured

    if model.remat:
        layer = jax.checkpoint(layer, policy=kept_residuals(model), static_argnums=2)

    def cycle(x: jax.Array, weights: dict[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Run the layers with a window, and the one that sees all positions."""
        measured = []
        for i in range(model.window_cycle):
            own = jax.tree.map(lambda w, i=i: w[i], weights)
            window = model.window if i < model.window_cycle - 1 else 0
            x, values = layer(x, own, window)
            measured.append(values)
        return x, jax.tree.map(lambda *values: sum(values) / len(values), *measured)

    x = _embed(parameters, tokens, model, place)
    cycles = model.layers // model.window_cycle
    weights = _cast(parameters["layers"], dtype)
    weights = jax.tree.map(lambda w: w.reshape(cycles, -1, *w.shape[1:]), weights)
    x, measured = jax.lax.scan(cycle, x, weights)
    return norm(x, parameters["norm"].astype(dtype)), jax.tree.map(jnp.mean, measured)


def kept_residuals(model: ModelSettings) -> Any:
    """Return the rematerialisation policy for residuals besides the input of each layer."""
    policies = jax.checkpoint_policies
    kept, offloaded = model.residuals
    if offloaded:
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(kept),
            names_which_can_be_offloaded=list(offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
    if not kept:
        return None
    named = policies.save_only_these_names(*kept)
    if model.kernel.attention != "cudnn" or "attention" not in kept:
        return named
    # The log-sums of cuDNN's kernel, which the backward pass needs beside the mixed values, have no
    # name: without them the kernel would run again.
    return policies.save_from_both_policies(
        named, lambda primitive, *_, **__: primitive.name == "dot_product_attention_fwd_wrapper"
    )


def _cast(weights: dict[str, Any], dtype: Any) -> dict[str, Any]:
    return jax.tree.map(lambda x: x.astype(dtype), weights)


def _whole(weight: jax.Array, axes: Axes, model: ModelSettings, place: Layout) -> jax.Array:
    """Gather a weight over the `embed` axes, and reduce-scatter its gradient.

    Under remat the gather at the start of a layer is recomputed in the backward pass, so a device
    never holds the gathered weights of two layers. Without remat the residuals would include the
    gathered weights of all layers; there the partitioner chooses the point of the gather.
    """
    if place.automatic or "embed" not in axes or (model.dropless and "experts" in axes):
        return weight
    # First of all dimensions but the experts': TPUs reduce-scatter the major dimension only.
    side, first = axes.index("embed"), int("experts" in axes)
    others = [axis for axis in axes if axis != "embed"]
    spread = (*others[:first], "embed", *others[first:])
    gathered = tuple(None if axis == "embed" else axis for axis in spread)
    forth = gathered if model.remat else spread
    turned = placed(jnp.moveaxis(weight, side, first), place, forth, spread)
    return jnp.moveaxis(turned, first, side)


def _embed(
    parameters: dict[str, Any], tokens: jax.Array, model: ModelSettings, place: Layout
) -> jax.Array:
    dtype = jnp.dtype(model.compute)
    table = parameters["embedding"].astype(dtype)
    if model.one_hot:
        table = _whole(table, ("vocab", "embed"), model, place)
        rows = place(jax.nn.one_hot(tokens, model.vocab, dtype=dtype), ("batch", "length", "vocab"))
        return place(jnp.einsum("blv,vw->blw", rows, table), STREAM)
    # Each device looks up all tokens in its slice of the width and sends the features to the
    # devices of the tokens: an all-to-all of features, never a gather of the table.
    spread = ("batch", "length", "embed")
    x = place(jnp.take(table, place(tokens, spread), axis=0, mode="clip"), spread)
    return placed(x, place, STREAM, spread)


def _head(parameters: dict[str, Any], dtype: Any, model: ModelSettings, place: Layout) -> jax.Array:
    return _whole(_output_matrix(parameters, dtype, model), HEAD, model, place)


def _output_matrix(parameters: dict[str, Any], dtype: Any, model: ModelSettings) -> jax.Array:
    """Return the matrix [W, V] from features to logits."""
    if model.tied:
        # The rows of the embedding have norm √W.
        return (parameters["embedding"].T * model.width**-0.5).astype(dtype)
    return parameters["head"].astype(dtype)


def _scores(x: jax.Array, head: jax.Array, place: Layout, dtype: Any = jnp.float32) -> jax.Array:
    x = placed(x, place, WHOLE, STREAM)
    scores = jnp.einsum("blw,wv->blv", x, head, preferred_element_type=dtype)
    return place(scores, ("batch", None, "vocab"))


def _feed_forward(
    x: jax.Array, weights: dict[str, Any], model: ModelSettings, place: Layout
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the feed-forward layer's addition to the stream [B, L, W], and expert metrics."""
    # Parallel layers share the norm of attention.
    scale = weights["attention" if model.parallel else "mlp"]["norm"]
    x, weights = placed(norm(x, scale), place, WHOLE, STREAM), weights["mlp"]
    if not model.experts:
        return _dense(x, weights, model, place), {}
    mix = mix_dropless if model.dropless else mix_experts
    mixed, measured = mix(x, weights, model, place)
    mixed = placed(mixed, place, STREAM, WHOLE)
    if model.shared_mlp:
        mixed += _dense(
            x, {x: weights[f"shared_{x}"] for x in ("gate", "up", "down")}, model, place
        )
    return mixed, measured


def _dense(x: jax.Array, weights: dict[str, Any], model: ModelSettings, place: Layout) -> jax.Array:
    """Return the output of a feed-forward layer that every token passes [B, L, W]."""
    activation = _ACTIVATIONS[model.activation]
    hidden = checkpoint_name(product("blw,wm->blm", x, weights["up"], model), "up")
    if model.gated:
        gate = checkpoint_name(product("blw,wm->blm", x, weights["gate"], model), "gate")
        hidden = activation(gate) * hidden
    else:
        hidden = activation(hidden)
    hidden = place(hidden, ("batch", None, "mlp"))
    down = product("blm,mw->blw", hidden, weights["down"], model)
    return checkpoint_name(placed(down, place, STREAM, WHOLE), "down")


def write_text(parameters: Any, layout: Layout, settings: Settings) -> bytes:
    """Generate the text that the settings request, without its prompt."""
    generation = settings.generation
    prompt = np.frombuffer(generation.prompt.encode() or b"\n", np.uint8)
    program = xlashard.pjit(
        functools.partial(generate, count=generation.bytes, model=settings.model),
        out_shardings=layout.sharding(),
    )
    seed, temperature = np.uint32(settings.run.seed), np.float32(generation.temperature)
    return np.asarray(program(parameters, prompt, seed, temperature)).tobytes()


def generate(
    parameters: Any,
    prompt: ArrayLike,
    seed: ArrayLike,
    temperature: ArrayLike,
    count: int,
    model: ModelSettings,
) -> jax.Array:
    """Continue a prompt byte by byte with cached keys and values.

    One loop reads the prompt and writes the continuation.

    Args:
        parameters: The model's arrays.
        prompt: Bytes [P], at least one.
        seed: Scalar integer; equal seeds give equal texts.
        temperature: Scalar; 0 selects the most likely byte.
        count: Number of bytes to generate.
        model: The shape of the model.

    Returns:
        The generated bytes [count], uint8.
    """
    prompt = jnp.asarray(prompt)
    size = prompt.shape[0]
    window = min(model.length, size + count)

    def advance(carry: tuple[Any, jax.Array], position: jax.Array):
        cache, written = carry
        token = jnp.where(position < size, prompt[jnp.minimum(position, size - 1)], written)
        scores, cache = decode(parameters, cache, token[None], position, model)
        key = jax.random.fold_in(jax.random.key(seed), position)
        written = choose(scores[0], key, jnp.asarray(temperature))
        return (cache, written), written

    start = (empty_cache(1, window, model), jnp.zeros((), jnp.uint8))
    _, written = jax.lax.scan(advance, start, jnp.arange(size + count - 1))
    return written[size - 1 :]


def choose(scores: jax.Array, key: jax.Array, temperature: jax.Array) -> jax.Array:
    """Sample a byte from the softmax of scores [256] / temperature; at 0 take the most likely."""
    greedy = jnp.argmax(scores)
    drawn = jax.random.categorical(key, scores / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, greedy).astype(jnp.uint8)


def readable(written: bytes) -> str:
    """Decode generated bytes for a terminal; invalid text and control characters become ``·``."""
    text = written.decode("utf-8", errors="replace").replace("\ufffd", "·")
    return "".join(x if x.isprintable() or x == "\n" else "·" for x in text)
