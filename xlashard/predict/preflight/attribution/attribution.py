"""Attribution of each collective to the constraint, argument or operation that causes it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from typing import Any

from xlashard._jax.trace.jaxprs import without_equations
from xlashard._jax.trace.origins import is_variable, source_line
from xlashard._jax.trace.primitive_names import COLLECTIVES, PRODUCTS
from xlashard.analysis.explain.descriptions import describe_collective
from xlashard.analysis.explain.model import CollectiveReport
from xlashard.analysis.explain.source_lines import SourceLocator
from xlashard.analysis.programs.program import Compilation
from xlashard.core.sharding import Mesh, NamedSharding
from xlashard.core.sharding.named import grid_of
from xlashard.geometry import MeshGrid
from xlashard.hlo.collectives import Collective, add_up
from xlashard.predict.costs.network_model import NetworkCost
from xlashard.predict.preflight.attribution.collective_context import (
    CollectiveContext,
    SuggestionFinder,
    collective_context,
    lines_of,
    operation_of,
)
from xlashard.predict.preflight.attribution.hlo_dataflow import HloDataflow
from xlashard.predict.preflight.attribution.value_shardings import (
    DimensionSource,
    ValueShardings,
    axes_of,
    local_shape,
)
from xlashard.predict.preflight.report.preflight_model import Origin, TrafficReport
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


@dataclass(frozen=True)
class Attribution:
    """Cause of a collective.

    Attributes:
        origin: The kind of cause.
        requested: Whether the program or the caller's shardings require the collective.
        suggestion: Code change that removes the collective, if it is not required.
    """

    origin: Origin
    requested: bool = True
    suggestion: str = ""


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

    def attribute(self, collective: Collective) -> Attribution:
        """Return the cause of a collective."""
        if operation_of(collective.op_name) in COLLECTIVES:
            return Attribution("explicit")
        context = collective_context(collective, self.dataflow, self.shardings, self.grid)
        before = self._reduction_before(context)
        if before is not None:
            return self.attribute(before)
        if context.reduces:
            return Attribution("gradient" if self._is_gradient(context) else "reduction")
        if self._is_constrained(context):
            return Attribution("constraint")
        if context.argument and context.gathers:
            return Attribution("argument")
        result = self.dataflow.results.get(collective.name)
        if result is not None and self.results[result : result + 1] == (True,):
            return Attribution("result")
        return Attribution(
            "resharding", False, SuggestionFinder(context, self.grid, self.sources).text()
        )

    def _reduction_before(self, context: CollectiveContext) -> Collective | None:
        """Return the reduce-scatter that feeds a collective, if any.

        A reduction over several slices is a reduce-scatter within each slice, an all-reduce between
        slices, and an all-gather.
        """
        if context.collective.kind == "reduce-scatter" or not context.instruction.operands:
            return None
        name = self.dataflow.producing_collective(context.home, context.instruction.operands[0])
        before = self._by_name.get(name)
        is_scatter = before is not None and before.kind == "reduce-scatter"
        return before if is_scatter else None

    @cached_property
    def _by_name(self) -> dict[str, Collective]:
        return {collective.name: collective for collective in self.collectives}

    def _is_gradient(self, context: CollectiveContext) -> bool:
        """Return whether a collective sums an argument's gradient over data-parallel devices."""
        collective = context.collective
        op_name = collective.op_name
        if not op_name and context.producer is not None:
            op_name = context.producer.op_name
        if "transpose(" not in op_name:
            return False
        # A ring permutes parts of the result.
        is_ring = collective.traits.traffic == "pairs"
        without: frozenset[str] = frozenset() if is_ring else context.axes
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

    def _is_constrained(self, context: CollectiveContext) -> bool:
        """Return whether a sharding constraint requires the collective."""
        collective = context.collective
        lines = {*lines_of(collective.frames), *lines_of(collective.needed_by_frames)}
        own = set(lines_of(collective.frames))
        for change in self.shardings.changes:
            reach = change.closed if context.gathers else change.moved | change.used
            if not context.axes <= reach or not context.axes & change.moved:
                continue
            if own & change.lines or (not own and lines & change.lines):
                return True
            if context.argument in change.arguments and context.argument:
                return True
        # A product needs a constrained value whole: the constraint shards it on purpose.
        return (
            context.gathers
            and not context.argument
            and operation_of(collective.needed_by or collective.op_name) in PRODUCTS
            and not self._could_add_up(context)
            and any(
                context.axes
                <= {a for dim in axes_of(sharding, eqn.invars[0].aval.ndim) for a in dim}
                for eqn, sharding in self._constraints_of(context)
            )
        )

    def _could_add_up(self, context: CollectiveContext) -> bool:
        """Return whether a product contracts a dimension that both operands shard alike.

        Only partial sums need to be sent then, and no constraint requires more.
        """
        for scope, eqn in context.equations:
            if eqn.primitive.name != "dot_general":
                continue
            contracted = eqn.params["dimension_numbers"][0]
            cut = [
                {a for dim in dims for s in self.shardings.sources(scope, v)[dim] for a in s.axes}
                for v, dims in zip(eqn.invars, contracted, strict=True)
            ]
            if all(context.axes <= axes for axes in cut):
                return True
        return False

    def _constraints_of(self, context: CollectiveContext) -> Iterator[tuple[Any, NamedSharding]]:
        """Yield the constraints on the value of a collective."""
        lines = {s.line for each in self._values(context) for dim in each for s in dim if s.line}
        for _, eqn, sharding in self.shardings.constraints:
            if source_line(eqn) in lines:
                yield eqn, sharding

    def _values(self, context: CollectiveContext) -> Iterator[list[list[DimensionSource]]]:
        """Yield the sharding sources of the values that a collective may move."""
        for scope, eqn in context.equations:
            for value in (*eqn.invars, *eqn.outvars):
                if is_variable(value):
                    yield self.shardings.sources(scope, value)


