"""Pytrees of host values packed into one block of bytes, and transport of blocks between devices.

One collective moves a whole pytree, and as bytes every dtype arrives unchanged, including 64-bit
numbers that devices would round.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlashard._jax.runtime.shardings import Device
from xlashard.array import Array
from xlashard.array.device_put import device_put
from xlashard.array.host.read import read_value
from xlashard.array.placement.transfer_guard import allow_transfers
from xlashard.multihost.host_local.conversions import host_local_array_to_global_array
from xlashard.pjit import pjit
from xlashard.sharding import Mesh, NamedSharding, PartitionSpec

_WORD = np.dtype(np.uint32)
# Smallest block per device, in words.
_LEAST = 256
# Number of distinct block lengths between consecutive powers of two.
_STEPS = 8


def size_of(values: Sequence[np.ndarray]) -> int:
    """Return the total number of bytes of values."""
    return sum(value.nbytes for value in values)


def packed(values: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the bytes of values."""
    if not values:
        return np.empty(0, np.uint8)
    flat = [np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in values]
    return np.concatenate(flat)


def unpacked(block: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Split a block, or several blocks at once, into values.

    Args:
        block: `[..., bytes]`.
        like: Arrays with the dtypes and shapes of the values.

    Returns:
        For each value an array `[..., *shape]`.
    """
    out, start = [], 0
    for value in like:
        part = np.array(block[..., start : start + value.nbytes], order="C")
        out.append(part.view(value.dtype).reshape((*block.shape[:-1], *value.shape)))
        start += value.nbytes
    return out


def gathered_by_devices(block: np.ndarray) -> np.ndarray:
    """Gather equally sized blocks `[bytes]` of all processes into `[processes, bytes]`.

    Each device of a process gathers a part, so that all devices transfer at once.
    """
    with allow_transfers():
        everywhere = device_put(
            _sharded_rows(block), NamedSharding(_mesh(), PartitionSpec(None, "device"))
        )
        return _bytes_of(everywhere, block.nbytes)


def broadcast_by_devices(block: np.ndarray, *, is_source: bool) -> np.ndarray:
    """Return the block of the source process; others pass a block of the same size."""
    with allow_transfers():
        mine = block if is_source else np.zeros_like(block)
        return _bytes_of(_summed(_mesh())(_sharded_rows(mine)), block.nbytes)


def _sharded_rows(block: np.ndarray) -> Array:
    """Return the block of each process as a row, sharded over the process's devices."""
    mesh = _mesh()
    devices = mesh.shape["device"]
    words = np.zeros((1, devices * _rounded(block.nbytes, devices)), _WORD)
    words.view(np.uint8)[0, : block.nbytes] = block
    spec = PartitionSpec("process", "device")
    return host_local_array_to_global_array(words, mesh, spec)


def _bytes_of(words: Array, size: int) -> np.ndarray:
    """Return the first bytes of each row."""
    return read_value(words, explicit=True).view(np.uint8)[..., :size]


def _rounded(size: int, devices: int) -> int:
    """Return the words per device for a block, rounded up to limit the number of programs."""
    words = max(-(-size // (_WORD.itemsize * devices)), _LEAST)
    step = (1 << math.floor(math.log2(words))) // _STEPS
    return -(-words // step) * step


def _mesh() -> Mesh:
    """Return a mesh with as many devices per process as the smallest process has."""
    return _mesh_of(tuple(jax.devices()))


@lru_cache(maxsize=4)
def _mesh_of(devices: tuple[Device, ...]) -> Mesh:
    by_process: dict[int, list[Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    fewest = min(map(len, by_process.values()))
    rows = [by_process[process][:fewest] for process in sorted(by_process)]
    return Mesh(np.array(rows), ("process", "device"))


@lru_cache(maxsize=4)
def _summed(mesh: Mesh) -> Any:
    """Return a function that sums the rows, all but one of which are zero."""

    def broadcast_one_to_all(words: jax.Array) -> jax.Array:
        return jnp.sum(words, axis=0, dtype=words.dtype)

    spread = NamedSharding(mesh, PartitionSpec("device"))
    return pjit(broadcast_one_to_all, out_shardings=spread)
