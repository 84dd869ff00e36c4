"""What made arrays of buffers: with `jax_array` on Arrays, else those of then."""

from collections.abc import Sequence
from typing import Any

import xlashard
from xlashard import Array
from xlashard._jax.shardings import Device
from xlashard.array.handles import as_kind
from xlashard.geometry import ShardingSpec
from xlashard.legacy.device_arrays import DeviceArray, ShardedDeviceArray
from xlashard.legacy.worlds import of_one_class, world_in_force


def make_sharded_device_array(
    aval: Any,
    sharding_spec: ShardingSpec | None,
    device_buffers: Sequence[Any],
    indices: Sequence[Any] | None = None,
) -> Any:
    """Makes one array of the buffers on its devices.

    Args:
        aval: Shape and dtype of the array.
        sharding_spec: How it is cut and dealt to the devices; one index of the first dimension to
            each, if None.
        device_buffers: An array on each device, in the order of the spec's grid.
        indices: What each of them holds, if you like it checked.

    Raises:
        PlacementError: Buffers that don't fit the spec, the shape or the indices.
        GeometryError: A spec that does not fit the shape.
        ArgumentError: Buffers that are no arrays on one device, or an aval that is none.
    """
    made = xlashard.make_sharded_device_array(aval, sharding_spec, device_buffers, indices)
    return _of_the_world(made, ShardedDeviceArray)


def make_device_array(aval: Any, device: Device | None, device_buffer: Any) -> Any:
    """Makes an array of one buffer.

    Args:
        aval: Its shape and dtype.
        device: The device that computations with it must stay on; None leaves them free.
        device_buffer: An array on one device.

    Raises:
        PlacementError: The buffer is on another device, or has another shape or dtype.
        ArgumentError: It is no array on one device.
    """
    made = xlashard.make_device_array(aval, device, device_buffer)
    return of_one_class(_of_the_world(made, DeviceArray))


def _of_the_world(made: Any, kind: type[Array]) -> Any:
    # Keys are arrays of JAX.
    if world_in_force().jax_array or type(made) is not Array:
        return made
    return as_kind(made, kind)
