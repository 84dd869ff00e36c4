"""Targets of arrays: parsed from what callers pass, alone or in trees, and resolved for a shape."""

from functools import cached_property, lru_cache
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout

from xlashard._jax.runtime.global_state import cleared_with_jax
from xlashard._jax.runtime.shardings import (
    Device,
    JaxSharding,
    default_memory_kind,
    is_auto_layout,
    layout_problem,
)
from xlashard._jax.runtime.transfer import make_aval
from xlashard._jax.trace.tracing import mesh_in_force
from xlashard._jax.tree_definitions import leaf_paths
from xlashard.core.sharding import (
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
    XLACompatibleSharding,
    from_jax,
    to_jax,
)
from xlashard.errors import (
    ArgumentError,
    GeometryError,
    OutOfMemoryError,
    PlacementError,
    ResourceError,
    XlashardError,
)
from xlashard.geometry import Tiling
from xlashard.support.formatting import brief
from xlashard.support.lazily import dataclass

Space = jax.memory.Space

type Index = tuple[slice, ...]

# Enough for the distinct shapes of several large parameter trees.
_RESOLVED_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Placement:
    """Requested sharding and layout.

    Attributes:
        sharding: None leaves an array on its devices, and a host value uncommitted.
        layout: None for the default layout of the device.
        space: Memory space of the devices that hold the value, in place of a sharding.
    """

    sharding: Sharding | None
    layout: Layout | None = None
    space: Space | None = None


STAY = Placement(None)


def is_target(x: Any) -> bool:
    """Return True for a target, False for a tree of targets."""
    kinds = (jax.Device, Sharding, JaxSharding, Format, PartitionSpec, Space)
    return x is None or isinstance(x, kinds)


def parse_placement(value: Any, name: str) -> Placement:
    """Parse a target.

    Args:
        value: A device, a sharding, a `Format`, a memory space, or None.
        name: Name of the argument in errors.

    Raises:
        ArgumentError: The value is no target.
    """
    if value is None:
        return STAY
    if isinstance(value, Sharding):
        return Placement(value)
    if isinstance(value, JaxSharding):
        return Placement(from_jax(value))
    if isinstance(value, jax.Device):
        return Placement(SingleDeviceSharding(value))
    if isinstance(value, Format):
        return _from_format(value, name)
    if isinstance(value, PartitionSpec):
        mesh = mesh_in_force()
        if mesh is not None:
            return Placement(NamedSharding(mesh, value))
        raise ArgumentError(
            f"{name} is {value}, but no mesh is in force: call inside `with jax.set_mesh(mesh):`, "
            f"or write NamedSharding(mesh, {value})"
        )
    if isinstance(value, Space) and value is not Space.Any:
        return Placement(None, space=value)
    raise ArgumentError(
        f"{name} must be a device, a sharding, a Format, a memory space or None (stays in "
        f"place), not {type(value).__name__}: for example jax.devices()[0] or "
        "NamedSharding(mesh, P('data'))"
    )


def parse_sharding(value: Any, name: str) -> tuple[Sharding, Layout | None]:
    """Parse a sharding; a device alone is refused.

    Raises:
        ArgumentError: The value is no sharding.
    """
    if isinstance(value, Sharding):
        return value, None
    placement = parse_placement(value, name) if not isinstance(value, jax.Device) else STAY
    if placement.sharding is None:
        raise ArgumentError(
            f"{name} must be a sharding, not {value!r}: for example NamedSharding(mesh, P('data')) "
            "or SingleDeviceSharding(jax.devices()[0])"
        )
    return placement.sharding, placement.layout


def _from_format(value: Format, name: str) -> Placement:
    layout: Any = value.layout
    if is_auto_layout(layout):
        raise ArgumentError(
            f"{name} has an automatic layout, which only a compiler can choose: write "
            "Format(Layout(major_to_minor=(1, 0)), sharding), or only the sharding"
        )
    if value.sharding is None:
        return STAY
    return Placement(from_jax(value.sharding), layout)


def check_layout_rank(layout: Layout | None, ndim: int) -> None:
    """Refuse a layout that no array of some dimensions can have.

    Raises:
        PlacementError: With the layout to write.
    """
    problem = layout_problem(layout, ndim)
    if problem:
        raise PlacementError(problem)


