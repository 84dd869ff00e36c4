"""`DeviceArray` and `ShardedDeviceArray`: what functions gave before there was `jax.Array`.

Both are Arrays with the members of that time. `isinstance` asks where an array is and not of which
class it was made, so that arrays of today, which are of one class wherever they are, pass for the
one or the other as well.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

import xlashard
from xlashard import Array, PmapSharding
from xlashard._jax.install import install_array_type
from xlashard._jax.shardings import Device
from xlashard._jax.transfer import HandleType, split
from xlashard.array.buffer_shape import in_shape
from xlashard.array.handles import as_kind, wrap_result
from xlashard.array.holder import Holder, check_alive, type_text
from xlashard.array.host import distinct_here
from xlashard.geometry import ShardIndex, ShardingSpec
from xlashard.geometry.spec_of_tiling import spec_of_tiling
from xlashard.legacy.modes.array_mode import as_jax_arrays, current_array_mode
from xlashard.legacy.modes.config_flags import jax_array, pmap_no_rank_reduction
from xlashard.legacy.shardings.parsed_specs import get_array_mapping
from xlashard.legacy.shardings.sharding_specs import mesh_sharding_specs
from xlashard.sharding import Mesh, NamedSharding, from_jax


def _devices_of(x: Any) -> int:
    """On how many devices an array of this process alone is; 0 for anything else."""
    kind = type(x)
    if kind is not HandleType and kind is not Array and not issubclass(kind, _LegacyArray):
        return 0
    handle = _handle_of(x)
    return handle.sharding.num_devices if handle.is_fully_addressable else 0


class _OnDevices(type(jax.Array)):
    def __instancecheck__(cls, instance: Any) -> bool:
        return _devices_of(instance) > 0


class _OnSeveralDevices(_OnDevices):
    def __instancecheck__(cls, instance: Any) -> bool:
        return type(instance) is cls or _devices_of(instance) > 1


def device_buffers(x: Any) -> list[Any]:
    """What each of this process's devices holds, in the order of the device assignment.

    Where the array has a `PmapSharding`, its `Unstacked` dimensions are left out, unless
    `jax_pmap_no_rank_reduction` is on.

    Args:
        x: An array of this package or of JAX.

    Raises:
        DeletedError: Its buffers are gone.
    """
    check_alive(x)
    buffers = split(_handle_of(x))
    sharding = x.sharding
    if pmap_no_rank_reduction.value or not isinstance(sharding, PmapSharding):
        return [_as_buffer(x, buffer) for buffer in buffers]
    spec = sharding.sharding_spec
    if spec.unstacked_dims:
        shape = spec.shard_shape(x.shape)
        buffers = [in_shape(buffer, shape) for buffer in buffers]
    return [_as_buffer(x, buffer) for buffer in buffers]


def _as_buffer(x: Any, handle: Any) -> Any:
    """Return the array over a buffer of an array; of a `jax.Array` with `jax_array`, JAX's own."""
    if jax_array.value and not issubclass(type(x), _LegacyArray):
        return handle
    return as_device_array(handle)


def device_buffer(x: Any) -> Any:
    """What the only device of an array holds.

    Args:
        x: An array of this package or of JAX.

    Raises:
        AttributeError: It is on several devices.
        DeletedError: Its buffers are gone.
    """
    count = _handle_of(x).sharding.num_devices
    if count != 1:
        raise AttributeError(
            f"device_buffer is what one device holds, and this array, {type_text(x)}, is on "
            f"{count} devices: write x.addressable_data(0), or x.device_buffers for all"
        )
    return device_buffers(x)[0]


def sharding_spec(x: Any) -> ShardingSpec:
    """Return the `ShardingSpec` of an array; on a mesh, with one entry per axis of the mesh.

    Args:
        x: An array of this package or of JAX.

    Raises:
        TilingError: No grid of the devices says it.
    """
    sharding = from_jax(x.sharding)
    if isinstance(sharding, PmapSharding):
        return sharding.sharding_spec
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        mesh = sharding.mesh
        to_spec = mesh_sharding_specs(mesh.shape, mesh.axis_names, allow_uneven_axes=True)
        return to_spec(x, get_array_mapping(sharding.spec))
    return spec_of_tiling(sharding.tiling(x.shape))


def buffer_indices(x: Any) -> tuple[ShardIndex, ...]:
    """Which part of an array each of its devices holds, by the sharding spec's order.

    Args:
        x: An array of this package or of JAX.

    Raises:
        TilingError: No grid of the devices says it.
    """
    return tuple(sharding_spec(x).indices(x.shape).flat)


