"""Attention layer: projections, rotary positions, plain attention or one of the faster ways.

Kernels are those of Pallas on TPU, and cuDNN's on GPU. They hold the scores of one block in fast
memory and skip the blocks above the diagonal. Each device runs the kernel on its own sequences and
heads. Other devices than TPUs run a kernel of Pallas only under
`jax.experimental.pallas.tpu.force_tpu_interpret_mode`.

Letters in shapes: B batch, L length, W width, H query heads, K key and value heads, D features of
one head.
"""

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from xlashard.support.lazily import deferred
from xlashard.train.config.settings import KernelSettings, ModelSettings
from xlashard.train.model.blockwise import blockwise_attention
from xlashard.train.model.layout import Layout, placed
from xlashard.train.model.products import product

if TYPE_CHECKING:
    from xlashard.train.model import splash
else:
    splash = deferred("xlashard.train.model.splash")

_PLATFORMS = {"splash": "tpu", "flash": "tpu", "cudnn": "gpu"}
_BEST = {"tpu": "splash", "gpu": "cudnn"}
_CUDNN_HEAD = 256


def with_kernel_of(platform: str, model: ModelSettings) -> ModelSettings:
    """Return the model with the kernel of attention that the devices of a platform run.

    Args:
        platform: Platform of the devices, such as ``tpu``.
        model: Any model.

    Returns:
        The model, with the kernel `none` where attention is computed without one, never `fused`.
    """
    name = model.kernel.attention
    if name == "fused":
        name = _BEST.get(platform, "none")
        if name == "cudnn" and not _fits_cudnn(model):
            name = "none"
    if _PLATFORMS.get(name) != platform:
        name = "none"
    return replace(model, kernel=replace(model.kernel, attention=name))


def _fits_cudnn(model: ModelSettings) -> bool:
    size = model.head_size
    is_half = model.compute == "bfloat16"
    return is_half and not model.latent and size % 8 == 0 and size <= _CUDNN_HEAD


def kernel_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: int,
    kernel: KernelSettings,
    place: Layout,
) -> jax.Array:
    """Return causal attention, computed by a kernel.

    Args:
        q: Queries [B, L, H, D].
        k: Keys [B, L, K, D].
        v: Values [B, L, K, D].
        window: Number of last positions that a query sees; 0: all before it. Not for flash.
        kernel: Name of the kernel, and its blocks; a block longer than L is cut to L.
        place: Mesh and rules; each device attends with its own sequences and heads.

    Returns:
        Mixed values [B, L, H, D], a residual named ``attention``.
    """
    group = q.shape[2] // k.shape[2]

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if kernel.attention == "cudnn":
            return _cudnn(q, k, v, window)
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q * q.shape[-1] ** -0.5, k, v))
        if kernel.attention == "splash":
            mixed = splash.attend(q, k, v, window, kernel)
        else:
            mixed = _flash(q, k, v, kernel)
        return mixed.transpose(0, 2, 1, 3)

    if place.mesh is None:
        return local(q, k, v)
    heads = "kv_heads"
    if group > 1 and place.rules.kv_heads != place.rules.heads:
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        heads = "heads"
    own, shared = (place.spec(("batch", None, name, None)) for name in ("heads", heads))
    return jax.shard_map(
        local,
        mesh=place.mesh,
        in_specs=(own, shared, shared),
        out_specs=own,
        check_vma=False,  # Kernels declare no varying axes.
    )(q, k, v)


def _flash(q: jax.Array, k: jax.Array, v: jax.Array, kernel: KernelSettings) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    group, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    blocks = kernel.blocks(length)
    sizes = flash.BlockSizes(
        block_q=blocks["block_q"],
        block_k_major=blocks["block_kv"],
        block_k=blocks["block_kv_compute"],
        block_b=1,
        block_q_major_dkv=blocks["block_q_dkv"],
        block_q_dkv=blocks["block_q_dkv"],
        block_k_major_dkv=blocks["block_kv_dkv"],
        block_k_dkv=blocks["block_kv_dkv_compute"],
        block_q_dq=blocks["block_q_dq"],
        block_k_major_dq=blocks["block_kv_dq"],
        block_k_dq=blocks["block_kv_dq"],
    )
    mixed = flash.flash_attention(q, k, v, causal=True, block_sizes=sizes)
    return checkpoint_name(mixed, "attention")


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, window: int) -> jax.Array:
    mixed = jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
        implementation="cudnn",
    )
    return checkpoint_name(mixed, "attention")


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
    model: ModelSettings,
    place: Layout,
) -> jax.Array:
    """Return the attention layer's addition to the residual stream [B, L, W].

    A position sees the last ones of the model's window, or all before it without one. The kernel of
    the model is one that the devices run.
    """
    window = model.window
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
    place: Layout,
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
    mixed: jax.Array, weights: dict[str, Any], model: ModelSettings, place: Layout
) -> jax.Array:
    """Return the heads [B, L, H, D] projected to the residual stream [B, L, W]."""
    out = product("blhd,hdw->blw", mixed, weights["out"], model)
    return checkpoint_name(placed(out, place, STREAM, WHOLE), "out")
