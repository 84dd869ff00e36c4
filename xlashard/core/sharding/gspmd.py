"""`GSPMDSharding`, any tile assignment over devices; conversion of shardings of JAX and of XLA."""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Self

from xlashard._jax.runtime.shardings import (
    Device,
    JaxGSPMDSharding,
    JaxNamedSharding,
    JaxSharding,
    JaxSingleDeviceSharding,
    Mesh,
    default_memory_kind,
    hlo_from_text,
    hlo_text,
    is_hlo_sharding,
    jax_hlo_sharding,
    listed_device_ids,
    sdy_array,
    with_interface,
)
from xlashard._jax.trace.lower_for import move_mesh
from xlashard.core.sharding.axes import axes_of, gspmd_sharding_of
from xlashard.core.sharding.base import (
    Sharding,
    ValueSharding,
    XLACompatibleSharding,
    check_memory_kind,
    checked_devices,
)
from xlashard.core.sharding.mapped import MappedSharding
from xlashard.core.sharding.named import (
    DeviceNames,
    NamedSharding,
    SingleDeviceSharding,
    devices_of,
    grid_of,
    names_of,
    partition_spec,
)
from xlashard.errors import GeometryError, ShardingError
from xlashard.geometry import TileAssignment, Tiling, spec_from_tile_assignment, spec_from_tiling
from xlashard.geometry.spec import checked_rank

if TYPE_CHECKING:

    class _GSPMDBase(ValueSharding, JaxGSPMDSharding):
        """Both base classes, for type checkers."""

else:
    _GSPMDBase = with_interface(ValueSharding, JaxGSPMDSharding)


