"""`DeviceArray` and `ShardedDeviceArray`: the array classes that preceded `jax.Array`.

Both are Arrays with additional members. `isinstance` depends on the devices of an array and not on
its class, so today's arrays are instances of one or the other as well.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from xlashard._jax.runtime.dispatch import register_array_type
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.transfer import HandleType, split
from xlashard.core.array import Array
from xlashard.core.array.array_class.base import check_alive, handle_of, type_text
from xlashard.core.array.array_class.handles import as_class, wrap_result
from xlashard.core.array.placement.read import distinct_here
from xlashard.core.sharding import Mesh, NamedSharding, from_jax
from xlashard.legacy.arrays import buffer_arrays
from xlashard.legacy.arrays.stacked import unstacked_buffers
from xlashard.legacy.modes.config_flags import (
    as_jax_arrays,
    current_array_mode,
    jax_array,
    pmap_no_rank_reduction,
)
from xlashard.legacy.shardings.op_shardings import mesh_sharding_specs
from xlashard.legacy.shardings.parsed_specs import get_array_mapping
from xlashard.legacy.shardings.pmap import PmapSharding
from xlashard.legacy.shardings.sharding_spec import (
    ShardIndex,
    ShardingSpec,
    sharding_spec_from_tiling,
)


def _devices_of(x: Any) -> int:
    """Return the number of devices of a fully addressable array; 0 for anything else."""
    kind = type(x)
    if kind is not HandleType and kind is not Array and not issubclass(kind, LegacyArray):
        return 0
    handle = handle_of(x)
    return handle.sharding.num_devices if handle.is_fully_addressable else 0


class _OnDevices(type(jax.Array)):
    def __instancecheck__(cls, instance: Any) -> bool:
        return _devices_of(instance) > 0


class _OnSeveralDevices(_OnDevices):
    def __instancecheck__(cls, instance: Any) -> bool:
        return type(instance) is cls or _devices_of(instance) > 1


def device_buffers(x: Any) -> list[Any]:
    """Return the addressable shards of an array, in the order of the device assignment.

    With a `PmapSharding`, shards lack its `Unstacked` dimensions, unless
    `jax_pmap_no_rank_reduction` is on.

    Args:
        x: An array of this package or of JAX.

    Raises:
        DeletedError: The array was deleted or donated.
    """
    check_alive(x)
    handle, sharding = handle_of(x), x.sharding
    if pmap_no_rank_reduction.value or not isinstance(sharding, PmapSharding):
        buffers = split(handle)
    else:
        buffers = unstacked_buffers(handle, sharding.sharding_spec)
    return [_as_buffer(x, buffer) for buffer in buffers]


def _as_buffer(x: Any, handle: Any) -> Any:
    """Return the array over one buffer: with `jax_array` on, JAX's own for a `jax.Array`."""
    if jax_array.value and not issubclass(type(x), LegacyArray):
        return handle
    return as_device_array(handle)


def sharding_spec(x: Any) -> ShardingSpec:
    """Return the `ShardingSpec` of an array; on a mesh, with one entry per axis of the mesh.

    Args:
        x: An array of this package or of JAX.

    Raises:
        TilingError: The sharding has no `ShardingSpec`.
    """
    sharding = from_jax(x.sharding)
    if isinstance(sharding, PmapSharding):
        return sharding.sharding_spec
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        mesh = sharding.mesh
        to_spec = mesh_sharding_specs(mesh.shape, mesh.axis_names, allow_uneven_axes=True)
        return to_spec(x, get_array_mapping(sharding.spec))
    return sharding_spec_from_tiling(sharding.tiling(x.shape))


class LegacyArray(Array):
    """Array with the members of the classes before `jax.Array`.

    While the removed names are installed, today's arrays have its properties too, because they
    are instances of `DeviceArray`.
    """

    __slots__ = ()

    device_buffers = property(
        device_buffers, doc="Buffer on each device; the data of `addressable_shards` today."
    )
    sharding_spec = property(sharding_spec, doc="`ShardingSpec` of the array; `sharding` today.")

    @property
    def device_buffer(self) -> Any:
        """Buffer on the only device; `addressable_data(0)` today.

        Raises:
            AttributeError: The array is on several devices.
            DeletedError: The array was deleted or donated.
        """
        count = handle_of(self).sharding.num_devices
        if count != 1:
            raise AttributeError(
                f"device_buffer requires an array on one device, but {type_text(self)} is on "
                f"{count} devices: write x.addressable_data(0), or x.device_buffers"
            )
        return device_buffers(self)[0]

    @property
    def indices(self) -> tuple[ShardIndex, ...]:
        """Index of each shard; `sharding.devices_indices_map(shape)` today.

        Raises:
            TilingError: The sharding has no `ShardingSpec`.
        """
        return tuple(sharding_spec(self).indices(self.shape).flat)

    @property
    def one_replica_buffer_indices(self) -> list[int]:
        """Numbers of the buffers with replica id 0; `shard.replica_id == 0` today."""
        return list(distinct_here(handle_of(self))[1].buffers)

    def to_py(self) -> np.ndarray:
        """Return the value as a NumPy array."""
        return np.asarray(self)

    # An element of an array on several devices may be on one of them only.
    def __getitem__(self, index: Any, /) -> Any:
        return _with_matching_class(super().__getitem__(index))

    def _iterate(self, *, reverse: bool) -> Iterator[Any]:
        return map(_with_matching_class, super()._iterate(reverse=reverse))


