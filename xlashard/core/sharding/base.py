"""Base classes of all shardings, and checks of their arguments.

A sharding of this package is a list of devices and, for each rank, a `Tiling` that maps the device
positions to tiles of an array. The tiling does all index maths; a subclass defines `tiling`, and
`jax_sharding` for the equivalent sharding of JAX, which a buffer handle carries.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cached_property, lru_cache, wraps
from types import MappingProxyType
from typing import Any, Self

import jax
import numpy as np

from xlashard._jax.runtime.global_state import BoundedCache
from xlashard._jax.runtime.shardings import (
    AbstractMesh,
    Device,
    JaxGSPMDSharding,
    JaxNamedSharding,
    JaxSharding,
    JaxSingleDeviceSharding,
    default_memory_kind,
    is_symbolic_size,
    memory_kinds,
)
from xlashard.core.sharding.axes import gspmd_sharding_of, tiling_of_jax
from xlashard.errors import ArgumentError, GeometryError, ShardingError, counted
from xlashard.geometry import Tiling
from xlashard.geometry.spec import checked_rank
from xlashard.support.formatting import brief

type Shape = tuple[int, ...]
type Index = tuple[slice, ...]


class Sharding:
    """Placement of the elements of an array on devices.

    Subclass it to write a sharding of your own: give it `devices` (a sequence of devices) or
    `device_set`, which counts in the order of the devices' numbers, and
    `devices_indices_map(shape)` (a mapping from each device to the slices that it holds). Every
    constructor of arrays takes it, and `pjit` where the map consists of equal tiles. Classes that
    derive from JAX's `Sharding` are taken in the same way.

    Example:
        >>> class Halves(Sharding):
        ...     def __init__(self, devices):
        ...         self._devices = tuple(devices)
        ...     @property
        ...     def devices(self):
        ...         return self._devices
        ...     def devices_indices_map(self, shape):
        ...         half = shape[0] // 2
        ...         return {
        ...             self._devices[0]: (slice(0, half),),
        ...             self._devices[1]: (slice(half, shape[0]),),
        ...         }
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.split(".")[0] == __name__.split(".")[0]:
            return
        for name in vars(cls).keys() & {"tiling", "rank_tiling"}:
            setattr(cls, name, _with_checked_size(vars(cls)[name]))

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the devices in assignment order; position `i` of the tiling is `devices[i]`."""
        if type(self).device_set is Sharding.device_set:
            raise NotImplementedError(
                f"{type(self).__name__} must define `devices`: write `devices = jax.devices()` in "
                "the class, or a property of that name"
            )
        return tuple(sorted(self.device_set, key=operator.attrgetter("id")))

    def tiling(self, shape: Sequence[int]) -> Tiling:
        """Return the tiling of an array of this shape over the device positions.

        Raises:
            GeometryError: The placement does not consist of tiles of equal size.
        """
        shape = self._checked_shape(shape, "tiling")
        index_map = self.devices_indices_map(shape)
        missing = [d for d in self.devices if d not in index_map]
        if missing:
            raise ShardingError(
                f"{self._describe()}.devices_indices_map({shape}) has no entry for "
                f"{missing[0]}: return one for each of its {len(self.devices)} devices"
            )
        return Tiling.from_indices(shape, [index_map[d] for d in self.devices])

    def jax_sharding(self, shape: Sequence[int]) -> JaxSharding:
        """Return JAX's own sharding with the same devices and tiles, for an array of this shape."""
        return gspmd_sharding_of(self.devices, self.tiling(shape), self.memory_kind)

    # Members of JAX's sharding interface, computed from the above.

    @property
    def device_set(self) -> set[Device]:
        """Return the devices, without their order."""
        return set(self.devices)

    @property
    def num_devices(self) -> int:
        """Return the number of devices, in all processes."""
        return len(self.devices)

    @cached_property
    def addressable_positions(self) -> tuple[int, ...]:
        """Return the positions in `devices` of this process's own devices."""
        process = jax.process_index()
        return tuple(i for i, d in enumerate(self.devices) if d.process_index == process)

    @property
    def addressable_devices(self) -> set[Device]:
        """Return this process's own devices."""
        return {self.devices[i] for i in self.addressable_positions}

    @property
    def is_fully_addressable(self) -> bool:
        """Return True if every device belongs to this process."""
        return len(self.addressable_positions) == len(self.devices)

    @property
    def memory_kind(self) -> str | None:
        """Return the memory of the devices that holds the data: `"device"`, `"pinned_host"`, ..."""
        return None

    def with_memory_kind(self, kind: str) -> Self:
        """Return the same placement in another memory of the same devices."""
        raise NotImplementedError(
            f"{type(self).__name__} has no memory kinds: write NamedSharding(mesh, spec, "
            f"memory_kind={kind!r})"
        )

    def devices_indices_map(self, global_shape: Shape) -> Mapping[Device, Index]:
        """Return the slices that each device holds, for every device in every process.

        Args:
            global_shape: The shape of the whole array.

        Raises:
            GeometryError: If a dimension can't be cut evenly.
        """
        shape = self._checked_shape(global_shape, "devices_indices_map")
        return dict(zip(self.devices, self.tiling(shape).indices(shape), strict=True))

    def addressable_devices_indices_map(self, global_shape: Shape) -> Mapping[Device, Index]:
        """Return the slices that this process's devices hold."""
        shape = self._checked_shape(global_shape, "addressable_devices_indices_map")
        positions = self.addressable_positions
        indices = self.tiling(shape).indices(shape, positions)
        return {self.devices[i]: index for i, index in zip(positions, indices, strict=True)}

    def shard_shape(self, global_shape: Shape) -> Shape:
        """Return the shape of the piece on one device, `[dim / tiles, ...]`."""
        shape = self._checked_shape(global_shape, "shard_shape")
        return self.tiling(shape).shard_shape(shape)

    @property
    def is_fully_replicated(self) -> bool:
        """Return True if each device holds the whole array, whatever its rank.

        This default is True on one device only; subclasses override it.
        """
        return len(self.devices) == 1

    def is_equivalent_to(self, other: "JaxSharding | Sharding", ndim: int) -> bool:
        """Return True if both put the same tile on the same device, in the same memory.

        Where tiles depend on more than the rank, only an equal sharding is certain to be.

        Args:
            other: A sharding of this package or of JAX.
            ndim: The rank of the arrays in question.
        """
        self._check_compared(other, ndim)
        return self == other

    @property
    def is_unreduced(self) -> bool:
        """Return True if the devices hold partial results that are still to be reduced."""
        return False

    @property
    def reduced_sharding(self) -> "Sharding":
        """Return the sharding of the array with its unreduced axes reduced; itself without any."""
        return self

    def is_compatible_aval(self, aval_shape: Shape) -> None:
        """Check that an array of this shape fits the sharding.

        Raises:
            GeometryError: With the dimension and the numbers, if it may not.
        """
        self.shard_shape(aval_shape)

    def check_compatible_aval(self, aval_shape: Shape) -> None:
        """Check a shape as JAX's method does: like `is_compatible_aval`, without divisibility."""
        self.tiling(aval_shape)

    def _describe(self) -> str:
        """Describe the sharding by its class and what it consists of, for pictures."""
        return type(self).__name__

    def _complete_pieces(self, pieces: Any, shape: Shape) -> Any:
        """Return the arrays of single devices in the shape of a shard, if they lack dimensions.

        Shards of `PmapSharding` may; here the arrays are returned as they are.
        """
        return pieces

    def _checked_shape(self, shape: object, method: str) -> Shape:
        return checked_shape(shape, f"{type(self).__name__}.{method}")

    def _check_compared(self, other: object, ndim: object) -> None:
        """Check the arguments of `is_equivalent_to`.

        Raises:
            ArgumentError: One has the wrong type.
            RankError: No array has the rank.
        """
        if not isinstance(other, Sharding | JaxSharding):
            raise ArgumentError(
                f"{type(self).__name__}.is_equivalent_to: other must be a sharding, not "
                f"{type(other).__name__}; write x.sharding.is_equivalent_to(y.sharding, x.ndim)"
            )
        checked_rank(ndim)

    @property
    def _device_assignment(self) -> tuple[Device, ...]:
        return self.devices

    @property
    def _addressable_device_assignment(self) -> tuple[Device, ...]:
        return tuple(self.devices[i] for i in self.addressable_positions)


