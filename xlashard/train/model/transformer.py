"""Decoder-only transformer in plain JAX functions, over bytes or other tokens, and its text.

RMSNorm, rotary positions, grouped-query attention, and a feed-forward layer or experts.
Parameters are a dict of arrays in the structure of `declare`.
Letters in shapes: B batch, L length, W width, H query heads, K key and value heads, D features of
one head, M hidden features of the feed-forward part, N layers, V tokens of the vocabulary.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable
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
from xlashard.train.model.layout import HEAD, Axes, Layout, declare, name_stacks, placed, unplaced
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


def empty_cache(batch: int, length: int, model: ModelSettings) -> dict[str, Any]:
    """Return an empty cache: keys and values [N, B, length, K, D], by array of `name_stacks`."""
    sizes = Counter[tuple[str, int, int]]()
    for kind, count in model.count_layer_kinds().items():
        sizes[name_stacks(model, kind)[0], kind.kv_heads, kind.head_size] += count
    dtype, turned = jnp.dtype(model.compute), model.rope_size * bool(model.latent)
    return {
        name: {
            "key": jnp.zeros((count, batch, length, heads, size + turned), dtype),
            "value": jnp.zeros((count, batch, length, heads, size), dtype),
        }
        for (name, heads, size), count in sizes.items()
    }


def decode(
    parameters: dict[str, Any],
    cache: dict[str, Any],
    token: jax.Array,
    position: jax.Array,
    model: ModelSettings,
) -> tuple[jax.Array, dict[str, Any]]:
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
    room = jax.tree.leaves(cache)[0].shape[2]
    slot = position % room
    seen = (jnp.arange(room) <= position)[None, :]
    ages = (position - jnp.arange(room)) % room

    def layer(x: jax.Array, own: dict[str, Any], kind: ModelSettings) -> tuple[jax.Array, Any]:
        (attention, kept), mlp = own["attention"], own["mlp"]
        angles = rotary_angles(position[None], kind)
        q, k, v = project(x, attention, angles, kind, unplaced)
        keys = jax.lax.dynamic_update_slice_in_dim(kept["key"], k, slot, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(kept["value"], v, slot, axis=1)
        mixed = attend(q, keys, values, seen & (ages < kind.window) if kind.window else seen)
        stream = x + project_out(mixed, attention, kind, unplaced)
        weights = {"attention": attention, "mlp": mlp}
        added, _ = _feed_forward(x if kind.parallel else stream, weights, kind, unplaced)
        return stream + added, {"attention": {"key": keys, "value": values}}

    x = _embed(parameters, token[:, None].astype(jnp.int32), model, unplaced)
    layers = _cast(parameters["layers"], dtype)
    stacks = layers | {name: (layers[name], kept) for name, kept in cache.items()}
    x, cache = _run_layers(layer, x, stacks, model)
    x = norm(x, parameters["norm"].astype(dtype))
    scores = _scores(x, _head(parameters, dtype, model, unplaced), unplaced)
    return scores[:, 0], cache


type _Layer = Callable[[jax.Array, dict[str, Any], ModelSettings], tuple[jax.Array, Any]]


def _run_layers(
    layer: _Layer, x: jax.Array, stacks: dict[str, Any], model: ModelSettings
) -> tuple[jax.Array, dict[str, Any]]:
    """Run all layers, one scan over the cycles of equal layers.

    Args:
        layer: Takes the features, the arrays of ``attention`` and ``mlp`` of one layer, and its
            kind; returns the features and results by ``attention`` or ``mlp``.
        x: Features [B, L, W].
        stacks: Arrays of all layers, by name of `name_stacks`.
        model: The shape of the model.

    Returns:
        Features, and the results of all layers, stacked like the arrays.
    """
    done = Counter[str]()
    results: dict[str, list[Any]] = defaultdict(list)
    for start, size, count in model.list_scans():
        kinds = [model.derive_layer(start + n) for n in range(size)]
        names = [dict(zip(_PARTS, name_stacks(model, kind), strict=True)) for kind in kinds]
        sizes = Counter(name for own in names for name in own.values())
        parts = {}
        for name, number in sizes.items():
            cut = slice(done[name], done[name] + count * number)
            parts[name] = _split_first(_take(stacks[name], cut), count, number)
        done.update({name: count * number for name, number in sizes.items()})

        def cycle(
            x: jax.Array, parts: dict[str, Any], kinds: Any = kinds, names: Any = names
        ) -> tuple[jax.Array, dict[str, Any]]:
            used, outputs = Counter[str](), defaultdict[str, list[Any]](list)
            for kind, own in zip(kinds, names, strict=True):
                arrays = {part: _take(parts[name], used[name]) for part, name in own.items()}
                used.update(own.values())
                x, result = layer(x, arrays, kind)
                for part, values in result.items():
                    outputs[own[part]].append(values)
            return x, {name: _join_arrays(jnp.stack, values) for name, values in outputs.items()}

        x, outputs = jax.lax.scan(cycle, x, parts)
        for name, values in outputs.items():
            results[name].append(jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), values))
    return x, {name: _join_arrays(jnp.concatenate, values) for name, values in results.items()}


_PARTS = ("attention", "mlp")


def _take(tree: Any, index: int | slice) -> Any:
    return jax.tree.map(lambda array: array[index], tree)


def _split_first(tree: Any, *sizes: int) -> Any:
    return jax.tree.map(lambda array: array.reshape(*sizes, *array.shape[1:]), tree)


def _join_arrays(join: Callable[[Any], jax.Array], trees: list[Any]) -> Any:
    return jax.tree.map(lambda *arrays: join(arrays), *trees)


def _features(
    parameters: dict[str, Any], tokens: jax.Array, model: ModelSettings, place: Layout
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the input of the head [B, L, W], and the metrics averaged over the layers."""
    dtype = jnp.dtype(model.compute)
    positions = jnp.arange(tokens.shape[1])
    angles = {kind: rotary_angles(positions, kind) for kind in model.count_layer_kinds()}

    def layer(x: jax.Array, own: dict[str, Any], kind: ModelSettings) -> tuple[jax.Array, Any]:
        turned, kind = angles[kind], with_kernel_of(place.platform, kind)
        axes = jax.tree.map(lambda declared: declared.axes[1:], declare(kind)["layers"])
        own = jax.tree.map(lambda w, named: _whole(w, named, kind, place), own, axes)
        x = checkpoint_name(x, "input")
        stream = x + attention_layer(x, own["attention"], turned, kind, place)
        stream = checkpoint_name(place(stream, STREAM), "stream")
        added, measured = _feed_forward(x if kind.parallel else stream, own, kind, place)
        return place(stream + added, STREAM), {"mlp": measured} if measured else {}

    if model.remat:
        policy = kept_residuals(with_kernel_of(place.platform, model))
        layer = jax.checkpoint(layer, policy=policy, static_argnums=2)
    x = _embed(parameters, tokens, model, place)
    x, measured = _run_layers(layer, x, _cast(parameters["layers"], dtype), model)
    means = jax.tree.map(jnp.mean, measured.get("mlp", {}))
    return norm(x, parameters["norm"].astype(dtype)), means


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
    scores = _head_product(x, head, jnp.dtype(dtype).name)
    return place(scores, ("batch", None, "vocab"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _head_product(x: jax.Array, head: jax.Array, dtype: str) -> jax.Array:
    return jnp.einsum("blw,wv->blv", x, head, preferred_element_type=dtype)


def _head_gradients(
    dtype: str, kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, head = kept
    product = functools.partial(jnp.einsum, preferred_element_type=dtype)
    dx = product("blv,wv->blw", gradient, head).astype(x.dtype)
    # One after the other: the gathered head is freed before its gradient, which is as large. The
    # published options of compilers remove barriers; a sum with zeros stays.
    after = x + 0 * dx
    return dx, product("blw,blv->wv", after, gradient).astype(head.dtype)


_head_product.defvjp(
    lambda x, head, dtype: (_head_product(x, head, dtype), (x, head)), _head_gradients
)


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