def describe_traffic(
    compilation: Compilation, topology: BaseTopology, mesh: Mesh
) -> tuple[TrafficReport, ...]:
    """Return the collectives of a program, longest time first.

    Args:
        compilation: The program, compiled or rejected for its memory.
        topology: Topology of the program.
        mesh: Mesh of the program.
    """
    module, grid = compilation.module, grid_of(mesh)
    sources, arguments = compilation.sources, compilation.arguments
    placed = tuple((value.path, value.lowered_sharding) for value in arguments)
    # A stage without its trace has arguments, and no equations.
    jaxpr = compilation.jaxpr or without_equations([value.aval for value in arguments])
    shardings = ValueShardings(jaxpr, placed, mesh)
    specified = tuple(value.sharding is not None for value in compilation.plan.results)
    costs = network_costs(compilation, topology, mesh)
    collectives = tuple(collective for collective, _ in costs)
    attributor = Attributor(HloDataflow(module), shardings, grid, sources, specified, collectives)
    alike: dict[tuple[CollectiveReport, Attribution], list[tuple[Collective, NetworkCost]]] = {}
    for collective, cost in costs:
        why = attributor.attribute(collective)
        described = describe_collective(collective, grid, compilation.argument_names, sources)
        alike.setdefault((described, why), []).append((collective, cost))
    reports = [_report(described, why, costs) for (described, why), costs in alike.items()]
    return tuple(sorted(reports, key=lambda r: (-r.seconds, -r.collective.sent_bytes)))


def _report(
    described: CollectiveReport, why: Attribution, costs: Sequence[tuple[Collective, NetworkCost]]
) -> TrafficReport:
    dcn_bytes = sum(c.times * cost.dcn_bytes for c, cost in costs)
    ici_bytes = sum(c.times * cost.sent_bytes for c, cost in costs)
    return TrafficReport(
        collective=replace(described, **add_up([collective for collective, _ in costs])),
        network="dcn" if dcn_bytes > ici_bytes else "ici",
        seconds=sum(c.times * (cost.seconds + cost.dcn_seconds) for c, cost in costs),
        origin=why.origin,
        requested=why.requested,
        suggestion=why.suggestion,
    )
