"""What devices and their arrays could do besides what they can today."""

from typing import Any

import jax


def live_buffers(device: Any) -> list[jax.Array]:
    """The arrays that lie on one device alone."""
    return [x for x in device.client.live_arrays() if x.devices() == {device}]


def to_dlpack(x: Any, **options: Any) -> Any:
    """An array's memory as a capsule of DLPack, which other libraries take.

    Args:
        x: The array.
        **options: Those of today's `__dlpack__`; `take_ownership` is not looked at.
    """
    options.pop("take_ownership", None)
    return x.__dlpack__(**options)


def enable_x64(new_val: bool = True) -> Any:
    """A context in which numbers have 64 bits."""
    return jax.enable_x64(new_val)


def disable_x64() -> Any:
    """A context in which numbers have 32 bits."""
    return jax.enable_x64(False)
