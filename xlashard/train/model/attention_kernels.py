"""Attention by kernels: those of Pallas on TPU, cuDNN's on GPU.

The kernels hold the scores of one block in fast memory and skip the blocks above the diagonal. Each
device runs the kernel on its own sequences and heads. Other devices than TPUs run a kernel of
Pallas only under `jax.experimental.pallas.tpu.force_tpu_interpret_mode`.

Letters in shapes: B batch, L length, H query heads, K key and value heads, D features of a head.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from xlashard.train.config.settings import KernelSettings, ModelSettings
from xlashard.train.model.layout import Place, Unplaced

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
    place: Place,
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
        splash = kernel.attention == "splash"
        mixed = _splash(q, k, v, window, kernel) if splash else _flash(q, k, v, kernel)
        return mixed.transpose(0, 2, 1, 3)

    if isinstance(place, Unplaced):
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


def _splash(
    q: jax.Array, k: jax.Array, v: jax.Array, window: int, kernel: KernelSettings
) -> jax.Array:
    # A third of a second, which runs without a kernel save.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    length = q.shape[2]
    own_pass = None if kernel.fused_backward else min(kernel.block_q_dq, length)
    sizes = splash.BlockSizes(
        block_q=min(kernel.block_q, length),
        block_kv=min(kernel.block_kv, length),
        block_kv_compute=min(kernel.block_kv_compute, length),
        block_q_dkv=min(kernel.block_q_dkv, length),
        block_kv_dkv=min(kernel.block_kv_dkv, length),
        block_kv_dkv_compute=min(kernel.block_kv_dkv_compute, length),
        block_q_dq=own_pass,
        block_kv_dq=own_pass and min(kernel.block_kv_dq, length),
        use_fused_bwd_kernel=kernel.fused_backward,
    )
    mask = splash.CausalMask((length, length))
    if window:
        mask = splash.LocalMask((length, length), (window - 1, 0), 0)
    run: Any = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * q.shape[1]),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="attention",
    )
    return jax.vmap(run)(q, k, v)


def _flash(q: jax.Array, k: jax.Array, v: jax.Array, kernel: KernelSettings) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    group, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    sizes = flash.BlockSizes(
        block_q=min(kernel.block_q, length),
        block_k_major=min(kernel.block_kv, length),
        block_k=min(kernel.block_kv_compute, length),
        block_b=1,
        block_q_major_dkv=min(kernel.block_q_dkv, length),
        block_q_dkv=min(kernel.block_q_dkv, length),
        block_k_major_dkv=min(kernel.block_kv_dkv, length),
        block_k_dkv=min(kernel.block_kv_dkv_compute, length),
        block_q_dq=min(kernel.block_q_dq, length),
        block_k_major_dq=min(kernel.block_kv_dq, length),
        block_k_dq=min(kernel.block_kv_dq, length),
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