class XLACompatibleSharding(Sharding):
    """Sharding whose tiles depend on the rank alone, so that it has an HLO sharding.

    Every class of this package that `pjit` takes as it is derives from it.

    Example:
        >>> from xlashard import AbstractMesh, NamedSharding, P
        >>> rows = NamedSharding(AbstractMesh((2,), ("data",)), P("data"))
        >>> isinstance(rows, XLACompatibleSharding), rows.shard_shape((4, 6))
        (True, (2, 6))
    """

    @property
    def memory_kind(self) -> str | None:
        """Return the memory of the devices that holds the data."""
        return getattr(self, "_memory_kind", None)  # an attribute of JAX's classes

    def rank_tiling(self, ndim: int) -> Tiling:
        """Return the tiling for arrays of a rank.

        Raises:
            RankError: If the rank is too low.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define `rank_tiling`: write a method that returns the "
            "Tiling for arrays of ndim dimensions"
        )

    def tiling(self, shape: Sequence[int]) -> Tiling:
        """Return the tiling for an array of this shape; only its rank matters."""
        return self.rank_tiling(len(self._checked_shape(shape, "tiling")))

    def is_equivalent_to(self, other: "JaxSharding | Sharding", ndim: int) -> bool:
        """Return True if both put the same tile on the same device, in the same memory."""
        self._check_compared(other, ndim)
        from_other = _rank_tiling_of(other, ndim)
        if from_other is None or self.memory_kind != other.memory_kind:
            return False
        if _is_abstract(self) or _is_abstract(other):
            return (
                _is_abstract(self)
                and _is_abstract(other)
                and self.rank_tiling(ndim).same_tiles(from_other)
            )
        try:
            own_tiling = self.rank_tiling(ndim)
        except GeometryError:
            return False
        devices = tuple(other._device_assignment)
        if devices == self.devices:
            return own_tiling.same_tiles(from_other)
        if set(devices) != set(self.devices):
            return False
        place = {device: position for position, device in enumerate(devices)}
        return own_tiling.same_tiles(from_other.reordered([place[d] for d in self.devices]))


class ValueSharding(XLACompatibleSharding):
    """Sharding that never changes and equals by value, so that results of its methods are kept."""

    @cached_property
    def device_set(self) -> set[Device]:
        """Return the devices, without their order; one set for all callers."""
        return set(self.devices)

    @cached_property
    def is_fully_addressable(self) -> bool:
        """Return True if every device belongs to this process."""
        return len(self.addressable_positions) == len(self.devices)

    @cached_property
    def addressable_devices(self) -> set[Device]:
        """Return this process's own devices; one set for all callers."""
        return {self.devices[i] for i in self.addressable_positions}

    def shard_shape(self, global_shape: Shape) -> Shape:
        """Return the shape of the piece on one device, `[dim / tiles, ...]`.

        Raises:
            DivisibilityError: With the axes and their sizes, if a dimension can't be cut evenly.
        """
        try:
            # 8.0 equals 8 as a key, and is no size.
            if type(global_shape) is tuple and type(sum(global_shape)) is int:
                return _shard_shape(self, global_shape)
        except TypeError:
            pass  # no tuple of integers
        return _shard_shape(self, self._checked_shape(global_shape, "shard_shape"))

    def _find_shard_shape(self, shape: Shape) -> Shape:
        return self.tiling(shape).shard_shape(shape)  # which a derived class may define

    @cached_property
    def _index_maps(self) -> BoundedCache:
        return BoundedCache(64)  # enough for the distinct shapes of a large parameter tree

    def devices_indices_map(self, global_shape: Shape) -> Mapping[Device, Index]:
        """Return the slices that each device holds, as a read-only mapping."""
        try:
            is_key = type(global_shape) is tuple and type(sum(global_shape)) is int
            known = self._index_maps.get(global_shape) if is_key else None
        except TypeError:
            known = None  # no tuple of integers
        if known is not None:
            return known
        shape = self._checked_shape(global_shape, "devices_indices_map")
        index_map = MappingProxyType(super().devices_indices_map(shape))
        self._index_maps.add(shape, index_map)
        return index_map

    def addressable_devices_indices_map(self, global_shape: Shape) -> Mapping[Device, Index]:
        """Return the slices that this process's devices hold, as a read-only mapping."""
        shape = self._checked_shape(global_shape, "addressable_devices_indices_map")
        if self.is_fully_addressable:
            return self.devices_indices_map(shape)
        return MappingProxyType(super().addressable_devices_indices_map(shape))

    def is_equivalent_to(self, other: "JaxSharding | Sharding", ndim: int) -> bool:
        """Return True if both put the same tile on the same device, in the same memory."""
        if type(ndim) is int and isinstance(other, _VALUE_CLASSES):
            return _are_equivalent(self, other, ndim)
        return super().is_equivalent_to(other, ndim)


