"""`jax.sharding` and `jax.experimental.sharding`, and `PartitionSpec` in each of its modules."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import numpy as np
from jax import P
from numpy.lib.array_utils import normalize_axis_tuple

from xlashard._jax.runtime.shardings import Device, jax_hlo_sharding
from xlashard._jax.runtime.shardings import JaxNamedSharding as NamedSharding
from xlashard._jax.runtime.shardings import JaxSharding as Sharding
from xlashard._jax.runtime.shardings import JaxSingleDeviceSharding as SingleDeviceSharding
from xlashard._jax.runtime.shardings import op_sharding as _proto
from xlashard._jax.shard_groups import shard_group_primitive
from xlashard.core import sharding as todays
from xlashard.core.sharding import GSPMDSharding, from_jax
from xlashard.core.sharding.named import DeviceNames, devices_of, names_of
from xlashard.errors import ArgumentError, ShardingError
from xlashard.geometry import TileAssignment
from xlashard.legacy.modules.maps import Mesh
from xlashard.legacy.shardings.op_shardings import OpShardingSharding
from xlashard.legacy.shardings.parsed_specs import ParsedPartitionSpec
from xlashard.legacy.shardings.partition_spec import PartitionSpec
from xlashard.legacy.shardings.pmap import PmapSharding
from xlashard.support.tracebacks import short_tracebacks

MeshPspecSharding = NamedSharding


class _CompatibleType(type(todays.XLACompatibleSharding)):
    """Metaclass that counts every sharding with an XLA equivalent as an instance."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if isinstance(instance, todays.Sharding):
            return isinstance(instance, todays.XLACompatibleSharding)
        return isinstance(instance, Sharding)

    def __subclasscheck__(cls, subclass: type) -> bool:
        if cls in subclass.__mro__:
            return True
        if issubclass(subclass, todays.Sharding):
            return issubclass(subclass, todays.XLACompatibleSharding)
        return issubclass(subclass, Sharding)


class XLACompatibleSharding(todays.XLACompatibleSharding, metaclass=_CompatibleType):
    """Base class of shardings with an XLA equivalent, which all of JAX's shardings have.

    Example:
        >>> import jax
        >>> isinstance(jax.numpy.zeros(3).sharding, XLACompatibleSharding)
        True
    """


def shard_alike(x: Any, y: Any) -> tuple[Any, Any]:
    """Return two pytrees, whose leaves the partitioner shards alike, pair by pair.

    Args:
        x: A pytree of arrays.
        y: A pytree of the same structure and shapes.

    Raises:
        ArgumentError: The structures or the shapes of two leaves differ; names the leaf.

    Example:
        >>> import jax.numpy as jnp
        >>> x, y = shard_alike(jnp.ones(3), jnp.zeros(3))
        >>> y.shape
        (3,)
    """
    with short_tracebacks:
        (paths, tree), (others, other) = (
            jax.tree_util.tree_flatten_with_path(each) for each in (x, y)
        )
        if tree != other:
            raise ArgumentError(
                f"shard_alike: x and y must have one structure, and have {tree} and {other}: "
                "pass the leaves that belong together"
            )
        pairs = []
        for (path, left), (_, right) in zip(paths, others, strict=True):
            if np.shape(left) != np.shape(right):
                name = f"x{jax.tree_util.keystr(path)}"
                raise ArgumentError(
                    f"shard_alike: {name} has the shape {np.shape(left)}, and its leaf of y "
                    f"{np.shape(right)}: pass arrays of one shape"
                )
            pairs.append(_share_sharding(left, right))
    return tree.unflatten([left for left, _ in pairs]), tree.unflatten(
        [right for _, right in pairs]
    )


@jax.custom_jvp
def _share_sharding(left: Any, right: Any) -> tuple[Any, Any]:
    left, right = shard_group_primitive().bind(left, right)
    return left, right


