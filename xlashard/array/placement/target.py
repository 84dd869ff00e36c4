"""Where an array shall go: what callers may write, as one value, and as places for one shape."""

from functools import cached_property, lru_cache
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout

from xlashard._jax.runtime.global_state import cleared_with_jax
from xlashard._jax.runtime.shardings import Device, JaxSharding, default_memory_kind, is_auto_layout
from xlashard._jax.runtime.transfer import make_aval
from xlashard._jax.trace.tracing import mesh_in_force
from xlashard.errors import ArgumentError, PlacementError
from xlashard.geometry import Tiling
from xlashard.lazily import dataclass
from xlashard.sharding import (
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
    XLACompatibleSharding,
    from_jax,
    to_jax,
)

type Index = tuple[slice, ...]

# The distinct shapes of several large parameter trees.
_RESOLVED_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Placement:
    """Where to, and in what layout.

    Attributes:
        sharding: None leaves an array where it is, and a host value uncommitted.
        layout: None is the device's default one.
    """

    sharding: Sharding | None
    layout: Layout | None = None


STAY = Placement(None)


def is_target(x: Any) -> bool:
    """Whether it says a place by itself, rather than being a tree of places."""
    kinds = (jax.Device, Sharding, JaxSharding, Format, PartitionSpec)
    return x is None or isinstance(x, kinds)


def parse_placement(given: Any, name: str) -> Placement:
    """Reads what a caller wrote.

    Args:
        given: A device, a sharding, a `Format`, or None.
        name: What to call it in an error.

    Raises:
        ArgumentError: It is something else.
    """
    if given is None:
        return STAY
    if isinstance(given, Sharding):
        return Placement(given)
    if isinstance(given, JaxSharding):
        return Placement(from_jax(given))
    if isinstance(given, jax.Device):
        return Placement(SingleDeviceSharding(given))
    if isinstance(given, Format):
        return _from_format(given, name)
    if isinstance(given, PartitionSpec):
        mesh = mesh_in_force()
        if mesh is not None:
            return Placement(NamedSharding(mesh, given))
        raise ArgumentError(
            f"{name} is {given}, but no mesh is in force to say on which devices: call inside "
            f"`with jax.set_mesh(mesh):`, or write NamedSharding(mesh, {given})"
        )
    raise ArgumentError(
        f"{name} must be a device, a sharding, a Format or None (where it is), not "
        f"{type(given).__name__}: for example jax.devices()[0] or NamedSharding(mesh, P('data'))"
    )


def parse_sharding(given: Any, name: str) -> tuple[Sharding, Layout | None]:
    """Reads what a caller wrote where a sharding is needed: a device alone won't do.

    Raises:
        ArgumentError: It is something else.
    """
    placement = parse_placement(given, name) if not isinstance(given, jax.Device) else STAY
    if placement.sharding is None:
        raise ArgumentError(
            f"{name} must be a sharding, not {given!r}: for example NamedSharding(mesh, P('data')) "
            "or SingleDeviceSharding(jax.devices()[0])"
        )
    return placement.sharding, placement.layout


def _from_format(given: Format, name: str) -> Placement:
    layout: Any = given.layout
    if is_auto_layout(layout):
        raise ArgumentError(
            f"{name} leaves the layout to a compiler, but no program runs here: write "
            "Format(Layout(major_to_minor=(1, 0)), sharding), or only the sharding"
        )
    if given.sharding is None:
        return STAY
    return Placement(from_jax(given.sharding), layout)


