"""Search for the cause of a collective, and for a sharding that removes it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xlashard._jax.trace.origins import Line, Scope, is_variable, source_line
from xlashard._jax.trace.primitive_names import PRODUCTS, SCATTERS
from xlashard.analysis.explain.closed_dimensions import DimensionSource, list_axes
from xlashard.analysis.programs.source_lines import SourceLocator
from xlashard.core.sharding import NamedSharding
from xlashard.geometry import MeshGrid
from xlashard.geometry.groups import SourceTargetPairs
from xlashard.hlo.call_graph import makers
from xlashard.hlo.collectives import Collective
from xlashard.hlo.module import Computation, Frame, Instruction
from xlashard.predict.preflight.attribution.hlo_dataflow import HloDataflow
from xlashard.predict.preflight.attribution.value_shardings import Axes, ValueShardings
from xlashard.predict.preflight.report.preflight_model import Suggestion

# An axis moved to another dimension of the table or of the indices has a collective as before.
_LOOKUPS = SCATTERS | {"gather"}
# JAX broadcasts the indices of a lookup.
_UNSHARDING = PRODUCTS | _LOOKUPS | {"broadcast_in_dim"}


@dataclass(frozen=True, eq=False)
class CauseFinder:
    """Search for the cause of a collective in the HLO module and in the jaxpr.

    Attributes:
        collective: The collective.
        dataflow: Dataflow of the compiled module.
        shardings: Shardings of the values of the jaxpr.
        grid: The mesh.
        sources: Filter for lines of user code.
    """

    collective: Collective
    dataflow: HloDataflow
    shardings: ValueShardings
    grid: MeshGrid
    sources: SourceLocator

    @cached_property
    def home(self) -> Computation:
        """Computation that contains it."""
        return self.dataflow.module.computations[self.collective.computation]

    @cached_property
    def instruction(self) -> Instruction:
        """Its HLO instruction."""
        return self.home.instructions[self.collective.name]

    @cached_property
    def axes(self) -> frozenset[str]:
        """Mesh axes of its replica groups."""
        return frozenset(self.collective.axis_names(self.grid) or ())

    @cached_property
    def argument(self) -> str:
        """Path of the argument that it moves, whole or sliced; empty for another value."""
        return next(iter(self.arguments)) if len(self.arguments) == 1 else ""

    @cached_property
    def arguments(self) -> frozenset[str]:
        """Paths of the arguments that it moves, merged or not; empty if it moves others too."""
        named = {path for path, _ in self.shardings.arguments}
        if self.collective.op_name in named:
            return frozenset([self.collective.op_name])
        names = self.instruction.operands
        # The second operand of a send is a token.
        names = names[:1] if self.instruction.opcode == "send" else names
        paths = frozenset(self.dataflow.argument(self.home, name) for name in names)
        return paths if paths <= named else frozenset()

    @property
    def reduces(self) -> bool:
        """Return whether it reduces values over devices."""
        return self.collective.traits.reduces or self._windowed == "scatter"

    @property
    def gathers(self) -> bool:
        """Return whether it gathers values from all devices."""
        return self.collective.traits.gathers or self._windowed == "gather"

    @cached_property
    def _windowed(self) -> str:
        """Kind of the ring of permutes that it is a step of, or empty."""
        if self.collective.traits.traffic != "pairs":
            return ""
        kinds = map(self.dataflow.windowed, self.dataflow.sites(self.home))
        windowed = next(filter(None, kinds), "")
        if not windowed and _is_of_ring(self.collective, self.grid):
            return self.dataflow.unrolled(self.home, self.instruction)
        return windowed

    @cached_property
    def equations(self) -> list[tuple[Scope, Any]]:
        """Equations of the operation that it belongs to, else of its consumer."""
        collective = self.collective
        operations = [
            (collective.op_name, collective.frames),
            (collective.needed_by, collective.needed_by_frames),
        ]
        if self.gathers:
            # The consumer requires an all-gather.
            operations.reverse()
        for op_name, frames in operations:
            operation = operation_of(op_name)
            for line in lines_of(frames):
                equations = [
                    (scope, eqn)
                    for scope, eqn in self.shardings.equations.get(line, ())
                    if eqn.primitive.name == operation
                ]
                if equations:
                    return equations
        return []

    @cached_property
    def producer(self) -> Instruction | None:
        """Nearest producer of its operand that has source lines."""
        return next((i for i in makers(self.home, self.instruction) if i.frames), None)

    @cached_property
    def producer_frames(self) -> tuple[Frame, ...]:
        """Stack frames of the producer, innermost first."""
        return () if self.producer is None else self.producer.frames

    def suggestion(self) -> Suggestion | None:
        """Return a sharding that may remove the collective, with shards that are no larger.

        A parameter or a batch is sharded for a reason, such as the memory.
        """
        suggestion = self._by_equations() or self._by_argument(self.argument)
        if suggestion is None and not self.collective.frames:
            paths = self.dataflow.arguments(self.home, self.instruction)
            suggestion = self._by_argument(min(paths)) if len(paths) == 1 else None
        return suggestion

    def _by_equations(self) -> Suggestion | None:
        """Suggest sharding the source of the value as the operation requires."""
        for scope, eqn in self.equations:
            # With the indices sharded otherwise, the devices still hold other parts of the table.
            is_lookup = eqn.primitive.name in _LOOKUPS
            operands = eqn.invars[:1] if is_lookup else eqn.invars
            values = [v for v in operands if is_variable(v) and v.aval.shape]
            values.sort(key=lambda v: not self._is_made_there(scope, v))
            sources = [self.shardings.sources(scope, v) for v in values]
            for index, own_sources in enumerate(sources):
                others = [s for i, s in enumerate(sources) if i != index]
                moved = [s for dim in own_sources for s in dim if self.axes & set(s.axes)]
                # Of a moved argument, the sources are its own.
                is_meant = not self.argument or any(s.path == self.argument for s in moved)
                if not moved or not is_meant:
                    continue
                value = values[index]
                choices = [self._required_axes(eqn, value, own_sources, others)]
                if not is_lookup:
                    now = [_cut(dim) for dim in own_sources]
                    choices.append(self._elsewhere(value.aval.shape, now, self._free(now)))
                suggested = (self._suggest(moved[0], own_sources, axes) for axes in choices)
                if suggestion := next(filter(None, suggested), None):
                    return suggestion
        return None

    def _free(self, now: list[Axes]) -> list[Axes]:
        """Return the axes of each dimension without those of the collective."""
        return [tuple(a for a in axes if a not in self.axes) for axes in now]

    def _is_made_there(self, scope: Scope, value: Any) -> bool:
        """Return whether a value is produced at the line of the collective's operand."""
        maker = scope.makers.get(value) if is_variable(value) else None
        line = None if maker is None else source_line(maker[1])
        return line is not None and line in lines_of(self.producer_frames)

    def _required_axes(
        self,
        eqn: Any,
        value: Any,
        own_sources: list[list[DimensionSource]],
        others: list[list[list[DimensionSource]]],
    ) -> list[Axes]:
        """Return the axes that an operation requires on each dimension of a value."""
        now = [_cut(dim) for dim in own_sources]
        shape = value.aval.shape
        name = eqn.primitive.name
        free = self._free(now)
        if name == "dot_general":
            return self._for_product(eqn, value, now, free, others)
        if shape == getattr(eqn.outvars[0].aval, "shape", None):
            for other in others:
                other_axes = [_cut(dim) for dim in other]
                if len(other_axes) == len(now) and any(other_axes) and other_axes != now:
                    return other_axes
        return free if name in _UNSHARDING else self._elsewhere(shape, now, free)

    def _for_product(
        self,
        eqn: Any,
        value: Any,
        now: list[Axes],
        free: list[Axes],
        others: list[list[list[DimensionSource]]],
    ) -> list[Axes]:
        """Return the axes of the other operand for contracted and batch dimensions."""
        own_dims, other_dims = zip(*eqn.params["dimension_numbers"], strict=True)
        if value is not eqn.invars[0]:
            own_dims, other_dims = other_dims, own_dims
        required = list(free)
        for other in others:
            for dim, other_dim in zip(sum(own_dims, ()), sum(other_dims, ()), strict=True):
                cut = _cut(other[other_dim])
                elsewhere = {a for i, axes in enumerate(free) if i != dim for a in axes}
                if now[dim] != free[dim] and cut and not elsewhere & set(cut):
                    required[dim] = cut
        return required

    def _elsewhere(self, shape: Sequence[int], now: list[Axes], free: list[Axes]) -> list[Axes]:
        """Return the axes with the moved ones on another dimension, or dropped if none fits."""
        sizes = self.grid.shape
        moved = tuple(a for axes in now for a in axes if a in self.axes)
        count = math.prod(sizes[a] for a in moved)
        for dim, size in enumerate(shape):
            if not now[dim] and size % count == 0:
                return [moved if i == dim else a for i, a in enumerate(free)]
        return free

    def _suggest(
        self,
        source: DimensionSource,
        own_sources: list[list[DimensionSource]],
        required: list[Axes],
    ) -> Suggestion | None:
        """Return the suggestion that gives the source of a value the required sharding."""
        before = list_axes(source.sharding, len(source.shape))
        dims = list(before)
        for dim, each in enumerate(own_sources):
            for s in each:
                if (s.path, s.line) == (source.path, source.line):
                    dims[s.dim] = required[dim]
        used: set[str] = set()
        for dim, axes in enumerate(dims):
            dims[dim] = tuple(a for a in axes if a not in used)
            used |= set(axes)
        if not source.path and source.line is None:
            return None
        return self._check(Suggestion(source.path, source.line, source.shape, (*before,), (*dims,)))

    def _by_argument(self, path: str) -> Suggestion | None:
        """Suggest another sharding for an argument."""
        shardings = self.shardings
        if any(eqn.primitive.name in _LOOKUPS for _, eqn in self.equations):
            return None
        for (name, sharding), aval in zip(
            shardings.arguments, shardings.jaxpr.in_avals, strict=False
        ):
            if name == path and isinstance(sharding, NamedSharding):
                now = list_axes(sharding, len(aval.shape))
                dims = self._elsewhere(aval.shape, now, self._free(now))
                return self._check(Suggestion(path, None, tuple(aval.shape), (*now,), (*dims,)))
        return None

    def _check(self, suggestion: Suggestion) -> Suggestion | None:
        """Return a suggestion; None if it changes nothing, or makes the shards larger."""
        parts = [
            math.prod(self.grid.shape[axis] for axes in dims for axis in axes)
            for dims in (suggestion.before, suggestion.after)
        ]
        is_change = suggestion.before != suggestion.after
        return suggestion if is_change and parts[0] <= parts[1] else None


def _is_of_ring(collective: Collective, grid: MeshGrid) -> bool:
    """Return whether a permute passes operands of a product around a ring."""
    if not isinstance(collective.groups, SourceTargetPairs):
        return False
    size = math.prod(part.size for part in collective.axes(grid) or ())
    return (
        collective.groups.ring_size == size > 1
        and operation_of(collective.op_name) == "dot_general"
    )


def operation_of(op_name: str) -> str:
    """Return the primitive of an op name: `f/jvp()/while/body/dot_general`."""
    return op_name.rpartition("/")[2]


def lines_of(frames: Sequence[Frame]) -> list[Line]:
    """Return the lines of a stack, in order."""
    return [(frame.file, frame.line) for frame in frames]


def _cut(sources: Sequence[DimensionSource]) -> Axes:
    """Return the axes of the first sharded source of a dimension."""
    return next((s.axes for s in sources if s.axes), ())
