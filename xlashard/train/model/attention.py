"""Attention layer: projections, rotary positions, plain attention or one of the faster ways.

Letters in shapes: B batch, L length, W width, H query heads, K key and value heads, D features of
one head.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from xlashard.train.config.settings import ModelSettings
from xlashard.train.model.attention_kernels import kernel_attention
from xlashard.train.model.blockwise import blockwise_attention
from xlashard.train.model.layout import Place, placed
from xlashard.train.model.products import product

STREAM = ("batch", "length", None)
WHOLE = ("batch", None, None)
_EPSILON = 1e-6
_HIDDEN = -1e30


def rotary_angles(positions: jax.Array, model: ModelSettings) -> tuple[jax.Array, jax.Array]:
    """Return the cosines and sines [L, 1, D / 2] of the rotary embedding."""
    half = (model.rope_size if model.latent else model.head_size) // 2
    speeds = model.rope_base ** -(np.arange(half, dtype=np.float32) / half)
    angles = (positions.astype(jnp.float32)[:, None] * speeds)[:, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the pairs (first half, second half) of each head [B, L, H, D] by `rotary_angles`."""
    cos, sin = (part.astype(x.dtype) for part in angles)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Divide by the root mean square over the features, in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + _EPSILON)
    return (wide * scale).astype(x.dtype) * weight


def attention_layer(
    x: jax.Array,
    weights: dict[str, Any],
    angles: tuple[jax.Array, jax.Array],
    window: int,
    model: ModelSettings,
    place: Place,
) -> jax.Array:
    """Return the attention layer's addition to the residual stream [B, L, W].

    A position sees the last `window` ones, or all before it if `window` is 0. The kernel of the
    model is one that the devices run.
    """
    q, k, v = project(x, weights, angles, model, place)
    if model.kernel.attention != "none":
        mixed = kernel_attention(q, k, v, window, model.kernel, place)
    elif model.attention_block and model.attention_block < x.shape[1]:
        mixed = blockwise_attention(q, k, v, model.attention_block)
    else:
        seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        seen = jnp.triu(seen, 1 - window) if window else seen
        mixed = attend(q, k, v, seen, jnp.dtype(model.scores))
        mixed = checkpoint_name(mixed, "attention")
    return project_out(mixed, weights, model, place)


def project(
    x: jax.Array,
    weights: dict[str, Any],
    angles: tuple[jax.Array, jax.Array],
    model: ModelSettings,
    place: Place,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return rotated queries [B, L, H, D], rotated keys and values [B, L, K, D]."""
    x = placed(norm(x, weights["norm"]), place, WHOLE, STREAM)
    if model.latent:
        q, k, v = _from_latent(x, weights, angles, model)
    else:
        q = rotate(product("blw,whd->blhd", x, weights["query"], model), angles)
        k = rotate(product("blw,wkd->blkd", x, weights["key"], model), angles)
        v = product("blw,wkd->blkd", x, weights["value"], model)
    q = place(q, ("batch", None, "heads", None))
    return checkpoint_name(q, "query"), checkpoint_name(k, "key"), checkpoint_name(v, "value")


def _from_latent(
    x: jax.Array, weights: dict[str, Any], angles: tuple[jax.Array, jax.Array], model: ModelSettings
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries and keys [B, L, H, D + R], and values [B, L, H, D], from low ranks.

    Keys and values are products of one latent vector per position, and R rotated features are the
    same in the keys of all heads: multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434).
    """
    latent = product("blw,wr->blr", x, weights["latent"], model)
    if model.query_rank:
        x = norm(product("blw,wr->blr", x, weights["query_down"], model), weights["query_norm"])
    q = product("blw,whd->blhd", x, weights["query"], model)
    q, turned = jnp.split(q, [model.head_size], axis=-1)
    q = jnp.concatenate([q, rotate(turned, angles)], axis=-1)
    latent, shared = jnp.split(latent, [model.latent], axis=-1)
    latent = norm(latent, weights["latent_norm"])
    k = product("blr,rhd->blhd", latent, weights["key"], model)
    shared = rotate(shared[:, :, None], angles)
    k = jnp.concatenate([k, jnp.broadcast_to(shared, (*k.shape[:3], model.rope_size))], axis=-1)
    return q, k, product("blr,rhd->blhd", latent, weights["value"], model)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, stored: Any = jnp.float32
) -> jax.Array:
    """Return attention [B, L, H, D] under the mask `visible` [L, all], with scores `stored` so."""
    group = q.shape[2] // k.shape[2]
    # Repeated, the keys and values of a group are on the devices of its queries.
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k, preferred_element_type=stored)
    scale = q.shape[-1] ** -0.5
    if scores.dtype == jnp.float32:
        shares = _shares(scores, visible, scale)
    else:
        shares = _stored_shares(scores, visible, scale)
    return jnp.einsum("bhlm,bmhd->blhd", shares.astype(v.dtype), v)


def _shares(scores: jax.Array, visible: jax.Array, scale: float) -> jax.Array:
    return jax.nn.softmax(jnp.where(visible, scores * scale, _HIDDEN), axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _stored_shares(scores: jax.Array, visible: jax.Array, scale: float) -> jax.Array:
    """Return the softmax in the type of the scores, of which the backward pass needs no more."""
    return _shares(scores.astype(jnp.float32), visible, scale).astype(scores.dtype)


def _stored_forward(
    scores: jax.Array, visible: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    shares = _stored_shares(scores, visible, scale)
    return shares, shares


def _stored_backward(
    scale: float, shares: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, None]:
    wide, change = shares.astype(jnp.float32), gradient.astype(jnp.float32)
    mean = jnp.sum(wide * change, axis=-1, keepdims=True)
    return (scale * wide * (change - mean)).astype(shares.dtype), None


_stored_shares.defvjp(_stored_forward, _stored_backward)


def project_out(
    mixed: jax.Array, weights: dict[str, Any], model: ModelSettings, place: Place
) -> jax.Array:
    """Return the heads [B, L, H, D] projected to the residual stream [B, L, W]."""
    out = product("blhd,hdw->blw", mixed, weights["out"], model)
    return checkpoint_name(placed(out, place, STREAM, WHOLE), "out")
