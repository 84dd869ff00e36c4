"""Partition specs in normal form: which mesh axes cut which dimension of an array."""

import difflib
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Final

from xlashard.errors import (
    ArgumentError,
    DivisibilityError,
    DuplicateAxisError,
    GeometryError,
    RankError,
    SpecEntryError,
    UnknownAxisError,
    counted,
)
from xlashard.geometry.divisibility import divisibility_text
from xlashard.support.lazily import dataclass

if TYPE_CHECKING:
    from xlashard.geometry.mesh import MeshGrid

LARGEST_RANK: Final = (1 << 16) - 1
"""Dimensions of an array at most. Programs of a few thousand compile; NumPy has up to 64."""

type DimAxes = tuple[str, ...] | None
"""The axes that cut one dimension, major to minor; `None` leaves it to the partitioner."""


class _Unconstrained:
    """The type of `UNCONSTRAINED`; pickles and copies as the one instance."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNCONSTRAINED"

    def __reduce__(self) -> str:
        return "UNCONSTRAINED"


UNCONSTRAINED: Final = _Unconstrained()
"""Marker in the entries of `parse_spec` for a dimension that the partitioner may choose."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A partition spec in normal form: trailing uncut dimensions are not there.

    Specs that are equivalent for every array compare equal.

    Attributes:
        dims: Per dimension its mesh axes, major to minor: `()` where it is not cut, `None` where
            it is unconstrained.
        unreduced: Mesh axes over which the devices hold partial results of a reduction.
        reduced: Mesh axes over which the gradient is unreduced; the array itself is replicated.
        reduction: The pending reduction over `unreduced`: `sum`, `max` or `min`; empty without.

    Example:
        >>> Spec((("x",), (), None, ()))
        Spec(dims=(('x',), (), None))
    """

    dims: tuple[DimAxes, ...] = ()
    unreduced: frozenset[str] = frozenset()
    reduced: frozenset[str] = frozenset()
    reduction: str = ""

    def __post_init__(self) -> None:
        end = len(self.dims)
        while end and self.dims[end - 1] == ():
            end -= 1
        if end != len(self.dims):
            object.__setattr__(self, "dims", self.dims[:end])

    def __repr__(self) -> str:
        reductions = {
            "unreduced": sorted(self.unreduced),
            "reduced": sorted(self.reduced),
            "reduction": self.reduction,
        }
        rest = "".join(f", {name}={value!r}" for name, value in reductions.items() if value)
        return f"Spec(dims={self.dims}{rest})"

    @property
    def axes(self) -> tuple[str, ...]:
        """Return all mesh axes in use, in the order of the dimensions."""
        return tuple(chain.from_iterable(d for d in self.dims if d))

    @property
    def is_constrained(self) -> bool:
        """Return whether no dimension is left to the partitioner."""
        return None not in self.dims

    def describe(self) -> str:
        """Return the spec as a `PartitionSpec` for messages: `P('x', None, ('y', 'z'))`."""
        return f"P({', '.join((*map(_entry_text, self.dims), *self.keywords()))})"

    def keywords(self) -> list[str]:
        """Return the keyword arguments of the spec: `["unreduced={'x'}"]`; empty for most."""
        named = (("unreduced", self.unreduced), ("reduced", self.reduced))
        parts = [f"{name}={{{', '.join(map(repr, sorted(s)))}}}" for name, s in named if s]
        if self.reduction not in ("", "sum"):
            parts.append(f"unreduced_kind=UnreducedKind.{self.reduction}")
        return parts

    @property
    def whole(self) -> "Spec":
        """Return the spec of the reduced value: the same cuts, and no partial results."""
        return Spec(self.dims)

    def for_rank(self, ndim: int) -> tuple[DimAxes, ...]:
        """Return the dims of an array of rank `ndim`, the uncut trailing ones included.

        Raises:
            RankError: The spec has more dimensions.
        """
        ndim = checked_rank(ndim)
        if len(self.dims) > ndim:
            fits = "a scalar can't be cut, P()"
            if ndim:
                shorter = Spec(self.dims[:ndim]).describe()
                fits = f"give at most {counted(ndim, 'entry', 'entries')}, such as {shorter}"
            raise RankError(
                f"the spec needs at least {counted(len(self.dims), 'dimension')}, the array has "
                f"{ndim}: {fits}",
                ndim=ndim,
                needed=len(self.dims),
            )
        return self.dims + ((),) * (ndim - len(self.dims))

    def insert(self, dim: int, axes: DimAxes) -> "Spec":
        """Return the spec of an array with one more dimension at `dim`, cut by `axes`.

        Args:
            dim: Position of the new dimension, from 0; may lie beyond the dims written down.
            axes: Its mesh axes, `()` for uncut, `None` for unconstrained.

        Raises:
            GeometryError: The position is below 0.
        """
        if dim < 0:
            raise GeometryError(f"a new dimension's position counts from 0, got {dim}")
        padded = self.dims + ((),) * (dim - len(self.dims))
        return replace(self, dims=(*padded[:dim], axes, *padded[dim:]))


def checked_rank(ndim: object) -> int:
    """Return the rank of an array as an int.

    Raises:
        ArgumentError: The value is no integer.
        RankError: The value is below 0, or more than any array has.
    """
    try:
        rank = operator.index(ndim)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise ArgumentError(
            f"the rank of an array must be an integer such as 2, not {ndim!r}"
        ) from None
    if not 0 <= rank <= LARGEST_RANK:
        raise RankError(
            f"an array has from 0 to {LARGEST_RANK:,} dimensions, not {rank:,}",
            ndim=rank,
            needed=0,
        )
    return rank


type _Dims = tuple[tuple[str, ...], ...]


def resharding_steps(dims: _Dims, target: _Dims) -> list[_Dims]:
    """Return shardings between two, so that no step between them needs the whole value.

    A step adds an axis that the target has beside others (a slice), moves the minor axis of a
    dimension to its place in another one (an all-to-all), or drops one (a partial all-gather).

    Args:
        dims: The axes of each dimension, the major one first.
        target: Those of the target.

    Example:
        >>> resharding_steps(((), ("x", "y")), (("y",), ()))
        [(('y',), ('x',))]
    """
    steps: list[_Dims] = []
    while dims != target:
        dims = _next_step(dims, target)
        steps.append(dims)
    return steps[:-1]


def _next_step(dims: _Dims, target: _Dims) -> _Dims:
    used, kept = ({axis for axes in side for axis in axes} for side in (dims, target))
    # The axis that each dimension lacks next.
    lacking = [
        axes[len(own)] if own == axes[: len(own)] and own != axes else None
        for own, axes in zip(dims, target, strict=True)
    ]
    for dim, axis in enumerate(lacking):
        if axis is not None and axis not in used:
            return _with_axes(dims, dim, (*dims[dim], axis))
    wrong = [d for d, axes in enumerate(dims) if axes != target[d][: len(axes)]]
    for dim in wrong:
        axis = dims[dim][-1]
        if axis in lacking:
            to = lacking.index(axis)
            return _with_axes(_with_axes(dims, dim, dims[dim][:-1]), to, (*dims[to], axis))
    dim = min(wrong, key=lambda d: dims[d][-1] in kept)
    return _with_axes(dims, dim, dims[dim][:-1])


def _with_axes(dims: _Dims, dim: int, axes: tuple[str, ...]) -> _Dims:
    return (*dims[:dim], axes, *dims[dim + 1 :])


def _entry_text(axes: DimAxes) -> str:
    if axes is None:
        return "P.UNCONSTRAINED"
    if not axes:
        return "None"
    return repr(axes[0]) if len(axes) == 1 else repr(axes)


def parse_spec(entries: Iterable[object], *, unconstrained: object = UNCONSTRAINED) -> Spec:
    """Parse the entries of a partition spec.

    Args:
        entries: One entry per dimension: `None` (not cut), an axis name, a sequence of axis names
            (major to minor; `None` among them is ignored), or the `unconstrained` marker.
        unconstrained: The object that marks an unconstrained dimension, compared by identity.

    Raises:
        SpecEntryError: An entry is something else.

    Example:
        >>> parse_spec([("x", "y"), None, "z", None])
        Spec(dims=(('x', 'y'), (), ('z',)))
    """
    if isinstance(entries, str):
        raise SpecEntryError(
            f"a spec is a sequence with one entry per dimension, not the name {entries!r} alone: "
            f"write ({entries!r},)",
            dim=0,
            entry=entries,
        )
    return Spec(tuple(_parse_dim(i, e, unconstrained) for i, e in enumerate(entries)))


def _parse_dim(dim: int, entry: object, unconstrained: object) -> DimAxes:
    if entry is unconstrained:
        return None
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if not isinstance(entry, tuple | list):
        raise SpecEntryError(
            f"entry {dim} is {entry!r}, of type {type(entry).__name__}; an entry is None, "
            "an axis name, a tuple of axis names or UNCONSTRAINED",
            dim=dim,
            entry=entry,
        )
    for name in entry:
        if name is unconstrained:
            raise SpecEntryError(
                f"entry {dim} has UNCONSTRAINED inside a tuple; a dimension is unconstrained as a "
                f"whole or not at all: write {_without_open(entry, unconstrained)}, or "
                "P.UNCONSTRAINED alone",
                dim=dim,
                entry=entry,
            )
        if name is not None and not isinstance(name, str):
            raise SpecEntryError(
                f"entry {dim} has {name!r}, of type {type(name).__name__}, among its axis names: "
                "write the names alone, such as ('x', 'y')",
                dim=dim,
                entry=entry,
            )
    return tuple(name for name in entry if name is not None)


def _without_open(entry: Sequence[object], unconstrained: object) -> str:
    names = [name for name in entry if name is not unconstrained]
    return repr(names[0] if len(names) == 1 else tuple(names))


def validate_spec(
    spec: Spec,
    grid: "MeshGrid",
    shape: Sequence[int] | None = None,
) -> None:
    """Check that a spec fits a mesh and, where given, the shape of an array.

    Args:
        spec: The spec.
        grid: The mesh.
        shape: The array's global shape, in elements.

    Raises:
        UnknownAxisError: The mesh lacks an axis.
        DuplicateAxisError: One axis is used twice.
        RankError: The spec has more dimensions than the shape.
        DivisibilityError: A dimension does not divide into equal tiles.
    """
    _check_axes(spec, grid)
    if shape is None:
        return
    sizes = grid.shape
    for dim, axes in enumerate(spec.for_rank(len(shape))):
        tiles = math.prod(sizes[a] for a in axes or ())
        if tiles == 1 or shape[dim] % tiles == 0:
            continue
        factors = [(a, sizes[a]) for a in axes or ()]
        raise DivisibilityError(
            divisibility_text(dim, shape, tiles, factors),
            dim=dim,
            tiles=tiles,
            shape=shape,
            axes=factors,
        )


def _check_axes(spec: Spec, grid: "MeshGrid") -> None:
    known = grid.axis_names
    for name, axes in (("unreduced", spec.unreduced), ("reduced", spec.reduced)):
        for axis in sorted(axes.difference(known)):
            raise _unknown_axis(name, None, axis, grid)
    for dim, axes in enumerate(spec.dims):
        for axis in axes or ():
            if axis not in known:
                raise _unknown_axis(f"dimension {dim}", dim, axis, grid)
    check_axes_once(spec)


def check_axes_once(spec: Spec) -> None:
    """Check that a spec uses each axis once.

    Raises:
        DuplicateAxisError: One axis is used twice.
    """
    seen: dict[str, list[int]] = {}
    for dim, axes in enumerate(spec.dims):
        for axis in axes or ():
            seen.setdefault(axis, []).append(dim)
    for axis, dims in seen.items():
        if len(dims) > 1:
            where = (
                f"twice for dimension {dims[0]}"
                if dims[0] == dims[-1]
                else f"for dimensions {' and '.join(map(str, dims))}"
            )
            raise DuplicateAxisError(
                f"the axis {axis!r} is used {where}; each axis can cut one dimension, once: write "
                f"{_used_once(spec).describe()}",
                axis=axis,
                dims=dims,
            )


def _used_once(spec: Spec) -> Spec:
    """Return the spec with each axis only where it comes first."""
    seen: set[str] = set()
    dims: list[DimAxes] = []
    for axes in spec.dims:
        kept = axes if axes is None else tuple(dict.fromkeys(a for a in axes if a not in seen))
        seen |= set(kept or ())
        dims.append(kept)
    return Spec(tuple(dims))


def _unknown_axis(place: str, dim: int | None, axis: str, grid: "MeshGrid") -> UnknownAxisError:
    close = difflib.get_close_matches(axis, grid.axis_names, n=1)
    advice = ": name one of those, or None to leave the dimension whole"
    if close:
        advice = f"; did you mean {close[0]!r}?"
    return UnknownAxisError(
        f"{place} names the axis {axis!r}; the mesh has {grid.describe()}{advice}",
        axis=axis,
        dim=dim,
        mesh_axes=grid.axis_names,
    )