@dataclass(frozen=True, eq=False)
class ResolvedSharding:
    """A sharding resolved for arrays of one shape; equal only to itself.

    Attributes:
        shape: Shape of the whole array, in elements.
        sharding: The caller's sharding.
        tiling: Tile of each device position.
        jax_sharding: The equivalent sharding of JAX.
        shard_shape: Shape of the shard on one device.
    """

    shape: tuple[int, ...]
    sharding: Sharding
    tiling: Tiling
    jax_sharding: JaxSharding
    shard_shape: tuple[int, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of the devices of this process."""
        return self.sharding.addressable_positions

    @cached_property
    def devices(self) -> list[Device]:
        """Devices of this process, in the order of the buffers of a handle."""
        devices = self.sharding.devices
        return [devices[i] for i in self.positions]

    @cached_property
    def indices(self) -> list[Index]:
        """Slice of the array on each device of this process."""
        return self.tiling.indices(self.shape, self.positions)

    @cached_property
    def tiles(self) -> list[int]:
        """Number of the tile on each device of this process."""
        return self.tiling.tile_ids(self.positions).tolist()

    @property
    def holders(self) -> list[list[int]]:
        """Numbers of this process's devices that hold one tile, for each of its tiles."""
        numbers: dict[int, list[int]] = {}
        for number, tile in enumerate(self.tiles):
            numbers.setdefault(tile, []).append(number)
        return list(numbers.values())

    def aval(self, dtype: Any, weak_type: bool = False) -> Any:
        """Return the abstract value of an array of a dtype under the sharding."""
        return make_aval(self.shape, dtype, self.jax_sharding, weak_type)

    @cached_property
    def on_host(self) -> bool:
        """True if the devices share the memory of the host."""
        return self.sharding.devices[0].platform == "cpu"

    @property
    def memory_kind(self) -> str | None:
        """Memory kind, with the default of the devices filled in."""
        return memory_kind_of(self.sharding)


def is_in_place(source: ResolvedSharding, target: ResolvedSharding) -> bool:
    """Return True if no byte moves from one sharding to the other."""
    old, new = source.sharding, target.sharding
    if source.tiling.is_partial or target.tiling.is_partial:
        return old.is_equivalent_to(new, len(source.shape))
    return source.memory_kind == target.memory_kind and (
        old.devices_indices_map(source.shape) == new.devices_indices_map(source.shape)
    )


def reorders_devices(source: ResolvedSharding, target: ResolvedSharding) -> bool:
    """Return True if the target has the devices of the source in another order.

    JAX reshards by a program of all these devices, which transfer guards let pass.
    """
    old, new = source.sharding.devices, target.sharding.devices
    return source.memory_kind == target.memory_kind and old != new and set(old) == set(new)


def check_reduced_sharding(sharding: Sharding, name: str) -> None:
    """Check that the sharding of a constructor that slices values is not unreduced.

    Raises:
        PlacementError: The sharding is unreduced.
    """
    if sharding.is_unreduced:
        raise PlacementError(
            f"sharding of {name} is {sharding}, whose devices hold partial results and no slices: "
            "give a sharding without unreduced axes, or the partial results by "
            "make_array_from_single_device_arrays(shape, sharding, arrays)"
        )


def move_to_space(sharding: Sharding, space: Space) -> Sharding:
    """Return a sharding with the memory kind of a memory space of its devices."""
    if space is Space.Host:
        return sharding.with_memory_kind("pinned_host")
    return sharding.with_memory_kind(default_memory_kind(sharding.devices[0]) or "device")


def memory_kind_of(sharding: Sharding) -> str | None:
    """Return the memory kind of a sharding; the default of its devices if unset."""
    return sharding.memory_kind or default_memory_kind(sharding.devices[0])


def resolve_sharding(shape: tuple[int, ...], sharding: Sharding) -> ResolvedSharding:
    """Resolve a sharding for a shape, cached.

    Raises:
        GeometryError: The sharding does not fit the shape.
    """
    if isinstance(sharding, XLACompatibleSharding):
        return _resolve_cached(shape, sharding)
    # A sharding of a user's class may be mutable.
    return _resolve(shape, sharding)


def resolve_requested(shape: tuple[int, ...], sharding: Sharding) -> ResolvedSharding:
    """Return `resolve_sharding` of a sharding that a caller requested for an existing value.

    Raises:
        GeometryError: The sharding does not fit the shape, or its spec has more entries than
            the shape has dimensions.
    """
    if isinstance(sharding, NamedSharding):
        return _resolve_checked(shape, sharding)
    return resolve_sharding(shape, sharding)


def _resolve(shape: tuple[int, ...], sharding: Sharding) -> ResolvedSharding:
    shard_shape = sharding.shard_shape(shape)
    return ResolvedSharding(
        shape, sharding, sharding.tiling(shape), to_jax(sharding, shape), shard_shape
    )


_resolve_cached = cleared_with_jax(lru_cache(maxsize=_RESOLVED_KEPT)(_resolve))


@cleared_with_jax
@lru_cache(maxsize=_RESOLVED_KEPT)
def _resolve_checked(shape: tuple[int, ...], sharding: NamedSharding) -> ResolvedSharding:
    sharding.check_compatible_aval(shape)
    return _resolve_cached(shape, sharding)


def parse_shape(value: Any, name: str = "shape") -> tuple[int, ...]:
    """Convert a shape to a tuple of ints.

    Raises:
        ArgumentError: It is no sequence of integers.
        PlacementError: A size is negative.
    """
    if type(value) is tuple and all([type(n) is int and n >= 0 for n in value]):
        return value
    try:
        sizes: tuple[Any, ...] = tuple(value) if np.ndim(value) else (value,)
        shape = tuple(n.__index__() for n in sizes)
    except (TypeError, AttributeError, ValueError, jax.errors.JAXTypeError):
        raise ArgumentError(
            f"{name} must be a tuple of integers, not {brief(value)}: for example (8, 128)"
        ) from None
    if any(n < 0 for n in shape):
        raise PlacementError(
            f"{name} {shape} has a negative size: give every size as a number from 0 on"
        )
    return shape


def leaf_path(tree: Any, number: int, name: str) -> str:
    """Return the path of a leaf as source code: `x['w'][0]`."""
    return leaf_paths(tree, name)[number]


def at_path(error: XlashardError, path: str) -> XlashardError:
    """Return an error with the path of a leaf in front; those of lower layers become ours."""
    if isinstance(error, GeometryError | PlacementError):
        return PlacementError(f"{path}: {error}", also=type(error))
    if isinstance(error, OutOfMemoryError):
        return OutOfMemoryError(f"{path}: {error}", bytes_per_device=error.bytes_per_device)
    # Errors with attributes stay as they are; a ResourceError names its value itself.
    if not isinstance(error, ResourceError) and vars(error).keys() <= {"__notes__"}:
        return type(error)(f"{path}: {error}")
    return error
