"""Import memory of other libraries as buffers by DLPack, without a copy."""

from typing import Any

import jax
from jax._src import dlpack
from jax._src.lib import _jax

from xlashard._jax.runtime.shardings import Device

type Handle = Any

HOST_MEMORY = 1
"""DLPack's device type of host memory: `kDLCPU`."""

_NEWEST = dlpack.DLPACK_VERSION


def host_capsule(external: Any, *, copy: bool) -> Any:
    """Return the DLPack capsule of a producer in host memory.

    Args:
        external: Anything with `__dlpack__`.
        copy: True for a contiguous copy that the producer does not share.

    Raises:
        BufferError: If the producer can't export its memory.
    """
    how = {"copy": True} if copy else {}
    try:
        return external.__dlpack__(max_version=_NEWEST, **how)
    except TypeError:
        # The producer predates versions of DLPack.
        return external.__dlpack__(**how)


def handle_of_capsule(capsule: Any, device: Device, *, copy: bool | None) -> Handle:
    """Return a handle over a capsule's memory, and consume the capsule.

    Args:
        capsule: A capsule of host memory.
        device: A CPU device.
        copy: False forbids a copy; None copies unaligned memory.

    Raises:
        ValueError: If the memory is not aligned and `copy` is False.
        RuntimeError: If the memory is not contiguous, or for an unsupported dtype.
    """
    return _jax.dlpack_managed_tensor_to_buffer(capsule, device, None, copy, HOST_MEMORY)


def handle_on_device(external: Any, copy: bool | None) -> Handle:
    """Return a handle over the memory of a device, on that device and with its dtype."""
    with jax.enable_x64(True):
        return jax.dlpack.from_dlpack(external, copy=copy)