def one_replica_buffer_indices(x: Any) -> list[int]:
    """The numbers of buffers that hold an array once, without copies.

    Args:
        x: An array of this package or of JAX.
    """
    return list(distinct_here(_handle_of(x))[1].buffers)


def to_py(x: Any) -> np.ndarray:
    """The value.

    Args:
        x: An array of this package or of JAX.
    """
    return np.asarray(x)


class _LegacyArray(Array):
    """An Array with the members of its time."""

    __slots__ = ()

    @property
    def device_buffer(self) -> Any:
        """What its only device holds; `addressable_data(0)` today."""
        return device_buffer(self)

    @property
    def device_buffers(self) -> list[Any]:
        """What each device holds; the data of `addressable_shards` today."""
        return device_buffers(self)

    @property
    def sharding_spec(self) -> ShardingSpec:
        """How it is cut and dealt; `sharding` today."""
        return sharding_spec(self)

    @property
    def indices(self) -> tuple[ShardIndex, ...]:
        """Which part each device holds; `sharding.devices_indices_map(shape)` today."""
        return buffer_indices(self)

    @property
    def one_replica_buffer_indices(self) -> list[int]:
        """Numbers of buffers that hold it once; `shard.replica_id == 0` today."""
        return one_replica_buffer_indices(self)

    def to_py(self) -> np.ndarray:
        """The value; `np.asarray(x)` today."""
        return to_py(self)

    # What is taken out of one on several devices may be on one of them alone.
    def __getitem__(self, index: Any, /) -> Any:
        return _with_matching_class(super().__getitem__(index))

    def _iterate(self, *, reverse: bool) -> Iterator[Any]:
        return map(_with_matching_class, super()._iterate(reverse=reverse))


class DeviceArray(_LegacyArray, metaclass=_OnDevices):
    """An array on devices of this process; of the class itself are those on one device.

    Programs get instances where `jax_array` is off. `isinstance(x, DeviceArray)` holds for every
    array that is on this process's devices alone, as it did for `ShardedDeviceArray`s, and also for
    those of today; for a GlobalDeviceArray it does not. `x.device` is the device of one on a single
    device; `x.device()`, as it was then, may be written where the era's names are installed.

    Example:
        >>> import jax.numpy as jnp
        >>> isinstance(jnp.zeros(3), DeviceArray)
        True
    """

    __slots__ = ()


class ShardedDeviceArray(DeviceArray, metaclass=_OnSeveralDevices):
    """An array over several devices of this process.

    Programs get instances where `jax_array` is off. `isinstance(x, ShardedDeviceArray)` holds for
    every array on more than one device, all of them this process's, also for those of today, and
    for the results of `pjit` on a mesh of one device.

    Example:
        >>> import jax.numpy as jnp
        >>> isinstance(jnp.zeros(3), ShardedDeviceArray)
        False
    """

    __slots__ = ()


install_array_type(DeviceArray)
install_array_type(ShardedDeviceArray)


def device_array_class(handle: Any) -> type[Array]:
    """Which of the two a result is.

    Args:
        handle: The result's buffers.
    """
    return DeviceArray if handle.sharding.num_devices == 1 else ShardedDeviceArray


def _with_matching_class(x: Any) -> Any:
    """An array of the class that tells on how many devices it is."""
    if not issubclass(type(x), _LegacyArray) or device_array_class(x._handle) is type(x):
        return x
    return wrap_result(x._handle, device_array_class(x._handle))


def as_device_array(handle: Any) -> DeviceArray:
    """A `DeviceArray` over a handle, sharing its buffers."""
    return wrap_result(handle, DeviceArray)


def _handle_of(x: Any) -> Any:
    return x._handle if isinstance(x, Holder) else x


class AddedMembers:
    """What arrays of today are given as long as programs of the era run.

    They pass for the classes of the era, so they must have the members of these.
    """

    device_buffer = property(device_buffer)
    device_buffers = property(device_buffers)
    sharding_spec = property(sharding_spec)
    indices = property(buffer_indices)
    one_replica_buffer_indices = property(one_replica_buffer_indices)
    to_py = to_py


def device_itself(device: Device) -> Device:
    """What a device gives when it is called: `x.device` was a method, and is a device now."""
    return device


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
    return _in_current_mode(made, ShardedDeviceArray)


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
    return as_jax_arrays(_in_current_mode(made, DeviceArray))


def _in_current_mode(made: Any, kind: type[Array]) -> Any:
    # Keys are arrays of JAX.
    if current_array_mode().jax_array or type(made) is not Array:
        return made
    return as_kind(made, kind)