class DeviceArray(LegacyArray, metaclass=_OnDevices):
    """Fully addressable array; instances of exactly this class are on one device.

    Functions return instances while `jax_array` is off. `isinstance(x, DeviceArray)` holds for
    every fully addressable array, including `ShardedDeviceArray`s and today's arrays, and not for
    GlobalDeviceArrays. `x.device` is the device of an array on one device; `x.device()` works while
    the removed names are installed.

    Example:
        >>> import jax.numpy as jnp
        >>> isinstance(jnp.zeros(3), DeviceArray)
        True
    """

    __slots__ = ()


class ShardedDeviceArray(DeviceArray, metaclass=_OnSeveralDevices):
    """Fully addressable array over several devices.

    Functions return instances while `jax_array` is off. `isinstance(x, ShardedDeviceArray)` holds
    for every fully addressable array on more than one device, including today's arrays, and for
    the results of `pjit` on a mesh of one device.

    Example:
        >>> import jax.numpy as jnp
        >>> isinstance(jnp.zeros(3), ShardedDeviceArray)
        False
    """

    __slots__ = ()


register_array_type(DeviceArray)
register_array_type(ShardedDeviceArray)


def device_array_class(handle: Any) -> type[Array]:
    """Return `DeviceArray` or `ShardedDeviceArray`, by the number of devices of a result.

    Args:
        handle: The result's buffers.
    """
    return DeviceArray if handle.sharding.num_devices == 1 else ShardedDeviceArray


def _with_matching_class(x: Any) -> Any:
    """Return an array in the class that fits its number of devices."""
    if not issubclass(type(x), LegacyArray) or device_array_class(x._handle) is type(x):
        return x
    return wrap_result(x._handle, device_array_class(x._handle))


def as_device_array(handle: Any) -> DeviceArray:
    """Return a `DeviceArray` over a handle, sharing its buffers."""
    return wrap_result(handle, DeviceArray)


def device_itself(device: Device) -> Device:
    """Return the device itself, so that `x.device()` works: `x.device` was a method."""
    return device


def make_sharded_device_array(
    aval: Any,
    sharding_spec: ShardingSpec | None,
    device_buffers: Sequence[Any],
    indices: Sequence[Any] | None = None,
) -> Any:
    """Make an array of one buffer per device.

    Args:
        aval: Shape and dtype of the array.
        sharding_spec: The `ShardingSpec`; if None, one index of the first dimension per device.
        device_buffers: An array on each device, in the order of the spec's grid.
        indices: The index of each buffer, which is then checked.

    Raises:
        PlacementError: Buffers do not fit the spec, the shape or the indices.
        GeometryError: The spec does not fit the shape.
        ArgumentError: A buffer is not an array on one device, or the aval is invalid.
    """
    array = buffer_arrays.make_sharded_device_array(aval, sharding_spec, device_buffers, indices)
    return _in_current_mode(array, ShardedDeviceArray)


def make_device_array(aval: Any, device: Device | None, device_buffer: Any) -> Any:
    """Make an array of one buffer.

    Args:
        aval: Its shape and dtype.
        device: The device to commit the array to; None leaves it uncommitted.
        device_buffer: An array on one device.

    Raises:
        PlacementError: The buffer is on another device, or has another shape or dtype.
        ArgumentError: The buffer is not an array on one device.
    """
    array = buffer_arrays.make_device_array(aval, device, device_buffer)
    return as_jax_arrays(_in_current_mode(array, DeviceArray))


def _in_current_mode(array: Any, kind: type[Array]) -> Any:
    # Keys are arrays of JAX.
    if current_array_mode().jax_array or type(array) is not Array:
        return array
    return as_class(array, kind)