_VALUE_CLASSES = (JaxNamedSharding, JaxSingleDeviceSharding, JaxGSPMDSharding)

# Shapes of several large parameter trees. By class too, as shardings of JAX equal those of this
# package, and derived classes may have other tiles.
_remember = lru_cache(maxsize=4096, typed=True)


@_remember
def _shard_shape(sharding: ValueSharding, shape: Shape) -> Shape:
    return sharding._find_shard_shape(sharding._checked_shape(shape, "shard_shape"))


@_remember
def _are_equivalent(sharding: ValueSharding, other: "JaxSharding | Sharding", ndim: int) -> bool:
    return XLACompatibleSharding.is_equivalent_to(sharding, other, ndim)


def _with_checked_size(make_tiling: Callable[..., Tiling]) -> Any:
    """Return a user's method with a check of its result, which XLA would end the process for."""

    @wraps(make_tiling)
    def make_checked(self: Sharding, *args: Any, **kwargs: Any) -> Tiling:
        tiling, count = make_tiling(self, *args, **kwargs), len(self.devices)
        if tiling.num_devices != count:
            raise ShardingError(
                f"{type(self).__name__}.{make_tiling.__name__} returned tiles for "
                f"{counted(tiling.num_devices, 'device')}, but `devices` has {count}: return a "
                f"Tiling of {counted(count, 'device position')}"
            )
        return tiling

    return make_checked