class GSPMDSharding(_GSPMDBase):
    """Sharding by an HLO tile assignment over a list of devices.

    Args:
        devices: The device assignment.
        op_sharding: The tiles: an `OpSharding` or `HloSharding` of jaxlib, a `TileAssignment`, or
            the HLO text, `"{devices=[2,4]<=[8]}"`.
        memory_kind: The memory of each device that holds the data, the default one if `None`.

    Raises:
        ShardingTextError: If the text is not an HLO sharding.
        ShardingError: The tiles are for another number of devices, or the devices lack the
            memory.

    Example:
        >>> import jax
        >>> GSPMDSharding(jax.devices()[:1], "{replicated}").shard_shape((4,))
        (4,)
    """

    def __init__(
        self,
        devices: Sequence[Device],
        op_sharding: Any,
        *,
        memory_kind: str | None = None,
    ) -> None:
        devices = checked_devices(devices, "GSPMDSharding")
        check_memory_kind(devices[0], memory_kind, "GSPMDSharding")
        assignment = read_assignment(op_sharding)
        if assignment is None:
            raise ShardingError(
                "the tiles must be an OpSharding, an HloSharding, a TileAssignment or HLO text "
                f"such as '{{devices=[2,4]<=[8]}}', not {type(op_sharding).__name__}"
            )
        for each in assignment.elements or (assignment,):
            needed = each.num_devices
            if needed is not None and needed != len(devices):
                raise ShardingError(
                    f"GSPMDSharding: the tiles {each.to_text()} are for {needed} devices, and "
                    f"devices has {len(devices)}: write devices=jax.devices()[:{needed}]"
                )
        hlo = hlo_from_text(assignment.to_text())
        super().__init__(devices, hlo, memory_kind=memory_kind)
        self._assignment = assignment

    @classmethod
    def get_replicated(cls, devices: Sequence[Device], *, memory_kind: str | None = None) -> Self:
        """Return the sharding by which every device holds the whole array."""
        return cls(devices, "{replicated}", memory_kind=memory_kind)

    def __reduce__(self) -> tuple[object, ...]:
        text = self._assignment.to_text()
        return (_unpickle_gspmd, (names_of(self.devices), text, self.memory_kind))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, JaxGSPMDSharding):
            return False
        other_hlo = other._hlo_sharding
        if self._assignment.kind == "tuple" or other_hlo.tuple_elements():
            # JAX's comparison ends the process for tuples.
            return (
                self.memory_kind == other.memory_kind
                and self.devices == tuple(other._device_assignment)
                and self._assignment == TileAssignment.parse_text(hlo_text(other_hlo))
            )
        return JaxGSPMDSharding.__eq__(self, other)

    def __hash__(self) -> int:
        return JaxGSPMDSharding.__hash__(self)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Return the device assignment."""
        return tuple(self._devices)

    @property
    def tile_assignment(self) -> TileAssignment:
        """Return the tiles of the device positions as a tile assignment."""
        return self._assignment

    def with_memory_kind(self, kind: str) -> Self:
        """Return the same placement in another memory of the same devices."""
        return type(self)(self.devices, self._assignment, memory_kind=kind)

    @cached_property
    def is_fully_replicated(self) -> bool:
        """Return True if every device holds every element."""
        if len(self.devices) == 1 or self._assignment.kind == "replicated":
            return True
        ndim = self._assignment.ndim
        return ndim is not None and self.rank_tiling(ndim).is_replicated

    @property
    def is_unreduced(self) -> bool:
        """Return True if the devices hold partial results that are still to be reduced."""
        whole = self._assignment.kind == "unreduced" and len(self.devices) > 1
        return whole or self._assignment.num_unreduced > 1

    @property
    def reduced_sharding(self) -> "GSPMDSharding":
        """Return the sharding of the array with its unreduced axes reduced; itself without any."""
        if not self.is_unreduced:
            return self
        raise ShardingError(
            f"{self._assignment.to_text()} doesn't name the mesh axes over which it is unreduced: "
            "write NamedSharding(mesh, P(..., unreduced={...}))"
        )

    @cached_property
    def _tilings(self) -> dict[int, Tiling]:
        return {}

    def rank_tiling(self, ndim: int) -> Tiling:
        """Return the tiling for arrays of a rank."""
        ndim = checked_rank(ndim)
        tiling = self._tilings.get(ndim)
        if tiling is None:
            tiling = Tiling.from_tile_assignment(
                self._assignment, ndim, num_devices=len(self.devices)
            )
            self._tilings[ndim] = tiling
        return tiling

    def _to_sdy_sharding(self, num_dimensions: int, modify_wrt_axis_types: bool = False) -> Any:
        # JAX's own method ends the process for some tiles and refuses others; a program of JAX
        # receives this sharding unchanged.
        axes = axes_of(self.rank_tiling(num_dimensions))
        spec = partition_spec(axes.spec)
        return sdy_array(list(axes.grid.shape.items()), spec, axes.device_ids, num_dimensions)

    def _describe(self) -> str:
        return f"{type(self).__name__} {self._assignment.to_text()}"

    @cached_property
    def _jax_sharding(self) -> JaxSharding:
        ndim = self._assignment.ndim
        if ndim is not None and not self._assignment.is_iota:
            return gspmd_sharding_of(self.devices, self.rank_tiling(ndim), self.memory_kind)
        return JaxGSPMDSharding(self.devices, self._hlo_sharding, memory_kind=self.memory_kind)

    def jax_sharding(self, shape: Sequence[int] = ()) -> JaxSharding:
        """Return the sharding of JAX with the same devices and tiles."""
        return self._jax_sharding


def read_assignment(value: object) -> TileAssignment | None:
    """Return the tiles of an `OpSharding`, an `HloSharding` or its text; None for other values."""
    if is_hlo_sharding(value):
        value = hlo_text(value)
    if isinstance(value, str):
        return TileAssignment.parse_text(value)
    return value if isinstance(value, TileAssignment) else None


def _unpickle_gspmd(names: DeviceNames, text: str, memory_kind: str | None) -> GSPMDSharding:
    return GSPMDSharding(devices_of(names), text, memory_kind=memory_kind)


@lru_cache(maxsize=4096)
def _from_jax_class(sharding: JaxSharding) -> Sharding:
    if isinstance(sharding, JaxNamedSharding):
        if listed_device_ids(sharding) is not None:
            hlo = jax_hlo_sharding(sharding, len(sharding.spec))
            return GSPMDSharding(
                tuple(sharding._device_assignment), hlo, memory_kind=sharding.memory_kind
            )
        kind: Any = sharding.memory_kind
        # The devices of a mesh may be mocks, which answer with one of their own.
        kind = kind if isinstance(kind, str) else None
        return NamedSharding(sharding.mesh, sharding.spec, memory_kind=kind)
    if isinstance(sharding, JaxSingleDeviceSharding):
        (device,) = sharding.device_set
        return SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
    devices = tuple(sharding._device_assignment)
    own = GSPMDSharding(devices, jax_hlo_sharding(sharding, 0), memory_kind=sharding.memory_kind)
    if own.tile_assignment.kind == "maximal" and len(devices) > 1:
        # JAX compares both as equal, so that a cache cannot distinguish them.
        return GSPMDSharding.get_replicated(devices, memory_kind=sharding.memory_kind)
    return own


def from_jax(sharding: JaxSharding | Sharding) -> Sharding:
    """Return the equivalent sharding of this package.

    Args:
        sharding: A sharding of JAX or of this package, or an object with their
            `devices_indices_map` and `device_set`.
    """
    if isinstance(sharding, Sharding):
        return sharding
    if is_of_jax(sharding):
        return _from_jax_class(sharding)
    # Not cached, as a user's class may define equality too widely, or no hash.
    return MappedSharding(sharding)


def is_of_jax(sharding: Any) -> bool:
    """Return True for a sharding of one of JAX's own classes."""
    return isinstance(sharding, (JaxNamedSharding, JaxSingleDeviceSharding, JaxGSPMDSharding))


