"""`PmapSharding`: a grid of devices and a `ShardingSpec`, as `pmap` placed its arrays."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import jax
import numpy as np

from xlashard._jax.registration import install_shardings
from xlashard._jax.runtime.shardings import Device, Mesh, default_memory_kind
from xlashard._jax.runtime.transfer import Tracer
from xlashard.core.array.array_class.base import check_alive, handle_of
from xlashard.core.array.array_class.handles import is_key_dtype, key_handle, keys_over
from xlashard.core.array.placement.reshape import reshape_buffer
from xlashard.core.sharding.axes import made_up_grid
from xlashard.core.sharding.base import (
    Shape,
    check_memory_kind,
    checked_devices,
    checked_shape,
    is_index,
)
from xlashard.core.sharding.named import (
    DeviceNames,
    MeshSharding,
    devices_of,
    names_of,
    partition_spec,
)
from xlashard.errors import ShardingError, counted
from xlashard.geometry import Tiling
from xlashard.geometry.spec import checked_rank
from xlashard.legacy.shardings.sharding_spec import ShardingSpec, spec_over_one_dim, without_dims
from xlashard.support.tracebacks import short_tracebacks


class DeviceRow(tuple[Device, ...]):
    """Tuple of devices with the attributes of a one-dimensional NumPy array.

    Example:
        >>> import jax
        >>> row = DeviceRow(jax.devices()[:1])
        >>> row.shape, len(row), row == tuple(row.flat)
        ((1,), 1, True)
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            return super().__getattribute__(name)  # raises AttributeError
        return getattr(np.array(list(self), dtype=object), name)


