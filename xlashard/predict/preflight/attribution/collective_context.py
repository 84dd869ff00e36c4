"""Context of a collective, and a suggestion that removes it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from xlashard._jax.trace.origins import Line, Scope, is_variable, source_line
from xlashard._jax.trace.primitive_names import PRODUCTS
from xlashard.analysis.explain.source_lines import SourceLocator
from xlashard.core.sharding import NamedSharding
from xlashard.geometry import MeshGrid
from xlashard.geometry.groups import SourceTargetPairs
from xlashard.hlo.call_graph import makers
from xlashard.hlo.collectives import Collective
from xlashard.hlo.module import Computation, Frame, Instruction
from xlashard.predict.preflight.attribution.hlo_dataflow import HloDataflow
from xlashard.predict.preflight.attribution.value_shardings import (
    Axes,
    DimensionSource,
    ValueShardings,
    axes_of,
    spec_of,
)


@dataclass(frozen=True, eq=False)
class CollectiveContext:
    """A collective with its surroundings in the HLO module and in the jaxpr.

    Attributes:
        dataflow: Dataflow of the compiled module.
        shardings: Shardings of the values of the jaxpr.
        collective: The collective.
        home: Computation that contains it.
        instruction: Its HLO instruction.
        axes: Mesh axes of its replica groups.
        argument: Path of the argument that it moves, whole or sliced.
        reduces: Whether it reduces values over devices.
        gathers: Whether it gathers values from all devices.
    """

    dataflow: HloDataflow
    shardings: ValueShardings
    collective: Collective
    home: Computation
    instruction: Instruction
    axes: frozenset[str]
    argument: str
    reduces: bool
    gathers: bool

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

    @cached_property
    def argument_paths(self) -> frozenset[str]:
        """Paths of all arguments that its operand depends on."""
        return self.dataflow.arguments(self.home, self.instruction)


def collective_context(
    collective: Collective, dataflow: HloDataflow, shardings: ValueShardings, grid: MeshGrid
) -> CollectiveContext:
    """Return the context of a collective.

    Args:
        collective: A collective of the module.
        dataflow: Dataflow of the compiled module.
        shardings: Shardings of the values of the jaxpr.
        grid: The mesh.
    """
    home = dataflow.module.computations[collective.computation]
    instruction = home.instructions[collective.name]
    axes = frozenset(part.name for part in collective.axes(grid) or ())
    named = {path for path, _ in shardings.arguments}
    argument = collective.op_name if collective.op_name in named else ""
    if not argument:
        names = instruction.operands
        # The second operand of a send is a token.
        names = names[:1] if instruction.opcode == "send" else names
        arguments = {dataflow.argument(home, name) for name in names}
        argument = arguments.pop() if len(arguments) == 1 else ""
    windowed = next(filter(None, map(dataflow.windowed, dataflow.sites(home))), "")
    moves = collective.traits.traffic == "pairs"
    if moves and not windowed and _is_of_ring(collective, grid):
        windowed = dataflow.unrolled(home, instruction)
    return CollectiveContext(
        dataflow,
        shardings,
        collective,
        home,
        instruction,
        axes,
        argument if argument in named else "",
        reduces=collective.traits.reduces or (moves and windowed == "scatter"),
        gathers=collective.traits.gathers or (moves and windowed == "gather"),
    )


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


@dataclass(frozen=True, eq=False)
class SuggestionFinder:
    """Search for a code change that removes a collective.

    Attributes:
        context: The collective in its context.
        grid: The mesh.
        sources: Filter for lines of user code.
    """

    context: CollectiveContext
    grid: MeshGrid
    sources: SourceLocator

    def text(self) -> str:
        """Return the suggestion, or at least the lines to look at."""
        suggestion = self._by_equations() or self._by_argument(self.context.argument)
        if not suggestion and not self.context.collective.frames:
            argument_paths = self.context.argument_paths
            suggestion = self._by_argument(min(argument_paths)) if len(argument_paths) == 1 else ""
        return suggestion or self._where()

    def _by_equations(self) -> str:
        """Suggest sharding the source of the value as the operation requires."""
        for scope, eqn in self.context.equations:
            values = [v for v in eqn.invars if is_variable(v) and v.aval.shape]
            values.sort(key=lambda v: not self._is_made_there(scope, v))
            sources = [self.context.shardings.sources(scope, v) for v in values]
            for index, own_sources in enumerate(sources):
                others = [s for i, s in enumerate(sources) if i != index]
                moved = [s for dim in own_sources for s in dim if self.context.axes & set(s.axes)]
                if not moved or not self._is_meant(moved):
                    continue
                required = self._required_axes(eqn, values[index], own_sources, others)
                return self._suggest(moved[0], own_sources, required)
        return ""

    def _is_meant(self, moved: Sequence[DimensionSource]) -> bool:
        """Return whether the sources belong to the moved argument, if there is one."""
        return not self.context.argument or any(s.path == self.context.argument for s in moved)

    def _is_made_there(self, scope: Scope, value: Any) -> bool:
        """Return whether a value is produced at the line of the collective's operand."""
        maker = scope.makers.get(value) if is_variable(value) else None
        line = None if maker is None else source_line(maker[1])
        return line is not None and line in lines_of(self.context.producer_frames)

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
        free = [tuple(a for a in axes if a not in self.context.axes) for axes in now]
        if name == "dot_general":
            return self._for_product(eqn, value, now, free, others)
        if shape == getattr(eqn.outvars[0].aval, "shape", None):
            for other in others:
                other_axes = [_cut(dim) for dim in other]
                if len(other_axes) == len(now) and any(other_axes) and other_axes != now:
                    return other_axes
        return free if name in PRODUCTS else self._elsewhere(shape, now, free)

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
        moved = tuple(a for axes in now for a in axes if a in self.context.axes)
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
    ) -> str:
        """Return the suggestion that gives the source of a value the required sharding."""
        dims = axes_of(source.sharding, len(source.shape))
        for dim, each in enumerate(own_sources):
            for s in each:
                if (s.path, s.line) == (source.path, source.line):
                    dims[s.dim] = required[dim]
        used: set[str] = set()
        for dim, axes in enumerate(dims):
            dims[dim] = tuple(a for a in axes if a not in used)
            used |= set(axes)
        spec = spec_of(dims)
        if source.path:
            return f"pass in_shardings {spec} for {source.path}"
        file, line = source.line or ("", 0)
        return f"constrain the value at {Path(file).name}:{line} to {spec}"

    def _by_argument(self, path: str) -> str:
        """Suggest another sharding for an argument."""
        shardings = self.context.shardings
        for (name, sharding), aval in zip(
            shardings.arguments, shardings.jaxpr.in_avals, strict=False
        ):
            if name == path and isinstance(sharding, NamedSharding):
                now = axes_of(sharding, len(aval.shape))
                free = [tuple(a for a in axes if a not in self.context.axes) for axes in now]
                spec = self._elsewhere(aval.shape, now, free)
                if spec != now:
                    return f"pass in_shardings {spec_of(spec)} for {path}"
        return ""

    def _where(self) -> str:
        """Suggest the lines to constrain."""
        collective, along = self.context.collective, " and ".join(sorted(self.context.axes))
        maker = self._place(collective.frames) or self._place(self.context.producer_frames)
        user = self._place(collective.needed_by_frames)
        if maker and user and maker != user:
            return (
                f"{maker} and {user} use different shardings along {along}: constrain both to "
                f"one spec"
            )
        if maker or user:
            return (
                f"constrain the operands and the result of {maker or user} to specs that shard "
                f"the same dimensions over {along}"
            )
        return f"constrain the values computed along {along}: the compiler reports no source line"

    def _place(self, frames: Sequence[Frame]) -> str:
        """Return the user's line of a stack: `model.py:57`."""
        line = self.sources.line(frames)
        return "" if line is None else f"{Path(line.file).name}:{line.line}"


def _cut(sources: Sequence[DimensionSource]) -> Axes:
    """Return the axes of the first sharded source of a dimension."""
    return next((s.axes for s in sources if s.axes), ())
