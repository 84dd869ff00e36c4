"""A byte-level decoder-only transformer in plain JAX functions.

Root-mean-square norms, rotary positions, grouped-query attention and a SwiGLU feed-forward part.
Parameters are a dict of arrays; `declare` describes each of them, `forward` and `decode` use them.
Letters in shapes: B batch, L length, W width, H query heads, K key and value heads, D features of
one head, M hidden features of the feed-forward part, N layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlashard.train.layout import Declaration, Place, unplaced
from xlashard.train.settings import ModelSettings

BYTES = 256
"""Size of the vocabulary: every byte is a token."""

_EPSILON = 1e-6
_HIDDEN = -1e30


def declare(model: ModelSettings) -> dict[str, Any]:
    """The model's arrays: a tree of `Declaration` in the structure of the parameters.

    Args:
        model: The shape of the model.

    Returns:
        ``embedding`` [256, W], ``layers`` (dicts of arrays stacked over N), ``norm`` [W] and
        ``head`` [W, 256].
    """
    width, mlp, size = model.width, model.mlp, model.head_size
    heads, kv_heads, count = model.heads, model.kv_heads, model.layers
    inward = width**-0.5
    # What the layers add to the stream grows with their number; the last matrices make up for it.
    quiet = (2 * count) ** -0.5

    def stacked(shape: tuple[int, ...], axes: tuple[str | None, ...], spread: float | None):
        return Declaration((count, *shape), ("layers", *axes), spread)

    return {
        "embedding": Declaration((BYTES, width), ("vocab", "embed"), 1.0),
        "layers": {
            "attention": {
                "norm": stacked((width,), (None,), None),
                "query": stacked((width, heads, size), ("embed", "heads", None), inward),
                "key": stacked((width, kv_heads, size), ("embed", "kv_heads", None), inward),
                "value": stacked((width, kv_heads, size), ("embed", "kv_heads", None), inward),
                "out": stacked((heads, size, width), ("heads", None, "embed"), quiet * inward),
            },
            "mlp": {
                "norm": stacked((width,), (None,), None),
                "gate": stacked((width, mlp), ("embed", "mlp"), inward),
                "up": stacked((width, mlp), ("embed", "mlp"), inward),
                "down": stacked((mlp, width), ("mlp", "embed"), quiet * mlp**-0.5),
            },
        },
        "norm": Declaration((width,), (None,), None),
        "head": Declaration((width, BYTES), ("embed", "vocab"), inward),
    }


def forward(
    parameters: dict[str, Any],
    tokens: jax.Array,
    model: ModelSettings,
    place: Place = unplaced,
) -> jax.Array:
    """Scores of the next byte at every position.

    Args:
        parameters: Arrays in the structure of `declare`.
        tokens: Bytes as integers [B, L].
        model: The shape of the model.
        place: Lays activations out on a mesh.

    Returns:
        Unnormalised log-probabilities [B, L, 256], float32.
    """
    dtype = jnp.dtype(model.compute)
    angles = rotary_angles(jnp.arange(tokens.shape[1]), model)
    causal = jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1]), bool))

    def layer(x: jax.Array, weights: dict[str, Any]) -> tuple[jax.Array, None]:
        q, k, v = _project(x, weights["attention"], angles, place)
        x = x + _attend(q, k, v, causal, weights["attention"])
        x = place(x, ("batch", None, None))
        x = x + _feed_forward(x, weights["mlp"], place)
        return place(x, ("batch", None, None)), None

    x = _embed(parameters, tokens, dtype, place)
    body = jax.checkpoint(layer) if model.remat else layer
    x, _ = jax.lax.scan(body, x, _cast(parameters["layers"], dtype))
    return _scores(parameters, x, place)


def loss(
    parameters: dict[str, Any],
    tokens: jax.Array,
    model: ModelSettings,
    place: Place = unplaced,
) -> jax.Array:
    """Mean cross-entropy of each next byte, in nats per byte.

    Args:
        parameters: Arrays in the structure of `declare`.
        tokens: Bytes as integers [B, L + 1]; every byte but the first is predicted.
        model: The shape of the model.
        place: Lays activations out on a mesh.

    Returns:
        A float32 scalar.
    """
    tokens = tokens.astype(jnp.int32)
    scores = forward(parameters, tokens[:, :-1], model, place)
    # A sum over a mask, not a lookup: the byte values may be spread over devices.
    wanted = tokens[:, 1:, None] == jnp.arange(BYTES)
    chosen = jnp.sum(jnp.where(wanted, scores, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - chosen)


def empty_cache(batch: int, length: int, model: ModelSettings) -> dict[str, jax.Array]:
    """Keys and values of no position yet: two arrays [N, B, length, K, D]."""
    shape = (model.layers, batch, length, model.kv_heads, model.head_size)
    return {name: jnp.zeros(shape, jnp.dtype(model.compute)) for name in ("key", "value")}


def decode(
    parameters: dict[str, Any],
    cache: dict[str, jax.Array],
    token: jax.Array,
    position: jax.Array,
    model: ModelSettings,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scores of the byte after one more byte, with the keys and values of those before it.

    The cache is a ring: once it is full, each byte replaces the oldest one, so a text may grow
    longer than the cache and every byte sees the last ones that fit.

    Args:
        parameters: Arrays in the structure of `declare`.
        cache: From `empty_cache` or from the step before.
        token: Bytes as integers [B].
        position: Place of `token` in the text, a scalar from 0.
        model: The shape of the model.

    Returns:
        Scores [B, 256] as `forward` gives them at this position, and the grown cache.
    """
    dtype = jnp.dtype(model.compute)
    angles = rotary_angles(position[None], model)
    room = cache["key"].shape[2]
    slot = position % room
    seen = (jnp.arange(room) <= position)[None, :]

    def layer(x: jax.Array, slices: tuple[dict[str, Any], jax.Array, jax.Array]):
        weights, keys, values = slices
        q, k, v = _project(x, weights["attention"], angles, unplaced)
        keys = jax.lax.dynamic_update_slice_in_dim(keys, k, slot, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(values, v, slot, axis=1)
        x = x + _attend(q, keys, values, seen, weights["attention"])
        return x + _feed_forward(x, weights["mlp"], unplaced), (keys, values)

    x = _embed(parameters, token[:, None].astype(jnp.int32), dtype, unplaced)
    layers = _cast(parameters["layers"], dtype)
    x, (keys, values) = jax.lax.scan(layer, x, (layers, cache["key"], cache["value"]))
    return _scores(parameters, x, unplaced)[:, 0], {"key": keys, "value": values}


def rotary_angles(positions: jax.Array, model: ModelSettings) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [L, 1, D / 2] by which the pairs of a head are turned at each position."""
    half = model.head_size // 2
    speeds = model.rope_base ** -(np.arange(half, dtype=np.float32) / half)
    angles = (positions.astype(jnp.float32)[:, None] * speeds)[:, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the pairs (first half, second half) of each head [B, L, H, D] by `rotary_angles`."""
    cos, sin = (part.astype(x.dtype) for part in angles)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _cast(weights: dict[str, Any], dtype: Any) -> dict[str, Any]:
    return jax.tree.map(lambda x: x.astype(dtype), weights)


def _embed(parameters: dict[str, Any], tokens: jax.Array, dtype: Any, place: Place) -> jax.Array:
    x = jnp.take(parameters["embedding"].astype(dtype), tokens, axis=0)
    return place(x, ("batch", None, None))


def _scores(parameters: dict[str, Any], x: jax.Array, place: Place) -> jax.Array:
    x = _norm(x, parameters["norm"].astype(x.dtype))
    head = parameters["head"].astype(x.dtype)
    scores = jnp.einsum("blw,wv->blv", x, head, preferred_element_type=jnp.float32)
    return place(scores, ("batch", None, "vocab"))


def _norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Divides by the root mean square over the features, computed in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + _EPSILON)
    return (wide * scale).astype(x.dtype) * weight


