"""Where a `GlobalDeviceArray` comes from: buffers, callbacks, Arrays; each becomes one Array."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from xlashard import Array, Mesh
from xlashard._jax.tracebacks import short_tracebacks
from xlashard._jax.transfer import dressed
from xlashard.array.constructors import array_of_pieces
from xlashard.array.holder import type_text
from xlashard.array.moving import placed
from xlashard.array.order import in_order
from xlashard.array.placement import Places, as_shape, places
from xlashard.array.singles import Caller, joined, read_singles
from xlashard.array.text import sharding_text
from xlashard.errors import ArgumentError, PlacementError, counted
from xlashard.legacy.arrays.shards import Index, read_axes
from xlashard.legacy.shardings.partition_spec import PartitionSpec
from xlashard.pjit.resources import named as named_sharding

type Where = tuple[Sequence[int], Mesh, Any]
"""Global shape, mesh and mesh axes, as a caller gave them."""

_BUFFERS = Caller("GlobalDeviceArray", "device_buffers")
_MADE = Caller("GlobalDeviceArray.from_batched_callback_with_devices", "data_callback's array ")


def target_of(where: Where) -> Places:
    """What a mesh and its axes mean for arrays of a shape.

    Raises:
        GeometryError: They don't fit.
        ArgumentError: There is no mesh, or no axes.
    """
    shape, mesh, mesh_axes = where
    if not isinstance(mesh, Mesh):
        raise ArgumentError(
            f"global_mesh must be a Mesh of devices, not {type(mesh).__name__}: write "
            "Mesh(np.array(jax.devices()).reshape(4, 2), ('x', 'y'))"
        )
    if not isinstance(mesh_axes, PartitionSpec):
        read_axes(mesh_axes)
    spec = PartitionSpec(*(mesh_axes or ()))
    return places(as_shape(shape, "global_shape"), named_sharding(mesh, spec.today))


def from_buffers(where: Where, device_buffers: Any) -> Array:
    """The Array over one buffer for each local device of a mesh, in that order."""
    with short_tracebacks:
        target = target_of(where)
        if isinstance(device_buffers, jax.Array) and device_buffers.ndim == len(target.shape):
            # All buffers in one, as the runtime gave them.
            return named(Array.from_jax(device_buffers), where[1], where[2])
        singles = read_singles(device_buffers, _BUFFERS)
        joint = _array(joined(singles, target, None, _BUFFERS))
        for number, (single, device) in enumerate(zip(singles, target.devices, strict=True)):
            if single.device != device:
                raise PlacementError(
                    f"{single.name} is on {single.device}, but global_mesh.local_devices[{number}] "
                    f"is {device}: put the buffers in the order of the mesh, not of "
                    "jax.local_devices(), as by [device_put(piece_of[d], d) for d in "
                    "global_mesh.local_devices]"
                )
        return joint


def from_callback_pieces(where: Where, data_callback: Callable[[Index], Any]) -> Array:
    """The Array of pieces asked for one by one, once for each local device."""
    with short_tracebacks:
        target = target_of(where)
        return _array(array_of_pieces(target, _each_device(target), data_callback))


def from_batched_callback_pieces(
    where: Where, data_callback: Callable[[Sequence[Index]], Iterable[Any]]
) -> Array:
    """The Array of pieces asked for all at once, in the order of the local devices."""
    with short_tracebacks:
        target = target_of(where)
        pieces = list(data_callback(list(target.indices)))
        count = len(target.devices)
        if len(pieces) != count:
            raise PlacementError(
                f"data_callback gave {counted(len(pieces), 'piece')} for "
                f"{counted(count, 'index', 'indices')}: give one for each, such as "
                "[whole[index] for index in indices]"
            )
        given = iter(pieces)
        return _array(array_of_pieces(target, _each_device(target), lambda _: next(given)))


def from_device_pieces(where: Where, data_callback: Callable[[Any], Any]) -> Array:
    """The Array of arrays that a function puts on the devices of each distinct index."""
    with short_tracebacks:
        target = target_of(where)
        holders: dict[int, list[int]] = {}
        for number, tile in enumerate(target.tiles):
            holders.setdefault(tile, []).append(number)
        asked = [
            (target.indices[numbers[0]], tuple(target.devices[n] for n in numbers))
            for numbers in holders.values()
        ]
        singles = read_singles(list(data_callback(asked)), _MADE)
        return _array(joined(singles, target, None, _MADE))


def named(array: Array, mesh: Mesh, mesh_axes: Any) -> Array:
    """An Array by its name on a mesh, over the same buffers.

    Raises:
        PlacementError: It doesn't lie so.
    """
    target = target_of((array.shape, mesh, mesh_axes))
    if not target.sharding.is_equivalent_to(array.sharding, array.ndim):
        raise PlacementError(
            f"an Array {type_text(array)} lies as {sharding_text(array.sharding)}, not as "
            f"{sharding_text(target.sharding)}, and nothing is moved here: first write "
            "device_put(array, NamedSharding(global_mesh, mesh_axes))"
        )
    handle = in_order(array.to_jax(), target.sharding.devices)
    return placed(dressed(handle, target.twin, committed=True), target.sharding)


def _each_device(target: Places) -> list[list[int]]:
    return [[number] for number in range(len(target.devices))]


def _array(made: Any) -> Array:
    if isinstance(made, Array):
        return made
    raise ArgumentError(
        "a GlobalDeviceArray holds numbers, not keys of jax.random.key: give it "
        "jax.random.key_data(keys), and wrap them again by jax.random.wrap_key_data where they are "
        "used"
    )
