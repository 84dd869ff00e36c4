"""Constraints by which a dimension does not divide: found in jaxprs, reported once per site."""

import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from xlashard._jax.lowering import aval_text
from xlashard._jax.runtime.global_state import cached_by_jaxpr
from xlashard._jax.trace import tracing
from xlashard._jax.trace.primitive_names import CONSTRAINT
from xlashard.config import read_flags
from xlashard.core.sharding import (
    NamedSharding,
    XLACompatibleSharding,
    from_jax,
    partition_spec,
)
from xlashard.core.sharding.sharding_texts import described, or_whole
from xlashard.errors import (
    GeometryError,
    ShardingError,
    UnevenShardingError,
    UnevenShardingWarning,
    XlashardWarning,
)
from xlashard.geometry.divisibility import uneven_text
from xlashard.support.formatting import in_bytes
from xlashard.support.lazily import dataclass, deferred

if TYPE_CHECKING:
    from xlashard._jax.trace import origins
else:
    origins = deferred("xlashard._jax.trace.origins")

FLAGS = read_flags(os.environ)

# A warning names a line of the user's code, not of this package or of others such as flax.
_OTHER_FILES = str(Path(__file__).parents[2]), str(Path(jax.__file__).parents[1])

# For each file the warnings that Python has shown for its lines.
_SHOWN: dict[str, dict[Any, Any]] = {}


def is_strict(requested: bool | None) -> bool:
    """Return True if a sharding that is not met is an error.

    Args:
        requested: The option of the call; None for that of `XLASHARD_STRICT`.
    """
    return FLAGS.strict if requested is None else requested