def _is_abstract(sharding: "JaxSharding | Sharding") -> bool:
    """Return True for a sharding on a mesh without devices."""
    return isinstance(getattr(sharding, "mesh", None), AbstractMesh)


def _rank_tiling_of(sharding: "JaxSharding | Sharding", ndim: int) -> Tiling | None:
    try:
        if isinstance(sharding, XLACompatibleSharding):
            return sharding.rank_tiling(ndim)
        return None if isinstance(sharding, Sharding) else tiling_of_jax(sharding, ndim)
    except GeometryError:
        return None


def checked_devices(devices: Sequence[Device], maker: str) -> tuple[Device, ...]:
    """Return a list of devices as a tuple.

    Raises:
        ShardingError: If it is empty, holds something else, or one device twice.
    """
    try:
        checked = tuple(devices)
    except TypeError:
        checked = ()
    if not checked or not all(isinstance(d, jax.Device) for d in checked):
        raise ShardingError(
            f"the devices of a {maker} must be a list such as jax.devices(), not {devices!r}"
        )
    if len(set(checked)) != len(checked):
        twice = next(d for i, d in enumerate(checked) if d in checked[:i])
        raise ShardingError(
            f"the devices of a {maker} have {twice} more than once: list each device once"
        )
    return checked


def checked_shape(shape: object, method: str) -> tuple[int, ...]:
    """Return a shape as a tuple; symbolic sizes of `jax.export` stay as they are.

    Args:
        shape: The caller's argument.
        method: The called method, for the error: ``"NamedSharding.shard_shape"``.

    Raises:
        ArgumentError: The shape is no sequence of integers.
        ShardingError: A size is negative.
    """
    if type(shape) is tuple and all([type(n) is int and n >= 0 for n in shape]):
        return shape
    try:
        if isinstance(shape, str | bytes | Mapping | Set) or not isinstance(shape, Iterable):
            raise TypeError
        checked = tuple(n if is_symbolic_size(n) else operator.index(n) for n in shape)
    except (TypeError, ValueError, jax.errors.JAXTypeError):
        raise ArgumentError(
            f"{method}: the shape must be a tuple of integers such as (8, 128), not {brief(shape)}"
        ) from None
    if any(type(n) is int and n < 0 for n in checked):
        raise ShardingError(
            f"{method}: the shape {checked} has a negative size; write every size as an integer "
            "from 0 on"
        )
    return checked


def is_index(value: object) -> bool:
    """Return whether a value is an integer of Python or NumPy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_memory_kind(device: Device | None, kind: str | None, maker: str) -> None:
    """Check that a device has a memory of that kind.

    Args:
        device: The device; None on an abstract mesh.
        kind: The kind.
        maker: The class, for the error: `NamedSharding`.

    Raises:
        ShardingError: With the kinds that it has.
    """
    if kind is None:
        return
    if not isinstance(kind, str):
        # A mocked device of a test has a mocked kind, which JAX's classes accept.
        if device is not None and kind is default_memory_kind(device):
            return
        # JAX's classes fail with an error of C++.
        raise ShardingError(
            f"{maker}: memory_kind={kind!r} is invalid: expected a string such as 'device' or "
            "'pinned_host'"
        )
    # A plugin without memories has an empty list, and accepts any kind.
    known = () if device is None else memory_kinds(device)
    if known and kind not in known:
        raise ShardingError(
            f"{maker}: memory_kind={kind!r} is not a memory of {device}: write one of "
            f"{', '.join(map(repr, known))}"
        )