@dataclass(frozen=True, eq=False)
class ResolvedSharding:
    """What a sharding means for arrays of one shape. Equal to nothing but itself.

    Attributes:
        shape: Of the whole array, in elements.
        sharding: The caller's own.
        tiling: Which tile each device position holds.
        jax_sharding: The equivalent sharding of JAX.
        shard_shape: Of the piece on one device.
    """

    shape: tuple[int, ...]
    sharding: Sharding
    tiling: Tiling
    jax_sharding: JaxSharding
    shard_shape: tuple[int, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions of this process's devices."""
        return self.sharding.addressable_positions

    @cached_property
    def devices(self) -> list[Device]:
        """This process's devices, in the order in which a handle holds its buffers."""
        devices = self.sharding.devices
        return [devices[i] for i in self.positions]

    @cached_property
    def indices(self) -> list[Index]:
        """Which part of the array each of this process's devices holds."""
        return self.tiling.indices(self.shape, self.positions)

    @cached_property
    def tiles(self) -> list[int]:
        """The number of the tile that each of this process's devices holds."""
        return self.tiling.tile_ids(self.positions).tolist()

    def aval(self, dtype: Any, weak_type: bool = False) -> Any:
        """The abstract value of an array of a dtype that lies so."""
        return make_aval(self.shape, dtype, self.jax_sharding, weak_type)

    @cached_property
    def on_host(self) -> bool:
        """Whether the devices' memory is the host's own."""
        return self.sharding.devices[0].platform == "cpu"

    @property
    def memory_kind(self) -> str | None:
        """The memory of the devices that is meant, also where the sharding leaves it open."""
        return memory_kind_of(self.sharding)


def is_in_place(source: ResolvedSharding, target: ResolvedSharding) -> bool:
    """Return True if no byte moves from one sharding to the other."""
    here, there = source.sharding, target.sharding
    if source.tiling.is_partial or target.tiling.is_partial:
        return here.is_equivalent_to(there, len(source.shape))
    return source.memory_kind == target.memory_kind and (
        here.devices_indices_map(source.shape) == there.devices_indices_map(source.shape)
    )


def reorders_devices(source: ResolvedSharding, target: ResolvedSharding) -> bool:
    """Return True if the target has the devices of the source in another order.

    JAX reshards by a program of all these devices, which transfer guards let pass.
    """
    here, there = source.sharding.devices, target.sharding.devices
    return source.memory_kind == target.memory_kind and here != there and set(here) == set(there)


def check_reduced_sharding(sharding: Sharding, name: str) -> None:
    """Checks that a constructor that cuts values into slices was given a sharding that has them.

    Raises:
        PlacementError: Its devices hold partial results.
    """
    if sharding.is_unreduced:
        raise PlacementError(
            f"sharding of {name} is {sharding}, whose devices hold partial results and no slices: "
            "give a sharding without unreduced axes, or the partial results by "
            "make_array_from_single_device_arrays(shape, sharding, arrays)"
        )


def memory_kind_of(sharding: Sharding) -> str | None:
    """The memory kind of a sharding; the devices' default one where it says none."""
    return sharding.memory_kind or default_memory_kind(sharding.devices[0])


def resolve_sharding(shape: tuple[int, ...], sharding: Sharding) -> ResolvedSharding:
    """What a sharding means for a shape.

    Raises:
        GeometryError: The shape can't be placed so.
    """
    if isinstance(sharding, XLACompatibleSharding):
        return _resolve_cached(shape, sharding)
    return _resolve(shape, sharding)  # of a user's own class, which may change its mind


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


def parse_shape(given: Any, name: str = "shape") -> tuple[int, ...]:
    """A shape as a tuple of ints.

    Raises:
        ArgumentError: It has something else in it, or is no sequence.
        PlacementError: A size is negative.
    """
    try:
        shape = tuple(given) if np.ndim(given) else (given,)
        shape = tuple(n.__index__() for n in shape)
    except (TypeError, AttributeError, ValueError, jax.errors.JAXTypeError):
        raise ArgumentError(
            f"{name} must be a tuple of integers, not {_brief(given)}: for example (8, 128)"
        ) from None
    if any(n < 0 for n in shape):
        raise PlacementError(
            f"{name} {shape} has a negative size: give every size as a number from 0 on"
        )
    return shape


def _brief(x: Any) -> str:
    text = repr(x) if isinstance(x, int | float | str | tuple | list | None) else type(x).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."
