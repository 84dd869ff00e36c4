"""Attribution of each collective to the constraint, argument or operation that causes it.

Its cause is searched in the dataflow, with a sharding that removes the collective.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from typing import Any

from xlashard._jax.trace.jaxprs import without_equations
from xlashard._jax.trace.origins import Line, Scope, is_variable, source_line
from xlashard._jax.trace.primitive_names import COLLECTIVES, CONSTRAINT, PRODUCTS, SCATTERS
from xlashard.analysis.explain.closed_dimensions import (
    DimensionSource,
    constraint_of,
    find_sources,
    list_axes,
)
from xlashard.analysis.explain.descriptions import describe_collective
from xlashard.analysis.explain.model import CollectiveReport, Origin
from xlashard.analysis.programs.program import Compilation, find_fed_back
from xlashard.analysis.programs.source_lines import SourceLocator
from xlashard.core.sharding import Mesh, NamedSharding, Sharding
from xlashard.core.sharding.named import grid_of
from xlashard.geometry import MeshGrid
from xlashard.geometry.groups import SourceTargetPairs
from xlashard.hlo.call_graph import makers
from xlashard.hlo.collectives import Collective, add_up
from xlashard.hlo.module import Computation, Frame, Instruction
from xlashard.predict.costs.network_model import NetworkCost
from xlashard.predict.preflight.attribution.hlo_dataflow import HloDataflow
from xlashard.predict.preflight.report.preflight_model import Suggestion
from xlashard.predict.preflight.time_estimate import network_costs
from xlashard.predict.targets.base_topology import BaseTopology

# An axis moved to another dimension of the table or of the indices has a collective as before.
_LOOKUPS = SCATTERS | {"gather"}
# JAX broadcasts the indices of a lookup.
_UNSHARDING = PRODUCTS | _LOOKUPS | {"broadcast_in_dim"}


type Axes = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ConstraintChange:
    """A constraint that differs from the sharding of the value's source.

    Attributes:
        lines: Its line, and the lines of the operations between.
        arguments: Arguments that the value depends on.
        moved: Mesh axes that shard another dimension, or none, under the constraint.
        closed: Mesh axes that shard no dimension under the constraint.
        used: All mesh axes of the constraint.
    """

    lines: frozenset[Line]
    arguments: frozenset[str]
    moved: frozenset[str]
    closed: frozenset[str]
    used: frozenset[str]


@dataclass(frozen=True, eq=False)
class ValueShardings:
    """Shardings of the values of a jaxpr.

    Attributes:
        jaxpr: Closed jaxpr of the program.
        arguments: Path and sharding of each argument; None for an unspecified sharding.
        mesh: The mesh.
    """

    jaxpr: Any
    arguments: Sequence[tuple[str, Sharding | None]]
    mesh: Mesh

    @cached_property
    def _top(self) -> Scope:
        return Scope.of(self.jaxpr)

    @cached_property
    def _arguments(self) -> Mapping[Any, tuple[str, Sharding | None]]:
        return dict(zip(self.jaxpr.invars, self.arguments, strict=False))

    @cached_property
    def equations(self) -> Mapping[Line, list[tuple[Scope, Any]]]:
        """Equations by source line, with their scopes."""
        equations: dict[Line, list[tuple[Scope, Any]]] = {}
        for scope in self._top.all():
            for eqn in scope.jaxpr.eqns:
                line = source_line(eqn)
                if line is not None:
                    equations.setdefault(line, []).append((scope, eqn))
        return equations

    @cached_property
    def constraints(self) -> tuple[tuple[Scope, Any, NamedSharding], ...]:
        """Constraints on the axes of the mesh."""
        return tuple(
            (scope, eqn, sharding)
            for scope in self._top.all()
            for eqn in scope.jaxpr.eqns
            if (sharding := self._constraint_sharding(eqn)) is not None
        )

    @cached_property
    def changes(self) -> tuple[ConstraintChange, ...]:
        """Constraints that differ from arguments and other constraints."""
        changes = []
        for scope, eqn, sharding in self.constraints:
            value = eqn.invars[0]
            own = list_axes(sharding, value.aval.ndim)
            by_dim = self.sources(scope, value)
            sources = [s for each in by_dim for s in each]
            moved = {
                axis
                for dim, each in enumerate(by_dim)
                for source in each
                for axis in source.axes
                if axis not in own[dim]
            }
            if moved:
                line = source_line(eqn)
                lines = frozenset().union(*(s.lines for s in sources))
                paths = frozenset(s.path for s in sources if s.path)
                if line is not None:
                    lines |= {line}
                used = frozenset(axis for axes in own for axis in axes)
                changes.append(
                    ConstraintChange(lines, paths, frozenset(moved), frozenset(moved - used), used)
                )
        return tuple(changes)

    def sources(self, scope: Scope, value: Any) -> list[list[DimensionSource]]:
        """Return the sharding sources of each dimension of a value.

        Args:
            scope: Scope of the value.
            value: Variable of its jaxpr.
        """
        return [
            [
                source
                for source in find_sources(scope, value, dim, self._arguments, self.mesh)
                if source.sharding.mesh == self.mesh
            ]
            for dim in range(len(getattr(value.aval, "shape", ())))
        ]

    def _constraint_sharding(self, eqn: Any) -> NamedSharding | None:
        sharding = constraint_of(eqn, self.mesh)
        return sharding if sharding is not None and sharding.mesh == self.mesh else None


def local_shape(
    shape: Sequence[int], sharding: NamedSharding, without: frozenset[str]
) -> tuple[int, ...]:
    """Return the shape of a shard, ignoring some axes."""
    sizes = sharding.mesh.shape
    cut = list_axes(sharding, len(shape))
    return tuple(
        size // max(math.prod(sizes[a] for a in axes if a not in without), 1)
        for size, axes in zip(shape, cut, strict=True)
    )


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


def fits(dims: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether an array has a shape, up to transposition and merged neighbouring dimensions.

    Args:
        dims: Shape of the array.
        shape: Shape to compare with.

    Example:
        >>> fits((512, 1024), (1024, 4, 128)), fits((2, 1024), (1024, 4))
        (True, False)
    """
    sizes = sorted(d for d in dims if d > 1)
    parts = [d for d in shape if d > 1]
    if sizes == sorted(parts):
        return bool(sizes) or math.prod(shape) == math.prod(dims) == 1
    if len(sizes) >= len(parts) or len(parts) > 5 or not sizes:
        return False
    return any(_merges(turned, tuple(sizes)) for turned in set(permutations(parts)))


