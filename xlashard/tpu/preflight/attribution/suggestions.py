"""What would remove a collective that nobody asked for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xlashard._jax.dataflow import Scope, is_variable, source_line
from xlashard.geometry import MeshGrid
from xlashard.pjit.report.communication import Sources
from xlashard.program.hlo import Frame
from xlashard.sharding import NamedSharding
from xlashard.tpu.preflight.attribution.collective_context import (
    PRODUCTS,
    CollectiveContext,
    lines_of,
)
from xlashard.tpu.preflight.attribution.value_shardings import (
    Axes,
    ShardingSource,
    axes_of,
    spec_of,
)


@dataclass(frozen=True, eq=False)
class SuggestionFinder:
    """What would remove a collective that nobody asked for.

    Attributes:
        context: The collective.
        grid: The mesh.
        sources: Which lines of a stack are the user's.
    """

    context: CollectiveContext
    grid: MeshGrid
    sources: Sources

    def text(self) -> str:
        """What to write; at least where to look."""
        found = self._by_equations() or self._by_argument(self.context.argument)
        if not found and not self.context.collective.frames:
            made_from = self.context.made_from
            found = self._by_argument(min(made_from)) if len(made_from) == 1 else ""
        return found or self._where()

    def _by_equations(self) -> str:
        """The source of the value, dealt out as the operation wants it."""
        for scope, eqn in self.context.equations:
            values = [v for v in eqn.invars if is_variable(v) and v.aval.shape]
            values.sort(key=lambda v: not self._is_made_there(scope, v))
            sources = [self.context.shardings.sources(scope, v) for v in values]
            for index, mine in enumerate(sources):
                others = [s for i, s in enumerate(sources) if i != index]
                moved = [s for dim in mine for s in dim if self.context.axes & set(s.axes)]
                if not moved or not self._is_meant(moved):
                    continue
                wanted = self._wanted(eqn, values[index], mine, others)
                return self._written(moved[0], mine, wanted)
        return ""

    def _is_meant(self, moved: Sequence[ShardingSource]) -> bool:
        """Whether these are of the value that the collective moves, if it is an argument."""
        return not self.context.argument or any(s.path == self.context.argument for s in moved)

    def _is_made_there(self, scope: Scope, value: Any) -> bool:
        """Whether a value is made at the line of what the collective takes."""
        made = scope.makers.get(value) if is_variable(value) else None
        line = None if made is None else source_line(made[1])
        return line is not None and line in lines_of(self.context.maker_frames)

    def _wanted(
        self,
        eqn: Any,
        value: Any,
        mine: list[list[ShardingSource]],
        others: list[list[list[ShardingSource]]],
    ) -> list[Axes]:
        """The axes that an operation wants to cut each dimension of a value."""
        now = [_cut(dim) for dim in mine]
        shape = value.aval.shape
        name = eqn.primitive.name
        free = [tuple(a for a in axes if a not in self.context.axes) for axes in now]
        if name == "dot_general":
            return self._for_product(eqn, value, now, free, others)
        if shape == getattr(eqn.outvars[0].aval, "shape", None):
            for other in others:
                theirs = [_cut(dim) for dim in other]
                if len(theirs) == len(now) and any(theirs) and theirs != now:
                    return theirs
        return free if name in PRODUCTS else self._elsewhere(shape, now, free)

    def _for_product(
        self,
        eqn: Any,
        value: Any,
        now: list[Axes],
        free: list[Axes],
        others: list[list[list[ShardingSource]]],
    ) -> list[Axes]:
        """Dimensions that are summed up, or go along, cut as those of the other operand are."""
        mine, theirs = zip(*eqn.params["dimension_numbers"], strict=True)
        if value is not eqn.invars[0]:
            mine, theirs = theirs, mine
        wanted = list(free)
        for other in others:
            for dim, their_dim in zip(sum(mine, ()), sum(theirs, ()), strict=True):
                cut = _cut(other[their_dim])
                elsewhere = {a for i, axes in enumerate(free) if i != dim for a in axes}
                if now[dim] != free[dim] and cut and not elsewhere & set(cut):
                    wanted[dim] = cut
        return wanted

    def _elsewhere(self, shape: Sequence[int], now: list[Axes], free: list[Axes]) -> list[Axes]:
        """The moved axes on another dimension, or on none if no other has room for them."""
        sizes = self.grid.shape
        moved = tuple(a for axes in now for a in axes if a in self.context.axes)
        count = math.prod(sizes[a] for a in moved)
        for dim, size in enumerate(shape):
            if not now[dim] and size % count == 0:
                return [moved if i == dim else a for i, a in enumerate(free)]
        return free

    def _written(
        self, source: ShardingSource, mine: list[list[ShardingSource]], wanted: list[Axes]
    ) -> str:
        """The source of a value, so that the value is dealt out as wanted."""
        dims = axes_of(source.sharding, len(source.shape))
        for dim, each in enumerate(mine):
            for s in each:
                if (s.path, s.line) == (source.path, source.line):
                    dims[s.dim] = wanted[dim]
        used: set[str] = set()
        for dim, axes in enumerate(dims):
            dims[dim] = tuple(a for a in axes if a not in used)
            used |= set(axes)
        spec = spec_of(dims)
        if source.path:
            return f"give in_shardings {spec} for {source.path}"
        file, line = source.line or ("", 0)
        return f"constrain the value at {Path(file).name}:{line} to {spec}"

    def _by_argument(self, path: str) -> str:
        """An argument that is dealt out otherwise from the start."""
        shardings = self.context.shardings
        for (name, sharding), aval in zip(
            shardings.arguments, shardings.jaxpr.in_avals, strict=False
        ):
            if name == path and isinstance(sharding, NamedSharding):
                now = axes_of(sharding, len(aval.shape))
                free = [tuple(a for a in axes if a not in self.context.axes) for axes in now]
                spec = self._elsewhere(aval.shape, now, free)
                if spec != now:
                    return f"give in_shardings {spec_of(spec)} for {path}"
        return ""

    def _where(self) -> str:
        """Where to constrain, if not to what."""
        collective, along = self.context.collective, " and ".join(sorted(self.context.axes))
        maker = self._place(collective.frames) or self._place(self.context.maker_frames)
        user = self._place(collective.needed_by_frames)
        if maker and user and maker != user:
            return (
                f"the value of {maker} lies otherwise than {user} wants it along {along}: "
                "constrain both to one spec"
            )
        if maker or user:
            return (
                f"constrain the operands and the result of {maker or user} to specs that "
                f"cut the same dimensions by {along}"
            )
        return (
            f"constrain what is computed along {along}: the compiler doesn't say which line it is"
        )

    def _place(self, frames: Sequence[Frame]) -> str:
        """The user's line of a stack: `model.py:57`."""
        line = self.sources.line(frames)
        return "" if line is None else f"{Path(line.file).name}:{line.line}"


def _cut(sources: Sequence[ShardingSource]) -> Axes:
    """The axes that cut a dimension, by the first of its sources that is cut."""
    return next((s.axes for s in sources if s.axes), ())
