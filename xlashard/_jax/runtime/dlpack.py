"""Memory of other libraries as buffers: DLPack capsules in and out, without a copy."""

from typing import Any

import jax
from jax._src import dlpack
from jax._src.lib import _jax

from xlashard._jax.runtime.shardings import Device

type Handle = Any

HOST_MEMORY = 1
"""The number by which DLPack calls memory that the host reads: `kDLCPU`."""

_NEWEST = dlpack.DLPACK_VERSION


def host_capsule(external: Any, *, copy: bool) -> Any:
    """What a producer in the host's memory hands over.

    Args:
        external: Anything with `__dlpack__`.
        copy: True asks for a copy, which has no gaps and is nobody else's.

    Raises:
        BufferError: The producer can't say its memory in DLPack's words.
    """
    how = {"copy": True} if copy else {}
    try:
        return external.__dlpack__(max_version=_NEWEST, **how)
    except TypeError:
        # Made before DLPack had versions.
        return external.__dlpack__(**how)


def handle_of_capsule(capsule: Any, device: Device, *, copy: bool | None) -> Handle:
    """A handle over a capsule's memory.

    Args:
        capsule: In the host's memory; it is used up.
        device: A CPU device: the host's memory is that of each of them.
        copy: False forbids a copy; None makes one where the memory is not aligned.

    Raises:
        ValueError: The memory is not aligned, and `copy` is False.
        RuntimeError: It has gaps or overlaps, or elements that no device holds.
    """
    return _jax.dlpack_managed_tensor_to_buffer(capsule, device, None, copy, HOST_MEMORY)


def handle_on_device(external: Any, copy: bool | None) -> Handle:
    """A handle over memory that is not the host's, on the device that has it; dtypes stay."""
    with jax.enable_x64(True):
        return jax.dlpack.from_dlpack(external, copy=copy)
