"""Attention by the splash kernel, with masks that don't slow tracing down.

A module of its own, as importing the kernels of Pallas takes a third of a second.
"""

from typing import Any, cast

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention

from xlashard.train.config.settings import KernelSettings


class _KeptBlocks:
    """Keeps the blocks of a mask by size, and by distance from the diagonal.

    Whether a query sees a key depends on the distance between them alone, so a mask has few
    different blocks: far from the diagonal and the window's end all are alike. The kernel's own
    classes compute each block anew, several times for each kernel: most of the time in which a step
    with 32,768 positions was traced.
    """

    shape: tuple[int, int]
    offset: int
    window_size: tuple[int | None, int | None] = (None, 0)

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        queries, keys = (
            range(*one.indices(size)) for one, size in zip(index, self.shape, strict=True)
        )
        window = max(abs(size or 0) for size in self.window_size)
        reach = max(len(queries), len(keys)) + window + abs(self.offset)
        distance = max(-reach, min(queries.start - keys.start, reach))
        block = distance, len(queries), len(keys)
        kept: dict[tuple[int, int, int], np.ndarray] = vars(self).setdefault("_kept", {})
        if block not in kept:
            kept[block] = cast("Any", super()).__getitem__(index)
        return kept[block]


class CausalMask(_KeptBlocks, splash_attention.CausalMask):
    """Lets a query see its own position and all before."""


class LocalMask(_KeptBlocks, splash_attention.LocalMask):
    """Lets a query see the positions of a window."""


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, window: int, kernel: KernelSettings
) -> jax.Array:
    """Return causal attention, computed by the splash kernel.

    Args:
        q: Scaled queries [B, H, L, D].
        k: Keys [B, K, L, D].
        v: Values [B, K, L, D].
        window: Number of last positions that a query sees; 0: all before it.
        kernel: Blocks of the kernel; one longer than L is cut to L.

    Returns:
        Mixed values [B, H, L, D], a residual named ``attention``.
    """
    length = q.shape[2]
    blocks: dict[str, Any] = {**kernel.blocks(length)}
    if kernel.fused_backward:
        blocks |= {"block_q_dq": None, "block_kv_dq": None}
    sizes: Any = splash_attention.BlockSizes(**blocks, use_fused_bwd_kernel=kernel.fused_backward)
    mask = CausalMask((length, length))
    if window:
        mask = LocalMask((length, length), (window - 1, 0), 0)
    run: Any = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([mask] * q.shape[1]),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="attention",
    )
    return jax.vmap(run)(q, k, v)
