"""Context of a collective: its computation, axes, argument and equations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xlashard._jax.trace.dataflow import Line, Scope
from xlashard.geometry import MeshGrid
from xlashard.geometry.groups import SourceTargetPairs
from xlashard.program.hlo.collectives import Collective
from xlashard.program.hlo.module import Computation, Frame, Instruction
from xlashard.tpu.preflight.attribution.hlo_dataflow import HloDataflow
from xlashard.tpu.preflight.attribution.value_shardings import ValueShardings

PRODUCTS = ("dot_general", "conv_general_dilated")
"""Primitives that contract dimensions."""


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
                found = [
                    (scope, eqn)
                    for scope, eqn in self.shardings.equations.get(line, ())
                    if eqn.primitive.name == operation
                ]
                if found:
                    return found
        return []

    @cached_property
    def producer(self) -> Instruction | None:
        """Nearest producer of its operand that has source lines."""
        return self.dataflow.nearest_named_producer(self.home, self.instruction)

    @cached_property
    def producer_frames(self) -> tuple[Frame, ...]:
        """Stack frames of the producer, innermost first."""
        return () if self.producer is None else tuple(self.dataflow.module.frames(self.producer))

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
        names = instruction.operand_names
        # The second operand of a send is a token.
        names = names[:1] if instruction.opcode == "send" else names
        found = {dataflow.argument(home, name) for name in names}
        argument = found.pop() if len(found) == 1 else ""
    windowed = next(filter(None, map(dataflow.windowed, dataflow.sites(home))), "")
    moves = collective.kind == "collective-permute"
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
        reduces=collective.kind in ("all-reduce", "reduce-scatter")
        or (moves and windowed == "scatter"),
        gathers=collective.kind in ("all-gather", "collective-broadcast")
        or (moves and windowed == "gather"),
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