class PmapSharding(MeshSharding):
    """Sharding by a `ShardingSpec` over a grid of devices, as of `pmap`.

    A shard has as many dimensions as its array, also under `Unstacked`, where its size along this
    dimension is 1; in `sharding_spec.indices` and `unstacked_shards` shards lack the dimension.

    Args:
        devices: The devices, in an array of the spec's `mesh_shape` or a list of as many.
        sharding_spec: Cuts of the arrays, and their device axes.
        memory_kind: The memory of each device that holds the data, the default one if `None`.

    Raises:
        ShardingError: The number of devices differs from that of the spec, or the devices lack
            the memory.

    Example:
        >>> import jax
        >>> from xlashard.legacy import Chunked, NoSharding, ShardedAxis
        >>> spec = ShardingSpec((Chunked((1,)), NoSharding()), (ShardedAxis(0),))
        >>> PmapSharding(jax.devices()[:1], spec).shard_shape((8, 4))
        (8, 4)
    """

    def __init__(
        self,
        devices: Any,
        sharding_spec: ShardingSpec,
        *,
        memory_kind: str | None = None,
    ) -> None:
        if not isinstance(sharding_spec, ShardingSpec):
            raise ShardingError(
                "the sharding_spec of a PmapSharding must be a ShardingSpec, not "
                f"{type(sharding_spec).__name__}: write PmapSharding.default(shape), or "
                "ShardingSpec((Chunked((8,)), NoSharding()), (ShardedAxis(0),))"
            )
        ordered = checked_devices(_flat(devices), "PmapSharding")
        if len(ordered) != sharding_spec.num_devices:
            raise ShardingError(
                f"PmapSharding: {sharding_spec} is for a grid of {sharding_spec.mesh_shape}, which "
                f"is {counted(sharding_spec.num_devices, 'device')}, and devices has "
                f"{len(ordered)}: write devices=jax.devices()[:{sharding_spec.num_devices}]"
            )
        check_memory_kind(ordered[0], memory_kind, "PmapSharding")
        # JAX's class has a mesh with an axis for each axis of the grid, so that results of JAX
        # have a spec too.
        grid = made_up_grid(sharding_spec.mesh_shape)
        on_mesh = np.array(ordered, dtype=object).reshape(grid.axis_sizes)
        spec = partition_spec(sharding_spec.on_axes(grid.axis_names))
        super().__init__(Mesh(on_mesh, grid.axis_names), spec, memory_kind=memory_kind)
        self.sharding_spec = sharding_spec
        self._ordered = DeviceRow(ordered)

    @classmethod
    def default(
        cls,
        shape: Sequence[int],
        sharded_dim: int | None = 0,
        devices: Sequence[Device] | None = None,
        *,
        unstacked: bool = False,
    ) -> Self:
        """Return the sharding with one index of a dimension, or a full replica, on each device.

        Args:
            shape: Shape of the array, in elements.
            sharded_dim: The dimension; its size must be the number of devices, or a multiple of
                it with the argument `devices`. None puts a replica on each device.
            devices: The devices; as many of this process's own as the dimension is long, if not
                given (all of them for copies).
            unstacked: Use `Unstacked`, as in early JAX, instead of `Chunked`.

        Raises:
            ShardingError: The dimension is out of range, or this process has too few devices.
            GeometryError: The dimension does not divide.

        Example:
            >>> import jax
            >>> PmapSharding.default((1, 4), devices=jax.devices()[:1]).shard_shape((1, 4))
            (1, 4)
            >>> PmapSharding.default((1, 4), devices=jax.devices()[:1], unstacked=True)
            PmapSharding(ShardingSpec((Unstacked(1), NoSharding()), (ShardedAxis(0),)), devices=[0])
        """
        with short_tracebacks:
            shape = checked_shape(shape, "PmapSharding.default")
            dims = range(-len(shape), len(shape))
            if sharded_dim is not None and not (is_index(sharded_dim) and sharded_dim in dims):
                raise ShardingError(
                    f"PmapSharding.default: sharded_dim={sharded_dim} is out of range for shape "
                    f"{shape}: write 0 to {len(shape) - 1}, or None for a replica on each device"
                )
            candidates = jax.local_devices() if devices is None else devices
            ordered = checked_devices(_flat(candidates), "PmapSharding")
            if devices is None and sharded_dim is not None:
                ordered = ordered[: _enough(shape, sharded_dim, len(ordered))]
            dim = None if sharded_dim is None else sharded_dim % len(shape)
            spec = spec_over_one_dim(len(shape), dim, len(ordered), unstacked=unstacked)
            sharding = cls(ordered, spec)
            spec.check_shape(shape)
            return sharding

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickle_pmap, (names_of(self.devices), self.sharding_spec, self.memory_kind))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, PmapSharding)
            and self.devices == other.devices
            and self.sharding_spec == other.sharding_spec
            and self.memory_kind == other.memory_kind
        )

    def __hash__(self) -> int:
        return self._own_hash

    @cached_property
    def _own_hash(self) -> int:
        return hash((self.devices, self.sharding_spec, self.memory_kind))

    def __repr__(self) -> str:
        kind = f", memory_kind={self.memory_kind!r}"
        if self.memory_kind == default_memory_kind(self.devices[0]):
            kind = ""
        return f"PmapSharding({self.sharding_spec}, devices={[d.id for d in self.devices]}{kind})"

    def _describe(self) -> str:
        return f"{type(self).__name__} of {self.sharding_spec}"

    def _complete_pieces(self, pieces: Any, shape: Shape) -> Any:
        """Return the arrays with the dimensions that early `pmap` left out."""
        dims = self.sharding_spec.unstacked_dims
        if not dims or not isinstance(pieces, Sequence):
            return pieces
        spare = without_dims(shape, dims)
        lacking = all(isinstance(x, jax.Array) and tuple(x.shape) == spare for x in pieces)
        return [_in_shape(x, shape) for x in pieces] if lacking else pieces

    @property
    def devices(self) -> DeviceRow:
        """Return the devices of the grid in row-major order, also as an array of rank 1."""
        return self._ordered

    def with_memory_kind(self, kind: str) -> Self:
        """Return the same placement in another memory of the same devices."""
        return type(self)(self.devices, self.sharding_spec, memory_kind=kind)

    @property
    def is_fully_replicated(self) -> bool:
        """Return True if every device holds every element."""
        return self.sharding_spec.tiling.is_replicated

    def rank_tiling(self, ndim: int) -> Tiling:
        """Return the tiling for arrays of a rank; the spec is for one rank only.

        Raises:
            RankError: The rank is another.
        """
        if checked_rank(ndim) != self.sharding_spec.tiling.ndim:
            self.sharding_spec.check_rank(ndim)
        return self.sharding_spec.tiling

    def tiling(self, shape: Sequence[int]) -> Tiling:
        """Return the tiling for an array of this shape.

        Raises:
            GeometryError: It has another rank, or an unstacked dimension of another size.
        """
        self.sharding_spec.check_unstacked(self._checked_shape(shape, "tiling"))
        return self.sharding_spec.tiling

    def check_compatible_aval(self, aval_shape: Sequence[int]) -> None:
        """Check a shape as JAX's method does: like `is_compatible_aval`, without divisibility."""
        shape = self._checked_shape(aval_shape, "check_compatible_aval")
        self.sharding_spec.check_unstacked(shape)


def _flat(devices: Any) -> Any:
    """Return a grid of devices as a list; other values are returned unchanged."""
    return list(devices.flat) if isinstance(devices, np.ndarray) else devices


def _enough(shape: tuple[int, ...], dim: int, own: int) -> int:
    """Return the number of devices of a dimension with one index on each device."""
    size = shape[dim]
    if not 0 < size <= own:
        raise ShardingError(
            f"dimension {dim} of shape {shape} has size {size}, which needs as many devices, but "
            f"this process has {own}: give the devices yourself, and a size that they divide, such "
            "as PmapSharding.default(shape, devices=jax.local_devices())"
        )
    return size


def _unpickle_pmap(names: DeviceNames, spec: ShardingSpec, memory_kind: str | None) -> PmapSharding:
    return PmapSharding(devices_of(names), spec, memory_kind=memory_kind)


def _in_shape(array: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(array, Tracer) or len(array.sharding.device_set) != 1:
        return array  # refused later, by its number
    check_alive(array)
    if is_key_dtype(array.dtype):
        numbers = key_handle(array)
        return keys_over(reshape_buffer(numbers, (*shape, *numbers.shape[array.ndim :])), array)
    return reshape_buffer(handle_of(array), shape)


# Results of `jax.jit` with this sharding.
install_shardings((PmapSharding,))
