"""`PositionalSharding`: devices in a grid of the rank of the arrays, without names for its axes."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from xlashard.errors import ShardingError
from xlashard.geometry import TileAssignment
from xlashard.legacy.shards import Device
from xlashard.sharding import GSPMDSharding
from xlashard.sharding.pickling import DeviceNames, devices_of, names_of


class PositionalSharding(GSPMDSharding):
    """Cuts dimension `i` of an array into as many tiles as dimension `i` of a grid has entries.

    Each entry of the grid is the set of devices that hold one tile. `reshape`, `transpose`,
    `replicate` and indexing make other grids of the same devices. JAX and this package take it
    wherever a sharding may stand.

    Args:
        devices: The devices: an array of any shape, or a list.
        memory_kind: The memory of each device that holds the data, the default one if None.

    Raises:
        ShardingError: There are no devices, or one is there twice.

    Example:
        >>> import jax
        >>> sharding = PositionalSharding(jax.devices()[:1]).reshape(1, 1)
        >>> sharding.shape, sharding.replicate(axis=0, keepdims=False).shape
        ((1, 1), (1,))
    """

    def __init__(
        self,
        devices: Sequence[Device] | np.ndarray,
        *,
        memory_kind: str | None = None,
    ) -> None:
        given = np.asarray(devices, dtype=object)
        ids = np.arange(given.size).reshape(*given.shape, 1)
        self._place(given.ravel().tolist(), ids, memory_kind)

    def _place(self, devices: Sequence[Device], ids: np.ndarray, memory_kind: str | None) -> None:
        """Set the grid: `ids` holds positions in `devices`, `[*shape, replicas]`."""
        *shape, replicas = ids.shape
        subgroups = ("replicated",) if replicas > 1 or not shape else ()
        dims = (*shape, replicas) if subgroups else shape
        if ids.size == 1:
            assignment = TileAssignment.replicated()
        else:
            assignment = TileAssignment.listed(dims, ids.ravel().tolist(), subgroups)
        super().__init__(devices, assignment, memory_kind=memory_kind)
        self._ids = ids

    def _remade(self, ids: np.ndarray) -> Self:
        return _remake(type(self), self.devices, ids, self.memory_kind)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of tiles along each dimension."""
        return self._ids.shape[:-1]

    @property
    def ndim(self) -> int:
        """The rank of the grid, and of the arrays that it places."""
        return len(self.shape)

    @property
    def T(self) -> Self:
        """The grid with its dimensions in reverse order."""
        return self.transpose()

    def reshape(self, *shape: Any) -> Self:
        """Arrange the same sets of devices in another grid.

        Args:
            *shape: The shape of the grid, as numbers or as one tuple; one number may be -1.

        Raises:
            ShardingError: The shape takes another number of sets.
        """
        wanted = tuple(shape[0]) if shape and isinstance(shape[0], Sequence) else shape
        try:
            return self._remade(self._ids.reshape(*wanted, self._ids.shape[-1]))
        except ValueError:
            raise ShardingError(
                f"a PositionalSharding of shape {self.shape} can't be reshaped to {wanted}: give a "
                f"shape of {self._ids[..., 0].size} entries, such as reshape(-1)"
            ) from None

    def transpose(self, *axes: Any) -> Self:
        """Permute the dimensions of the grid.

        Args:
            *axes: The permutation, as numbers or as one tuple; the reverse order if left out.
        """
        order = tuple(axes[0]) if axes and isinstance(axes[0], Sequence) else axes
        order = normalize_axis_tuple(order or range(self.ndim)[::-1], self.ndim)
        return self._remade(self._ids.transpose(*order, self.ndim))

    def replicate(self, axis: int | Sequence[int] | None = None, keepdims: bool = True) -> Self:
        """Give each tile to all the devices along some dimensions of the grid.

        Args:
            axis: The dimension or dimensions; all of them if None.
            keepdims: Whether these dimensions stay, with size 1.

        Raises:
            numpy.exceptions.AxisError: The grid has no such dimension.
        """
        dims = normalize_axis_tuple(range(self.ndim) if axis is None else axis, self.ndim)
        kept = [d for d in range(self.ndim) if d not in dims]
        moved = self._ids.transpose(*kept, *sorted(dims), self.ndim)
        shape = [1 if d in dims else n for d, n in enumerate(self.shape) if keepdims or d in kept]
        return self._remade(np.sort(moved.reshape(*shape, -1), axis=-1))

    def __getitem__(self, index: Any) -> Self:
        """Return the part of the grid at an index, over the devices of that part alone."""
        full = index if isinstance(index, tuple) else (index,)
        rest = () if any(entry is Ellipsis for entry in full) else (Ellipsis,)
        part = self._ids[(*full, *rest, slice(None))]
        used, ids = np.unique(part, return_inverse=True)
        devices = [self.devices[position] for position in used]
        return _remake(type(self), devices, ids.reshape(part.shape), self.memory_kind)

    def with_memory_kind(self, kind: str) -> Self:
        """Return the same grid in another memory of the same devices."""
        return _remake(type(self), self.devices, self._ids, kind)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PositionalSharding):
            return super().__eq__(other)
        return (
            self.devices == other.devices
            and self.memory_kind == other.memory_kind
            and np.array_equal(self._ids, other._ids)
        )

    def __hash__(self) -> int:
        return hash((self.devices, self.shape, self.memory_kind))

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickle, (type(self), names_of(self.devices), self._ids, self.memory_kind)

    def __repr__(self) -> str:
        platform = self.devices[0].platform.upper()
        texts = np.empty(self.shape, dtype=object)
        for place in np.ndindex(*self.shape):
            ids = sorted(self.devices[position].id for position in self._ids[place])
            texts[place] = f"{{{platform} {' '.join(map(str, ids))}}}"
        name = f"{type(self).__name__}("
        grid = np.array2string(texts, formatter={"all": str}, prefix=name, threshold=1 << 20)
        kind = "" if self.memory_kind is None else f", memory_kind={self.memory_kind}"
        return f"{name}{grid}{kind})"


def _remake[S: PositionalSharding](
    cls: type[S], devices: Sequence[Device], ids: np.ndarray, memory_kind: str | None
) -> S:
    made = cls.__new__(cls)
    made._place(devices, ids, memory_kind)
    return made


def _unpickle(
    cls: type[PositionalSharding], names: DeviceNames, ids: np.ndarray, memory_kind: str | None
) -> PositionalSharding:
    return _remake(cls, devices_of(names), ids, memory_kind)
