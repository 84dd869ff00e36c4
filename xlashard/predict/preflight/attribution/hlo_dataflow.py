"""Dataflow of an HLO module: producers of values, and the user's operations that own them."""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from xlashard.hlo.buffers import BufferValue, ShapeIndex
from xlashard.hlo.call_graph import makers
from xlashard.hlo.collective_kinds import KINDS
from xlashard.hlo.hlo_program import HloProgram
from xlashard.hlo.module import Computation, Instruction

_MOVES = frozenset(
    (
        *("bitcast", "convert", "copy", "dynamic-slice"),
        *("opt-barrier", "pad", "reshape", "slice", "transpose", "async-update"),
    )
)
_JOINS = "ConcatBitcast"


@dataclass(frozen=True, eq=False)
class HloDataflow:
    """Dataflow of an HLO module.

    Attributes:
        module: The compiled module.
    """

    module: HloProgram

    def argument(self, computation: Computation, name: str) -> str:
        """Return the path of the argument that a value is, or a slice of; empty if it is computed.

        Args:
            computation: Computation of the value.
            name: Instruction that produces the value.
        """
        origin = self._origin_before_permutes(computation, name)
        if origin is None:
            return ""
        home, instruction = origin
        is_argument = home.name == self.module.entry and instruction.opcode == "parameter"
        return instruction.op_name if is_argument else ""

    def producing_collective(self, computation: Computation, name: str) -> str:
        """Return the name of the collective that produces a value; empty if another operation does.

        Asynchronous collectives have the name of their start.
        """
        origin = self._origin(computation, name, ())
        if origin is None or origin[1].opcode.removesuffix("-done") not in KINDS:
            return ""
        done = origin[1].opcode.endswith("-done")
        return origin[1].operands[0] if done else origin[1].name

    @cached_property
    def results(self) -> dict[str, int]:
        """Result position by name of the collective that produces the result."""
        entry = self.module.computations.get(self.module.entry)
        if entry is None or entry.root is None:
            return {}
        names = entry.root.operands if entry.root.opcode == "tuple" else [entry.root.name]
        numbers = {}
        for number, name in enumerate(names):
            if collective := self.producing_collective(entry, name):
                numbers[collective] = number
        return numbers

    def arguments(self, computation: Computation, instruction: Instruction) -> frozenset[str]:
        """Return the paths of all arguments that a value of the entry depends on."""
        values = (instruction, *makers(computation, instruction))
        parameters = (value.name for value in values if value.opcode == "parameter")
        return frozenset(self.argument(computation, name) for name in parameters)

    def _origin_before_permutes(
        self, computation: Computation, name: str
    ) -> tuple[Computation, Instruction] | None:
        """Return the producer of a value; a permuted value is still the same value."""
        origin = self._origin(computation, name, ())
        while origin is not None and origin[1].opcode.startswith("collective-permute"):
            origin = self._origin(origin[0], origin[1].operands[0], ())
        return origin

    def _origin(
        self, computation: Computation, name: str, path: tuple[int, ...]
    ) -> tuple[Computation, Instruction] | None:
        """Return the producer of a value, or of an element of a tuple."""
        for _ in range(1000):  # nested loops end at the entry
            instruction = computation.instructions.get(name)
            if instruction is None:
                return None
            step = self._step(computation, instruction, path)
            if step is None:
                return computation, instruction
            computation, name, path = step
        return None

    def _step(
        self, computation: Computation, instruction: Instruction, path: tuple[int, ...]
    ) -> tuple[Computation, str, tuple[int, ...]] | None:
        opcode, names = instruction.opcode, instruction.operands
        if opcode == "get-tuple-element":
            index = instruction.attributes.tuple_index
            return None if index is None else (computation, names[0], (index, *path))
        if opcode == "tuple":
            return (computation, names[path[0]], path[1:]) if path else None
        base = opcode.removesuffix("-start").removesuffix("-done")
        if base in _MOVES and names:
            # A start returns the result, the operand and a context.
            return computation, names[0], () if opcode.endswith("-start") else path
        if opcode == "custom-call" and instruction.attributes.call_target == _JOINS and names:
            # Concatenated slices of one value.
            return computation, names[0], ()
        # XLA for GPUs runs fusions beside other work: `fusion-start`.
        if opcode in ("async-done", "fusion-done") and names:
            return computation, names[0], path
        if base in ("async", "fusion"):
            inner = self.module.callee(instruction)
            return None if inner is None or inner.root is None else (inner, inner.root.name, path)
        if opcode == "recv-done" and names:
            return self._sent(computation, names[0])
        if opcode == "parameter":
            return self._outside(computation, instruction, path)
        if opcode == "while" and path and self._carried(instruction, path[0]) == path[0]:
            return computation, names[0], path
        return None

    def _sent(
        self, computation: Computation, received: str
    ) -> tuple[Computation, str, tuple[int, ...]] | None:
        """Return the value sent to other slices that corresponds to a received one."""
        recv = computation.instructions.get(received)
        send = None if recv is None else computation.partner(recv)
        return None if send is None else (computation, send.operands[0], ())

    def _outside(
        self, computation: Computation, parameter: Instruction, path: tuple[int, ...]
    ) -> tuple[Computation, str, tuple[int, ...]] | None:
        """Return the value that the caller passes for a parameter."""
        run = self.module.call_sites.get(computation.name)
        if run is None or run.caller is None:
            return None
        site, caller = self.module.computations[run.site], run.caller
        if caller.opcode == "while":
            before = self._carried(caller, path[0]) if path else None
            # A prefetched element is a slice of a loop-invariant one.
            if before is None or self._carried(caller, before) != before:
                return None
            return site, caller.operands[0], (before, *path[1:])
        operand = run.operand_for(computation, parameter)
        return (site, operand, path) if operand else None

    def _carried(self, loop: Instruction, index: int) -> int | None:
        """Return the loop state element that an element becomes, or a slice of it.

        An element that only moves around the devices becomes itself. None for a computed element.
        """
        body = self.module.callee(loop)
        if body is None or body.root is None or body.root.opcode != "tuple":
            return None
        names = body.root.operands
        if index >= len(names):
            return None
        home, name, path = body, names[index], ()
        for _ in range(200):
            instruction = home.instructions.get(name)
            if instruction is None:
                return None
            if instruction.opcode == "parameter" and home is body:
                return path[0] if path else None
            if instruction.opcode.startswith("collective-permute"):
                name, path = instruction.operands[0], ()
                continue
            step = self._step(home, instruction, path)
            if step is None:
                return None
            home, name, path = step
        return None

    def windowed(self, computation: Computation) -> str:
        """Return `gather` or `scatter` for the loop of a windowed product, else an empty string.

        TPU's compiler splits a product with a gathered operand or a scattered result into steps,
        and sends the data of the next step while it multiplies.
        """
        match = re.search(r"windowed_dot_general_body_(ag|rs)", computation.name)
        return {"ag": "gather", "rs": "scatter"}[match[1]] if match else ""

    def unrolled(self, computation: Computation, step: Instruction) -> str:
        """Return the kind of windowed product that an unrolled loop step belongs to.

        A scattered result circulates as partial sums that the product produces, starting from
        zeros; a gathered operand was produced before.

        Args:
            computation: Computation of the step.
            step: Collective-permute of a product around a ring.
        """
        step_origin = step.op_name, step.frames
        origin = self._origin_before_permutes(computation, step.operands[0])
        if origin is None:
            return ""
        producer = origin[1]
        by_itself = (producer.op_name, producer.frames) == step_origin
        return "scatter" if by_itself else "gather"

    def sites(self, computation: Computation) -> Iterator[Computation]:
        """Yield a computation and its callers, from the inside out."""
        current: Computation | None = computation
        while current is not None:
            yield current
            run = self.module.call_sites.get(current.name)
            outside = None if run is None or run.caller is None else run.site
            current = None if outside is None else self.module.computations.get(outside)


