"""Which operation of the user's program a value of the compiled module belongs to.

XLA adds values that no line of the program asks for: the state of a loop, copies, pieces of
transfers. They go by the nearest operation that JAX has named.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from xlashard.program.calls import BRANCHES, Run, runs_of
from xlashard.program.hlo import Computation, HloText, Instruction
from xlashard.tpu.preflight.buffers import ShapeIndex

_FLOW = frozenset({"while", "conditional", "call", "tuple", "get-tuple-element"})
"""Operations that make no value of their own: the names that JAX gave them say too little."""

_MAKES_ROOM = "AllocateBuffer"

type _Position = tuple[str, ShapeIndex]


@dataclass(frozen=True, eq=False)
class Operations:
    """The operations of a module, for whoever asks whose a value is.

    Attributes:
        module: The compiled module.
    """

    module: HloText

    def instruction(self, name: str) -> Instruction | None:
        """An instruction by its name, which only one has."""
        home = self._homes.get(name)
        return None if home is None else home.instructions[name]

    def owner(self, name: str, index: ShapeIndex = ()) -> Instruction | None:
        """The nearest instruction with a name from JAX: it, else what made it, else what uses it.

        Args:
            name: An instruction that makes a value.
            index: Which part of the value.
        """
        waiting: deque[_Position] = deque([(name, index)])
        seen: set[_Position] = set()
        room: Instruction | None = None
        while waiting:
            position = waiting.popleft()
            found = self.instruction(position[0])
            if position in seen or found is None:
                continue
            seen.add(position)
            if self._is_told(found):
                if found.call_target != _MAKES_ROOM:
                    return found
                # What is put there says more than that there is room for it.
                room = room or found
                continue
            waiting.extend(self._before(found, position[1]))
        return room or self._user(name)

    def _is_told(self, instruction: Instruction) -> bool:
        return instruction.opcode not in _FLOW and bool(self.module.op_name(instruction))

    def _user(self, name: str) -> Instruction | None:
        home = self._homes.get(name)
        users = [] if home is None else home.users.get(name, [])
        return next((user for user in users if self._is_told(user)), None)

    @cached_property
    def _homes(self) -> dict[str, Computation]:
        computations = self.module.computations.values()
        return {name: home for home in computations for name in home.instructions}

    @cached_property
    def _runs(self) -> dict[str, Run]:
        return runs_of(self.module)

    def _before(self, found: Instruction, index: ShapeIndex) -> Iterator[_Position]:
        """Where a value comes from, the likeliest first."""
        operands = found.operand_names
        match found.opcode:
            case "tuple" if index and index[0] < len(operands):
                yield operands[index[0]], index[1:]
            case "get-tuple-element" if operands:
                yield operands[0], (found.element or 0, *index)
            case "while":
                yield from self._roots(found, ("body",), index)
                yield from ((name, index) for name in operands[:1])
            case "parameter":
                yield from self._passed(found, index)
            case _:
                yield from self._roots(found, ("calls", "to_apply"), index)
                yield from self._roots(found, BRANCHES, index)
                yield from self._inside(found)
                # The second part of what starts a transfer, and so on, are its source.
                yield from ((name, ()) for name in operands[:1])

    def _roots(
        self, caller: Instruction, attributes: tuple[str, ...], index: ShapeIndex
    ) -> Iterator[_Position]:
        for attribute, callee in caller.called():
            home = self.module.computations.get(callee)
            if attribute in attributes and home is not None and home.root is not None:
                yield home.root.name, index

    def _inside(self, caller: Instruction) -> Iterator[_Position]:
        """What a fusion does, the last first."""
        for attribute, callee in caller.called():
            home = self.module.computations.get(callee)
            if attribute == "calls" and home is not None:
                found = reversed(home.instructions.values())
                yield from ((i.name, ()) for i in found if i.opcode != "parameter")

    def _passed(self, parameter: Instruction, index: ShapeIndex) -> Iterator[_Position]:
        """What a computation is given: of a loop what its body gives on, else what came first."""
        home = self._homes[parameter.name]
        run = self._runs.get(home.name)
        if run is None or run.caller is None:
            return
        if run.caller.opcode == "while":
            yield from self._roots(run.caller, ("body",), index)
        if operand := run.operand_for(home, parameter):
            yield operand, index
