"""What a caller gives for one piece of an array: on the host, or on one device to go on from."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from xlashard._jax.transfer import Handle, HandleType, Tracer, split
from xlashard.array.array import Array
from xlashard.array.holder import check_alive
from xlashard.array.host import read_value
from xlashard.array.host_put import host_value
from xlashard.array.keys import is_key_array, key_handle
from xlashard.array.placement import places
from xlashard.array.reshard import reshard
from xlashard.errors import ArgumentError, DeletedError
from xlashard.sharding import SingleDeviceSharding, from_jax


class Given(NamedTuple):
    """A value on its way to a device.

    Attributes:
        value: A NumPy array or a handle on one device; the numbers of keys.
        weak_type: Whether its dtype is weak.
        keys: The keys themselves, where it was some.
    """

    value: Any
    weak_type: bool
    keys: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; that of keys for keys."""
        return tuple((self.value if self.keys is None else self.keys).shape)

    @property
    def dtype(self) -> Any:
        """Its dtype; that of keys for keys."""
        return (self.value if self.keys is None else self.keys).dtype


def as_given(x: Any, name: Callable[[], str], instead: str) -> Given:
    """Reads a value; one that is spread over devices is brought to the first of them.

    Args:
        x: A NumPy array, a number, an Array, an array or keys of JAX.
        name: Gives what to call it in an error.
        instead: What to do with a traced one.

    Raises:
        ArgumentError: It is none of these, or traced.
        DeletedError: Its buffers are gone.
    """
    if isinstance(x, Tracer):
        raise ArgumentError(
            f"{name()} is traced, and only known values can be put on devices one by one: {instead}"
        )
    if isinstance(x, np.ndarray):
        return Given(*host_value(x, name))
    if is_key_array(x):
        return Given(_on_one_device(key_handle(x)), False, x)
    if not isinstance(x, Array | HandleType):
        return Given(*host_value(x, name))
    try:
        check_alive(x)
    except DeletedError as error:
        raise DeletedError(f"{name()}: {error}") from None
    handle: Handle = x.to_jax() if isinstance(x, Array) else x
    return Given(_on_one_device(handle), handle.weak_type)


def _on_one_device(handle: Handle) -> Any:
    if not handle.is_fully_addressable:
        # What this process needs of it must be here: the others may need none, and send nothing.
        whole = handle.is_fully_replicated and split(handle)
        return whole[0] if whole else read_value(Array.from_jax(handle))
    if handle.sharding.num_devices == 1:
        return handle
    device = from_jax(handle.sharding).devices[0]
    return reshard(handle, places(handle.shape, SingleDeviceSharding(device)))