_FLOW = frozenset({"while", "conditional", "call", "tuple", "get-tuple-element"})
"""Operations without a value of their own; their op names carry little information."""


_MAKES_ROOM = "AllocateBuffer"


type _Position = tuple[str, ShapeIndex]


@dataclass(frozen=True, eq=False)
class ValueOwners:
    """Operations of the user's program that HLO values belong to.

    XLA adds values without an operation in the user's program, such as loop state and copies. They
    are attributed to the nearest operation with an op name.

    Attributes:
        module: The compiled module.
    """

    module: HloProgram

    def instruction(self, name: str) -> Instruction | None:
        """Return an instruction by its unique name."""
        home = self._homes.get(name)
        return None if home is None else home.instructions[name]

    def is_phi(self, value: BufferValue) -> bool:
        """Return whether a value is a phi: the state of a loop, or the result of branches."""
        home = self._homes.get(value.name)
        instruction = None if home is None else home.instructions[value.name]
        if home is None or instruction is None or instruction.opcode in ("while", "conditional"):
            return instruction is not None
        return instruction.opcode == "parameter" and home.name != self.module.entry

    def owner(self, name: str, index: ShapeIndex = ()) -> Instruction | None:
        """Return the nearest instruction with an op name: itself, a producer, or a consumer.

        Args:
            name: Instruction that produces the value.
            index: Shape index of the value.
        """
        waiting: deque[_Position] = deque([(name, index)])
        seen: set[_Position] = set()
        room: Instruction | None = None
        while waiting:
            position = waiting.popleft()
            instruction = self.instruction(position[0])
            if position in seen or instruction is None:
                continue
            seen.add(position)
            if self._has_op_name(instruction):
                if instruction.attributes.call_target != _MAKES_ROOM:
                    return instruction
                # Values written to the buffer identify the operation better.
                room = room or instruction
                continue
            waiting.extend(self._before(instruction, position[1]))
        return room or self._user(name)

    def _has_op_name(self, instruction: Instruction) -> bool:
        return instruction.opcode not in _FLOW and bool(instruction.op_name)

    def _user(self, name: str) -> Instruction | None:
        home = self._homes.get(name)
        users = [] if home is None else home.users.get(name, [])
        return next((user for user in users if self._has_op_name(user)), None)

    @cached_property
    def _homes(self) -> dict[str, Computation]:
        computations = self.module.computations.values()
        return {name: home for home in computations for name in home.instructions}

    def _before(self, instruction: Instruction, index: ShapeIndex) -> Iterator[_Position]:
        """Yield the values that a value comes from, most likely first."""
        operands = instruction.operands
        match instruction.opcode:
            case "tuple" if index and index[0] < len(operands):
                yield operands[index[0]], index[1:]
            case "get-tuple-element" if operands:
                yield operands[0], (instruction.attributes.tuple_index or 0, *index)
            case "while":
                yield from self._roots(instruction.calls[:1], index)
                yield from ((name, index) for name in operands[:1])
            case "parameter":
                yield from self._passed(instruction, index)
            case _:
                yield from self._roots(instruction.calls, index)
                yield from self._inside(instruction)
                # Other elements, such as the second element of a start, are the source.
                yield from ((name, ()) for name in operands[:1])

    def _roots(self, callees: Sequence[str], index: ShapeIndex) -> Iterator[_Position]:
        for callee in callees:
            home = self.module.computations.get(callee)
            if home is not None and home.root is not None:
                yield home.root.name, index

    def _inside(self, caller: Instruction) -> Iterator[_Position]:
        """Yield the instructions of a fusion or of an asynchronous computation, last first."""
        if caller.opcode not in ("fusion", "async-start"):
            return
        for callee in caller.calls:
            home = self.module.computations.get(callee)
            if home is not None:
                instructions = reversed(home.instructions.values())
                yield from ((i.name, ()) for i in instructions if i.opcode != "parameter")

    def _passed(self, parameter: Instruction, index: ShapeIndex) -> Iterator[_Position]:
        """Yield the values passed for a parameter: loop body results first, then initial values."""
        home = self._homes[parameter.name]
        run = self.module.call_sites.get(home.name)
        if run is None or run.caller is None:
            return
        if run.caller.opcode == "while":
            yield from self._roots(run.caller.calls[:1], index)
        if operand := run.operand_for(home, parameter):
            yield operand, index