def _merges(shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Return whether neighbours of a shape multiply to the sizes, in some order."""
    if not shape:
        return not sizes
    product = 1
    for count, size in enumerate(shape, 1):
        product *= size
        if product in sizes:
            left = list(sizes)
            left.remove(product)
            if _merges(shape[count:], tuple(left)):
                return True
    return False


@dataclass(frozen=True, eq=False)
class Attributor:
    """Causes of the collectives of a program.

    Attributes:
        dataflow: Dataflow of the compiled module.
        shardings: Shardings of the values of the jaxpr.
        grid: The mesh.
        sources: Filter for lines of user code.
        results: Per result, whether the caller specified its sharding.
        collectives: All collectives of the program.
    """

    dataflow: HloDataflow
    shardings: ValueShardings
    grid: MeshGrid
    sources: SourceLocator
    results: tuple[bool, ...]
    collectives: tuple[Collective, ...]

    def attribute(self, collective: Collective) -> tuple[Origin, Suggestion | None]:
        """Return the cause of a collective, and a sharding that may remove it if not required."""
        if operation_of(collective.op_name) in COLLECTIVES:
            return "explicit", None
        finder = CauseFinder(collective, self.dataflow, self.shardings, self.grid, self.sources)
        before = self._reduction_before(finder)
        if before is not None:
            return self.attribute(before)
        if self._is_repeated(collective):
            return "rematerialization", None
        if finder.reduces:
            return "gradient" if self._is_gradient(finder) else "reduction", None
        if self._is_constrained(finder):
            return "constraint", None
        if finder.arguments and finder.gathers:
            return "argument", None
        result = self.dataflow.results.get(collective.name)
        if result is not None and self.results[result : result + 1] == (True,):
            return "result", None
        return "resharding", finder.suggestion()

    def _reduction_before(self, finder: CauseFinder) -> Collective | None:
        """Return the reduce-scatter that feeds a collective, if any.

        A reduction over several slices is a reduce-scatter within each slice, an all-reduce between
        slices, and an all-gather.
        """
        if finder.collective.kind == "reduce-scatter" or not finder.instruction.operands:
            return None
        name = self.dataflow.producing_collective(finder.home, finder.instruction.operands[0])
        before = self._by_name.get(name)
        is_scatter = before is not None and before.kind == "reduce-scatter"
        return before if is_scatter else None

    def _is_repeated(self, collective: Collective) -> bool:
        """Return whether rematerialization repeats a collective of the forward pass.

        The compiler may have merged it with others there.
        """
        return collective.is_rematerialized and _moved(collective) <= self._moved_once

    @cached_property
    def _moved_once(self) -> frozenset[tuple[str, str, tuple[int, ...]]]:
        """Values that collectives move which rematerialization doesn't repeat."""
        others = (each for each in self.collectives if not each.is_rematerialized)
        return frozenset().union(*map(_moved, others))

    @cached_property
    def _by_name(self) -> dict[str, Collective]:
        return {collective.name: collective for collective in self.collectives}

    def _is_gradient(self, finder: CauseFinder) -> bool:
        """Return whether a collective sums an argument's gradient over data-parallel devices."""
        collective = finder.collective
        op_name = collective.op_name
        if not op_name and finder.producer is not None:
            op_name = finder.producer.op_name
        if "transpose(" not in op_name:
            return False
        # A ring permutes parts of the result.
        is_ring = collective.traits.traffic == "pairs"
        without: frozenset[str] = frozenset() if is_ring else finder.axes
        shapes = {array.dims for array in collective.operands}
        return any(fits(dims, local) for local in self._argument_shapes(without) for dims in shapes)

    def _argument_shapes(self, without: frozenset[str]) -> Iterator[tuple[int, ...]]:
        """Yield the local shapes of arguments, and of single layers in stacked arguments."""
        for shape, sharding in self._placed:
            local = local_shape(shape, sharding, without)
            yield local
            if len(local) > 1:
                yield local[1:]

    @cached_property
    def _placed(self) -> frozenset[tuple[tuple[int, ...], NamedSharding]]:
        avals = self.shardings.jaxpr.in_avals
        return frozenset(
            (tuple(aval.shape), sharding)
            for aval, (_, sharding) in zip(avals, self.shardings.arguments, strict=False)
            if isinstance(sharding, NamedSharding)
            and aval.shape
            # Dtypes of keys have no kind.
            and getattr(aval.dtype, "kind", "u") not in "biu"
        )

    def _is_constrained(self, finder: CauseFinder) -> bool:
        """Return whether a sharding constraint requires the collective."""
        collective = finder.collective
        # A gradient moves back what a constraint has moved.
        if "transpose(" in collective.op_name and operation_of(collective.op_name) == CONSTRAINT:
            return True
        lines = {*lines_of(collective.frames), *lines_of(collective.needed_by_frames)}
        own = set(lines_of(collective.frames))
        for change in self.shardings.changes:
            reach = change.closed if finder.gathers else change.moved | change.used
            if not finder.axes <= reach or not finder.axes & change.moved:
                continue
            if own & change.lines or (not own and lines & change.lines):
                return True
            if finder.argument in change.arguments and finder.argument:
                return True
        # A product needs a constrained value whole: the constraint shards it on purpose.
        return (
            finder.gathers
            and not finder.argument
            and operation_of(collective.needed_by or collective.op_name) in PRODUCTS
            and not self._could_add_up(finder)
            and any(
                finder.axes
                <= {a for dim in list_axes(sharding, eqn.invars[0].aval.ndim) for a in dim}
                for eqn, sharding in self._constraints_of(finder)
            )
        )

    def _could_add_up(self, finder: CauseFinder) -> bool:
        """Return whether a product contracts a dimension that both operands shard alike.

        Only partial sums need to be sent then, and no constraint requires more.
        """
        for scope, eqn in finder.equations:
            if eqn.primitive.name != "dot_general":
                continue
            contracted = eqn.params["dimension_numbers"][0]
            cut = [
                {a for dim in dims for s in self.shardings.sources(scope, v)[dim] for a in s.axes}
                for v, dims in zip(eqn.invars, contracted, strict=True)
            ]
            if all(finder.axes <= axes for axes in cut):
                return True
        return False

    def _constraints_of(self, finder: CauseFinder) -> Iterator[tuple[Any, NamedSharding]]:
        """Yield the constraints on the value of a collective."""
        lines = {s.line for each in self._values(finder) for dim in each for s in dim if s.line}
        for _, eqn, sharding in self.shardings.constraints:
            if source_line(eqn) in lines:
                yield eqn, sharding

    def _values(self, finder: CauseFinder) -> Iterator[list[list[DimensionSource]]]:
        """Yield the sharding sources of the values that a collective may move."""
        for scope, eqn in finder.equations:
            for value in (*eqn.invars, *eqn.outvars):
                if is_variable(value):
                    yield self.shardings.sources(scope, value)


def _moved(collective: Collective) -> frozenset[tuple[str, str, tuple[int, ...]]]:
    """Return the kind of a collective with the types of its results, without dimensions of 1."""
    return frozenset(
        (collective.kind, each.dtype, tuple(size for size in each.dims if size > 1))
        for each in collective.results
    )


def describe_traffic(
    compilation: Compilation,
    topology: BaseTopology,
    mesh: Mesh,
    costs: Sequence[tuple[Collective, NetworkCost]] | None = None,
) -> tuple[tuple[CollectiveReport, ...], dict[str, Suggestion]]:
    """Return the collectives of a program with cause and price, longest time first.

    Args:
        compilation: The program, compiled or rejected for its memory.
        topology: Topology of the program.
        mesh: Mesh of the program.
        costs: Collectives with their network costs; None to compute them.

    Returns:
        The collectives, and their suggestions by text.
    """
    grid, sources = grid_of(mesh), compilation.sources
    costs = network_costs(compilation, topology, mesh) if costs is None else costs
    attributor = _make_attributor(compilation, mesh, tuple(collective for collective, _ in costs))
    causes = [attributor.attribute(collective) for collective, _ in costs]
    summed = [c for (c, _), (origin, _) in zip(costs, causes, strict=True) if origin == "gradient"]
    batched = frozenset(axis for c in summed for axis in c.axis_names(grid) or ())
    returned = _returned_paths(compilation)
    suggestions: dict[str, Suggestion] = {}
    alike: dict[CollectiveReport, list[tuple[Collective, NetworkCost]]] = {}
    for (collective, cost), (origin, suggestion) in zip(costs, causes, strict=True):
        row = describe_collective(collective, grid, compilation.argument_names, sources)
        row = replace(row, origin=origin)
        if suggestion is not None and suggestion.path in returned:
            suggestion = replace(suggestion, returned=True)
        if suggestion is not None and (suggestion.returned or not _moves(suggestion, batched)):
            suggestions[suggestion.text] = suggestion
            row = replace(row, suggestion=suggestion.text)
        alike.setdefault(row, []).append((collective, cost))
    rows = [_price(row, costs) for row, costs in alike.items()]
    return tuple(sorted(rows, key=lambda row: (-row.seconds, -row.sent_bytes))), suggestions


def _make_attributor(
    compilation: Compilation, mesh: Mesh, collectives: tuple[Collective, ...]
) -> Attributor:
    placed = tuple((value.path, value.lowered_sharding) for value in compilation.arguments)
    # A stage without its trace has arguments, and no equations.
    avals = [value.aval for value in compilation.arguments]
    jaxpr = compilation.jaxpr or without_equations(avals)
    return Attributor(
        HloDataflow(compilation.module),
        ValueShardings(jaxpr, placed, mesh),
        grid_of(mesh),
        compilation.sources,
        tuple(value.sharding is not None for value in compilation.plan.results),
        collectives,
    )


def _returned_paths(compilation: Compilation) -> set[str]:
    """Return the paths of arguments that results of requested shardings replace in later calls."""
    program = compilation.program
    pairs = find_fed_back(program) if program.jaxpr is not None else ()
    requested = [value.requested is not None for value in program.results]
    return {program.arguments[into].path for into, result in pairs if requested[result]}


def _moves(suggestion: Suggestion, axes: frozenset[str]) -> bool:
    """Return True if a suggestion moves one of some axes from its dimension to another."""
    dims = zip(suggestion.before, suggestion.after, strict=True)
    return any(axes & set(before) - set(after) for before, after in dims)


def _price(
    row: CollectiveReport, costs: Sequence[tuple[Collective, NetworkCost]]
) -> CollectiveReport:
    dcn_bytes = sum(c.times * cost.dcn_bytes for c, cost in costs)
    ici_bytes = sum(c.times * cost.sent_bytes for c, cost in costs)
    return replace(
        row,
        **add_up([collective for collective, _ in costs]),
        network="dcn" if dcn_bytes > ici_bytes else "ici",
        seconds=sum(c.times * (cost.seconds + cost.dcn_seconds) for c, cost in costs),
    )
