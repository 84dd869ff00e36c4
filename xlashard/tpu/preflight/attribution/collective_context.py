"""What is found out about a collective whose reason is looked for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xlashard._jax.dataflow import Line, Scope
from xlashard.geometry import MeshGrid
from xlashard.geometry.groups import DevicePairs
from xlashard.program.collectives import Collective
from xlashard.program.hlo import Computation, Frame, Instruction
from xlashard.tpu.preflight.attribution.hlo_dataflow import HloDataflow
from xlashard.tpu.preflight.attribution.value_shardings import ValueShardings

PRODUCTS = ("dot_general", "conv_general_dilated")
"""The primitives that multiply and add up."""


@dataclass(frozen=True, eq=False)
class CollectiveContext:
    """A collective, and what is found out about it.

    Attributes:
        dataflow: The ways of values through the compiled module.
        shardings: What the program says of its values.
        collective: The collective.
        home: The computation that it stands in.
        instruction: Its instruction.
        axes: The mesh axes along which it runs.
        argument: The path of the argument that it deals with as it came, or of a slice of it.
        reduces: Whether it adds up what devices have.
        gathers: Whether every device gets what all have.
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
        """The equations of the operation that it belongs to, else that needs it."""
        collective = self.collective
        told = [
            (collective.op_name, collective.frames),
            (collective.needed_by, collective.needed_by_frames),
        ]
        if self.gathers:
            # A gather is there for whoever wants the whole.
            told.reverse()
        for op_name, frames in told:
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
    def maker(self) -> Instruction | None:
        """The nearest instruction of known lines from which its value is made."""
        return self.dataflow.nearest_named_producer(self.home, self.instruction)

    @cached_property
    def maker_frames(self) -> tuple[Frame, ...]:
        """The lines of that instruction, the innermost first; none where there is none."""
        return () if self.maker is None else tuple(self.dataflow.module.frames(self.maker))

    @cached_property
    def made_from(self) -> frozenset[str]:
        """The paths of all arguments that its value is made from."""
        return self.dataflow.arguments(self.home, self.instruction)


def collective_context(
    collective: Collective, dataflow: HloDataflow, shardings: ValueShardings, grid: MeshGrid
) -> CollectiveContext:
    """Finds out about a collective.

    Args:
        collective: One of a program's.
        dataflow: The ways of values through its compiled module.
        shardings: What the program says of its values.
        grid: Its mesh.
    """
    home = dataflow.module.computations[collective.computation]
    instruction = home.instructions[collective.name]
    axes = frozenset(part.name for part in collective.axes(grid) or ())
    named = {path for path, _ in shardings.arguments}
    argument = collective.op_name if collective.op_name in named else ""
    if not argument:
        names = instruction.operand_names
        # What a send takes besides is a token.
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
    """Whether a product's devices pass something on, each to the next along some axes."""
    if not isinstance(collective.groups, DevicePairs):
        return False
    size = math.prod(part.size for part in collective.axes(grid) or ())
    return (
        collective.groups.ring_size == size > 1
        and operation_of(collective.op_name) == "dot_general"
    )


def operation_of(op_name: str) -> str:
    """The primitive of an operation that JAX called `f/jvp()/while/body/dot_general`."""
    return op_name.rpartition("/")[2]


def lines_of(frames: Sequence[Frame]) -> list[Line]:
    """The lines of a stack, in its order."""
    return [(frame.file, frame.line) for frame in frames]
