"""Constructors of `GlobalDeviceArray`: from buffers, from callbacks and from Arrays."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from xlashard import Array, Mesh
from xlashard._jax.runtime.transfer import with_sharding
from xlashard.array.constructors import array_of_pieces
from xlashard.array.core.array import wrap
from xlashard.array.core.base import type_text
from xlashard.array.core.protocols import sharding_text
from xlashard.array.device_buffers import (
    Caller,
    assemble_arrays,
    read_buffers,
)
from xlashard.array.placement.target import ResolvedSharding, parse_shape, resolve_sharding
from xlashard.array.reshard.execute import with_device_order
from xlashard.errors import ArgumentError, PlacementError, counted
from xlashard.legacy.arrays.shards import Index, read_axes
from xlashard.legacy.shardings.partition_spec import PartitionSpec
from xlashard.pjit.shardings.resolve import named as named_sharding

type Where = tuple[Sequence[int], Mesh, Any]
"""Arguments `global_shape`, `global_mesh` and `mesh_axes`."""

_BUFFERS = Caller("GlobalDeviceArray", "device_buffers")
_MADE = Caller("GlobalDeviceArray.from_batched_callback_with_devices", "data_callback's array ")


def target_of(where: Where) -> ResolvedSharding:
    """Return the placement of an array by its shape, mesh and mesh axes.

    Raises:
        GeometryError: The axes do not fit the mesh, or do not divide the shape.
        ArgumentError: `global_mesh` or `mesh_axes` is invalid.
    """
    shape, mesh, mesh_axes = where
    if not isinstance(mesh, Mesh):
        raise ArgumentError(
            f"global_mesh of type {type(mesh).__name__} is invalid: expected a Mesh, such as "
            "Mesh(np.array(jax.devices()).reshape(4, 2), ('x', 'y'))"
        )
    if not isinstance(mesh_axes, PartitionSpec):
        read_axes(mesh_axes)
    spec = PartitionSpec(*(mesh_axes or ()))
    return resolve_sharding(parse_shape(shape, "global_shape"), named_sharding(mesh, spec.today))


def from_buffers(where: Where, device_buffers: Any) -> Array:
    """Return the Array over one buffer per local device, in the order of the mesh."""
    target = target_of(where)
    if isinstance(device_buffers, jax.Array) and device_buffers.ndim == len(target.shape):
        # One handle over all buffers, as the runtime returned it.
        return named(Array.from_jax(device_buffers), where[1], where[2])
    singles = read_buffers(device_buffers, _BUFFERS)
    joint = _array(assemble_arrays(singles, target, None, _BUFFERS))
    for number, (single, device) in enumerate(zip(singles, target.devices, strict=True)):
        if single.device != device:
            raise PlacementError(
                f"{single.name} is on {single.device}, but global_mesh.local_devices[{number}] "
                f"is {device}: order the buffers by global_mesh.local_devices, not by "
                "jax.local_devices(), as in [device_put(shards[d], d) for d in "
                "global_mesh.local_devices]"
            )
    return joint


def from_callback_pieces(where: Where, data_callback: Callable[[Index], Any]) -> Array:
    """Return the Array of shards from one call of the callback per local device."""
    target = target_of(where)
    return _array(array_of_pieces(target, _each_device(target), data_callback))


def from_batched_callback_pieces(
    where: Where, data_callback: Callable[[Sequence[Index]], Iterable[Any]]
) -> Array:
    """Return the Array of shards from one call, in the order of the local devices."""
    target = target_of(where)
    pieces = list(data_callback(list(target.indices)))
    count = len(target.devices)
    if len(pieces) != count:
        raise PlacementError(
            f"data_callback returned {counted(len(pieces), 'shard')} for "
            f"{counted(count, 'index', 'indices')}: return one per index, such as "
            "[value[index] for index in indices]"
        )
    shards = iter(pieces)
    return _array(array_of_pieces(target, _each_device(target), lambda _: next(shards)))


def from_device_pieces(where: Where, data_callback: Callable[[Any], Any]) -> Array:
    """Return the Array of shards that a callback places on the devices of each distinct index."""
    target = target_of(where)
    requests = [
        (target.indices[numbers[0]], tuple(target.devices[n] for n in numbers))
        for numbers in target.holders
    ]
    singles = read_buffers(list(data_callback(requests)), _MADE)
    return _array(assemble_arrays(singles, target, None, _MADE))


def named(array: Array, mesh: Mesh, mesh_axes: Any) -> Array:
    """Return an Array with a `NamedSharding` on a mesh, over the same buffers.

    Raises:
        PlacementError: The array has another sharding.
    """
    target = target_of((array.shape, mesh, mesh_axes))
    if not target.sharding.is_equivalent_to(array.sharding, array.ndim):
        raise PlacementError(
            f"from_array does not move data, but the Array {type_text(array)} has "
            f"{sharding_text(array.sharding)}, not {sharding_text(target.sharding)}: first write "
            "device_put(array, NamedSharding(global_mesh, mesh_axes))"
        )
    handle = with_device_order(array._handle, target.sharding.devices)
    return wrap(with_sharding(handle, target.jax_sharding, committed=True), target.sharding)


def _each_device(target: ResolvedSharding) -> list[list[int]]:
    return [[number] for number in range(len(target.devices))]


def _array(made: Any) -> Array:
    if isinstance(made, Array):
        return made
    raise ArgumentError(
        "a GlobalDeviceArray cannot contain PRNG keys of jax.random.key: pass "
        "jax.random.key_data(keys), and call jax.random.wrap_key_data where the keys are used"
    )