def _project(
    x: jax.Array, weights: dict[str, Any], angles: tuple[jax.Array, jax.Array], place: Place
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, L, H, D], keys and values [B, L, K, D]; queries and keys turned."""
    x = _norm(x, weights["norm"])
    q = jnp.einsum("blw,whd->blhd", x, weights["query"])
    k = jnp.einsum("blw,wkd->blkd", x, weights["key"])
    v = jnp.einsum("blw,wkd->blkd", x, weights["value"])
    q = place(q, ("batch", None, "heads", None))
    return rotate(q, angles), rotate(k, angles), v


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, weights: dict[str, Any]
) -> jax.Array:
    """What each position [B, L, W] takes from the positions that `visible` [L, all] lets it see."""
    group = q.shape[2] // k.shape[2]
    # Repeated, the keys and values of a group lie where its queries lie.
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(visible, scores * q.shape[-1] ** -0.5, _HIDDEN)
    shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    mixed = jnp.einsum("bhlm,bmhd->blhd", shares, v)
    return jnp.einsum("blhd,hdw->blw", mixed, weights["out"])


def _feed_forward(x: jax.Array, weights: dict[str, Any], place: Place) -> jax.Array:
    x = _norm(x, weights["norm"])
    gate = jnp.einsum("blw,wm->blm", x, weights["gate"])
    up = jnp.einsum("blw,wm->blm", x, weights["up"])
    hidden = place(jax.nn.silu(gate) * up, ("batch", None, "mlp"))
    return jnp.einsum("blm,mw->blw", hidden, weights["down"])
