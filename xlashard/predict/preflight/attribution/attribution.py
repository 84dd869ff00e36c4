"""Attribution of each collective to the constraint, argument or operation that causes it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from typing import Any

from xlashard._jax.trace.jaxprs import without_equations
from xlashard._jax.trace.origins import is_variable, source_line
from xlashard._jax.trace.primitive_names import COLLECTIVES, CONSTRAINT, PRODUCTS
from xlashard.analysis.explain.closed_dimensions import DimensionSource, list_axes
from xlashard.analysis.explain.descriptions import describe_collective
from xlashard.analysis.explain.model import CollectiveReport, Origin
from xlashard.analysis.programs.program import Compilation, find_fed_back
from xlashard.analysis.programs.source_lines import SourceLocator
from xlashard.core.sharding import Mesh, NamedSharding
from xlashard.core.sharding.named import grid_of
from xlashard.geometry import MeshGrid
from xlashard.hlo.collectives import Collective, add_up
from xlashard.predict.costs.network_model import NetworkCost
from xlashard.predict.preflight.attribution.cause_finder import (
    CauseFinder,
    lines_of,
    operation_of,
)
from xlashard.predict.preflight.attribution.hlo_dataflow import HloDataflow
from xlashard.predict.preflight.attribution.value_shardings import ValueShardings, local_shape
from xlashard.predict.preflight.report.preflight_model import Suggestion
from xlashard.predict.preflight.time_estimate import network_costs
from xlashard.predict.targets.base_topology import BaseTopology


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
    compilation: Compilation, topology: BaseTopology, mesh: Mesh
) -> tuple[tuple[CollectiveReport, ...], dict[str, Suggestion]]:
    """Return the collectives of a program with cause and price, longest time first.

    Args:
        compilation: The program, compiled or rejected for its memory.
        topology: Topology of the program.
        mesh: Mesh of the program.

    Returns:
        The collectives, and their suggestions by text.
    """
    grid, sources = grid_of(mesh), compilation.sources
    costs = network_costs(compilation, topology, mesh)
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