@_share_sharding.defjvp
def _pass_tangents(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return _share_sharding(*primals), tangents


class AxisTypes:
    """Types of mesh axes, under their names in JAX 0.5.0."""

    Visible = jax.sharding.AxisType.Explicit
    Hidden = jax.sharding.AxisType.Auto
    Collective = jax.sharding.AxisType.Manual


def auto_axes(
    fun: Callable[..., Any], *, axes: Any = None, out_shardings: Any = None
) -> Callable[..., Any]:
    """Return a function that runs with Auto axes in a program with Explicit ones.

    Args:
        fun: The function.
        axes: The axes; None for all.
        out_shardings: The shardings of the results, unless each call has them by this keyword.
    """
    mapped = jax.sharding.auto_axes(fun, axes=axes, out_sharding=out_shardings)
    return _with_keyword(mapped, "out_shardings", "out_sharding")


def explicit_axes(
    fun: Callable[..., Any], *, axes: Any = None, in_shardings: Any = None
) -> Callable[..., Any]:
    """Return a function that runs with Explicit axes in a program with Auto ones.

    Args:
        fun: The function.
        axes: The axes; None for all.
        in_shardings: The shardings of the arguments, unless each call has them by this keyword.
    """
    mapped = jax.sharding.explicit_axes(fun, axes=axes, in_sharding=in_shardings)
    return _with_keyword(mapped, "in_shardings", "in_sharding")


def _with_keyword(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if old in kwargs:
            kwargs[new] = kwargs.pop(old)
        return function(*args, **kwargs)

    return call


def on_mesh(mesh: todays.Mesh, pspec: Any, parsed_pspec: Any = None) -> todays.NamedSharding:
    """Return a sharding on a mesh.

    Args:
        mesh: The mesh.
        pspec: The spec; None for replicated.
        parsed_pspec: Ignored: the parsed form of `pspec`.
    """
    return todays.NamedSharding(mesh, P() if pspec is None else pspec)


def op_sharding_of(sharding: Any, ndim: int) -> Any:
    """Return XLA's `OpSharding` of a sharding: the method `_to_xla_op_sharding` of 2022.

    Args:
        sharding: A sharding of this package or of JAX.
        ndim: The rank.
    """
    return _proto(jax_hlo_sharding(sharding, ndim))


def is_compatible_aval(self: Any, aval_shape: Sequence[int]) -> None:
    """Check that a sharding fits the rank of an array: a method of shardings in 2022.

    Args:
        self: A sharding of JAX.
        aval_shape: The shape of the array; the rank is checked.

    Raises:
        GeometryError: The rank is too low.
    """
    from_jax(self).check_compatible_aval(tuple(aval_shape))


@property
def op_sharding(self: Any) -> Any:
    """XLA's `OpSharding` of a `GSPMDSharding`: `_op_sharding` of 2022."""
    return _proto(self._hlo_sharding)


@property
def parsed_pspec(self: Any) -> Any:
    """The parsed spec of a `NamedSharding`: `_parsed_pspec` of 2022."""
    return ParsedPartitionSpec.from_user_input(self.spec, "spec", allow_unconstrained_dims=True)


class PositionalSharding(GSPMDSharding):
    """Sharding by a grid of devices: dimension `i` of an array is sharded over grid dimension `i`.

    Each entry of the grid is the set of devices that hold one tile. `reshape`, `transpose`,
    `replicate` and indexing return other grids of the same devices.

    Args:
        devices: The devices: an array of any shape, or a list.
        memory_kind: The memory kind; None for the default.

    Raises:
        ShardingError: `devices` is empty, or contains a device twice.

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
        grid = np.asarray(devices, dtype=object)
        ids = np.arange(grid.size).reshape(*grid.shape, 1)
        self._place(grid.ravel().tolist(), ids, memory_kind)

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

    def _with_ids(self, ids: np.ndarray) -> Self:
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
        sizes = tuple(shape[0]) if shape and isinstance(shape[0], Sequence) else shape
        try:
            return self._with_ids(self._ids.reshape(*sizes, self._ids.shape[-1]))
        except ValueError:
            raise ShardingError(
                f"PositionalSharding.reshape: shape {sizes} is invalid for a grid of shape "
                f"{self.shape}: expected {self._ids[..., 0].size} entries, such as reshape(-1)"
            ) from None

    def transpose(self, *axes: Any) -> Self:
        """Permute the dimensions of the grid.

        Args:
            *axes: The permutation, as numbers or as one tuple; the reverse order if left out.
        """
        order = tuple(axes[0]) if axes and isinstance(axes[0], Sequence) else axes
        order = normalize_axis_tuple(order or range(self.ndim)[::-1], self.ndim)
        return self._with_ids(self._ids.transpose(*order, self.ndim))

    def replicate(self, axis: int | Sequence[int] | None = None, keepdims: bool = True) -> Self:
        """Replicate each tile over the devices along some dimensions of the grid.

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
        return self._with_ids(np.sort(moved.reshape(*shape, -1), axis=-1))

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
    sharding = cls.__new__(cls)
    sharding._place(devices, ids, memory_kind)
    return sharding


def _unpickle(
    cls: type[PositionalSharding], names: DeviceNames, ids: np.ndarray, memory_kind: str | None
) -> PositionalSharding:
    return _remake(cls, devices_of(names), ids, memory_kind)