@dataclass(frozen=True)
class UnevenDimension:
    """Dimension whose size does not divide by its number of tiles.

    Attributes:
        dim: The dimension.
        shape: Shape of the array.
        shards: Number of tiles along it.
        axes: Name and size of each mesh axis that shards it; empty if unknown.
    """

    dim: int
    shape: tuple[int, ...]
    shards: int
    axes: tuple[tuple[str, int], ...] = ()

    @property
    def size(self) -> int:
        """Return the size of the dimension."""
        return self.shape[self.dim]

    @property
    def shard_size(self) -> int:
        """Return the size of a padded tile."""
        return -(-self.size // self.shards)

    @property
    def padded_size(self) -> int:
        """Return the smallest larger size that divides."""
        return self.shard_size * self.shards

    @property
    def empty_shards(self) -> int:
        """Return the number of tiles that hold padding alone."""
        return self.shards - -(-self.size // self.shard_size) if self.size else self.shards

    def describe(self) -> str:
        """Describe the division, with the sizes of the mesh axes."""
        return uneven_text(self.dim, self.shape, self.shards, self.axes)

    def describe_padding(self) -> str:
        """Describe the tiles: `12, 3 on each device`."""
        empty = f" ({self.empty_shards} hold padding alone)" if self.empty_shards else ""
        return f"{self.padded_size}, {self.shard_size} on each device{empty}"


@dataclass(frozen=True, eq=False)
class UnevenConstraint:
    """Constraint that shards some dimensions into unequal tiles.

    Attributes:
        sharding: The sharding of the constraint.
        aval: The abstract value of the constrained value.
        dims: The uneven dimensions.
        eqn: The equation of the constraint; None for one that is about to be bound.
    """

    sharding: XLACompatibleSharding
    aval: Any
    dims: tuple[UnevenDimension, ...]
    eqn: Any = None

    @property
    def device_bytes(self) -> int:
        """Return the bytes of a padded tile on one device."""
        return tile_bytes(self.aval, self._counts)

    @property
    def whole_bytes(self) -> int:
        """Return the bytes on one device if the uneven dimensions stay whole."""
        uneven = {uneven.dim for uneven in self.dims}
        counts = [1 if i in uneven else count for i, count in enumerate(self._counts)]
        return tile_bytes(self.aval, counts)

    @property
    def padding_bytes(self) -> int:
        """Return the bytes of padding on all devices that hold one copy."""
        whole = tile_bytes(self.aval, (1,) * self.aval.ndim)
        return self.device_bytes * math.prod(self._counts) - whole

    @property
    def _counts(self) -> tuple[int, ...]:
        return self.sharding.rank_tiling(self.aval.ndim).counts

    def describe(self, subject: str, *, is_eager: bool = False) -> str:
        """Describe the constraint, and what happens in its place.

        Args:
            subject: Noun phrase for the constraint: `the sharding of x`.
            is_eager: True outside of a program.
        """
        uneven = ", and ".join(dim.describe() for dim in self.dims)
        whole = [each.dim for each in self.dims]
        instead = dividing(self.sharding, self.aval.shape)
        counts = instead.rank_tiling(self.aval.ndim).counts
        effect = (
            f"so the array is {described(instead)} instead, "
            f"{in_bytes(tile_bytes(self.aval, counts))} on each device"
        )
        if not is_eager:
            sizes = " and ".join(dim.describe_padding() for dim in self.dims)
            effect = (
                f"so XLA pads it to {sizes}, {in_bytes(self.device_bytes)} with "
                f"{in_bytes(self.padding_bytes)} of padding in all; a result is not sharded so, "
                f"and takes up to {in_bytes(self.whole_bytes)} on each device"
            )
        return (
            f"{subject} ({aval_text(self.aval)}) is {described(self.sharding)}: {uneven}, "
            f"{effect}; {or_whole('pad it with xlashard.pad_to_mesh', self.sharding, whole)}"
        )


def tile_bytes(aval: Any, counts: Sequence[int]) -> int:
    """Return the bytes of a padded tile of a value that is cut into some number of tiles."""
    tiles = zip(aval.shape, counts, strict=True)
    return tracing.count_bytes(aval, [-(-size // count) for size, count in tiles])


def uneven_dimensions(
    sharding: XLACompatibleSharding, shape: Sequence[int]
) -> tuple[UnevenDimension, ...]:
    """Return the dimensions of a shape that do not divide by their number of tiles."""
    try:
        counts = sharding.rank_tiling(len(shape)).counts
    except GeometryError:
        return ()
    uneven = [i for i, size in enumerate(shape) if size % counts[i]]
    if not uneven:
        return ()
    axes: Sequence[Any] = [()] * len(shape)
    sizes: Mapping[str, int] = {}
    if isinstance(sharding, NamedSharding):
        axes, sizes = sharding.normal_spec.for_rank(len(shape)), sharding.mesh.shape
    return tuple(
        UnevenDimension(i, tuple(shape), counts[i], tuple((a, sizes[a]) for a in axes[i] or ()))
        for i in uneven
    )


@cached_by_jaxpr
def uneven_constraints(jaxpr: Any) -> tuple[UnevenConstraint, ...]:
    """Find the uneven constraints in a jaxpr and its inner jaxprs, of ours and of JAX."""
    constraints: list[UnevenConstraint] = []
    for eqn in tracing.inner_sharding_equations(jaxpr):
        if eqn.primitive.name != CONSTRAINT:
            continue
        try:
            sharding = from_jax(eqn.params["sharding"])
        except ShardingError:
            continue
        aval = eqn.outvars[0].aval
        if isinstance(sharding, XLACompatibleSharding):
            dims = uneven_dimensions(sharding, aval.shape)
            if dims:
                constraints.append(UnevenConstraint(sharding, aval, dims, eqn))
    return tuple(constraints)


def report_uneven_value(
    sharding: XLACompatibleSharding, aval: Any, path: str, strict: bool | None, *, is_eager: bool
) -> None:
    """Report an uneven constraint where `with_sharding_constraint` is called.

    Args:
        sharding: The sharding of the constraint.
        aval: The type of the value.
        path: Its path.
        strict: The option of the call.
        is_eager: Whether the value is concrete.

    Raises:
        UnevenShardingError: If strict.
    """
    dims = uneven_dimensions(sharding, aval.shape)
    if not dims:
        return
    constraint = UnevenConstraint(sharding, aval, dims)
    text = constraint.describe(f"the sharding of {path}", is_eager=is_eager)
    if is_strict(strict):
        raise _error(constraint, text, path)
    warn(text, UnevenShardingWarning)


def report_uneven_constraints(
    jaxpr: Any, own_primitive: Any, function: str, strict: bool | None
) -> None:
    """Report the uneven constraints of a program that is about to be lowered.

    Args:
        jaxpr: The closed jaxpr.
        own_primitive: The primitive of this package, whose call has warned already.
        function: The name of the function.
        strict: The option of the function.

    Raises:
        UnevenShardingError: If strict.
    """
    for constraint in uneven_constraints(jaxpr):
        line = origins.user_line(constraint.eqn)
        if is_strict(strict):
            at = "" if line is None else f" at {line[0]}:{line[1]}"
            text = constraint.describe(f"a with_sharding_constraint of {function}{at}")
            raise _error(constraint, text, "")
        if constraint.eqn.primitive is not own_primitive:
            subject = f"a with_sharding_constraint of {function}"
            warn(constraint.describe(subject), UnevenShardingWarning, line)


def _error(constraint: UnevenConstraint, text: str, path: str) -> UnevenShardingError:
    first = constraint.dims[0]
    return UnevenShardingError(
        text, path=path, dim=first.dim, size=first.size, tiles=first.shards, axes=first.axes
    )


def warn(text: str, kind: type[XlashardWarning], line: "origins.Line | None" = None) -> None:
    """Issue a warning at a line of the user's code, which Python shows once for each text.

    Args:
        text: The text.
        kind: The class of the warning.
        line: File and line; None for those of the caller of this package.
    """
    if line is None:
        warnings.warn(text, kind, skip_file_prefixes=_OTHER_FILES)
        return
    file, number = line
    warnings.warn_explicit(text, kind, file, number, registry=_SHOWN.setdefault(file, {}))


def dividing(sharding: XLACompatibleSharding, shape: tuple[int, ...]) -> XLACompatibleSharding:
    """Return a sharding without the axes by which a dimension of a shape does not divide."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    dims = sharding.normal_spec.for_rank(len(shape))
    sizes = sharding.mesh.shape
    kept = tuple(
        axes and _leading(axes, sizes, length) for axes, length in zip(dims, shape, strict=True)
    )
    if kept == dims:
        return sharding
    return sharding.with_spec(partition_spec(replace(sharding.normal_spec, dims=kept)))


def _leading(axes: Iterable[str], sizes: Mapping[str, int], length: int) -> tuple[str, ...]:
    """Return the longest prefix of the axes that divides a length."""
    axes = tuple(axes)
    tiles = accumulate((sizes[axis] for axis in axes), mul)
    return tuple(axis for axis, count in zip(axes, tiles, strict=True) if length % count == 0)