def to_jax(sharding: JaxSharding | Sharding, shape: Sequence[int]) -> JaxSharding:
    """Return JAX's own sharding for an array of a shape; JAX's own shardings pass unchanged."""
    return sharding.jax_sharding(shape) if isinstance(sharding, Sharding) else sharding


def as_tiles(sharding: Sharding, shape: Sequence[int]) -> XLACompatibleSharding:
    """Return a sharding that XLA takes, for arrays of a shape.

    Raises:
        GeometryError: If its tiles are not all of one size.
        ShardingError: If it has no slice for one of its devices.
    """
    if isinstance(sharding, XLACompatibleSharding):
        return sharding
    tiles = sharding.tiling(tuple(shape)).to_tile_assignment()
    return GSPMDSharding(sharding.devices, tiles, memory_kind=sharding.memory_kind)


@lru_cache(maxsize=4096)
def _named_from_text(text: str, mesh: Mesh, memory_kind: str | None) -> NamedSharding | None:
    try:
        spec = spec_from_tile_assignment(grid_of(mesh), TileAssignment.parse_text(text))
        return NamedSharding(mesh, partition_spec(spec), memory_kind=memory_kind)
    except (GeometryError, ShardingError):
        return None


def from_hlo(
    hlo: object, devices: Sequence[Device], mesh: Mesh | None, memory_kind: str | None = None
) -> Sharding:
    """Return the sharding that a compiled program reports, by a spec on a mesh if there is one.

    Args:
        hlo: An `OpSharding`, an `HloSharding`, or its text.
        devices: The program's device assignment.
        mesh: The mesh to name axes of; its devices must stand in the same order to count.
        memory_kind: Memory of the value.
    """
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0], memory_kind=memory_kind)
    text = hlo if isinstance(hlo, str) else hlo_text(hlo)
    if mesh is not None and mesh._flat_devices_tuple == tuple(devices):
        named = _named_from_text(text, mesh, memory_kind)
        if named is not None:
            return named
    return GSPMDSharding(devices, text, memory_kind=memory_kind)


def on_mesh(sharding: XLACompatibleSharding, mesh: Mesh, ndim: int) -> XLACompatibleSharding:
    """Return the sharding as a spec on a mesh, or unchanged if it has no spec on this mesh.

    Args:
        sharding: The sharding.
        mesh: The mesh to name axes of; its devices must stand in the same order.
        ndim: The rank of the value.
    """
    named = isinstance(sharding, NamedSharding)
    if (named and sharding.mesh == mesh) or mesh._flat_devices_tuple != sharding.devices:
        return sharding
    try:
        spec = spec_from_tiling(grid_of(mesh), sharding.rank_tiling(ndim))
        return NamedSharding(mesh, partition_spec(spec), memory_kind=sharding.memory_kind)
    except (GeometryError, ShardingError):
        return sharding


def move_to(
    sharding: XLACompatibleSharding | None, devices: Mapping[Device, Device]
) -> XLACompatibleSharding | None:
    """Return a sharding on other devices, in the memory that corresponds to its own.

    Args:
        sharding: The sharding; None is returned unchanged.
        devices: The new device of each of its devices.
    """
    if sharding is None:
        return None
    kind = sharding.memory_kind
    if kind == default_memory_kind(next(iter(devices))):
        # Platforms have different names for their default memory.
        kind = None
    match sharding:
        case NamedSharding():
            mesh = move_mesh(sharding.mesh, devices)
            return NamedSharding(mesh, sharding.spec, memory_kind=kind)
        case SingleDeviceSharding():
            device = sharding.devices[0]
            return SingleDeviceSharding(devices.get(device, device), memory_kind=kind)
        case GSPMDSharding():
            new = [devices.get(device, device) for device in sharding.devices]
            return GSPMDSharding(new, sharding.tile_assignment, memory_kind=kind)
    return sharding
