"""Where a value of a compiled program comes from, past all that only moves it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from xlashard.program.calls import Run, runs_of
from xlashard.program.collectives import KINDS
from xlashard.program.hlo import Computation, HloText, Instruction
from xlashard.tpu.preflight.cost.network_model import rendezvous_name

_MOVES = frozenset(
    (
        *("bitcast", "convert", "copy", "dynamic-slice"),
        *("opt-barrier", "pad", "reshape", "slice", "transpose", "async-update"),
    )
)
_JOINS = "ConcatBitcast"


@dataclass(frozen=True, eq=False)
class HloDataflow:
    """The ways of values through a module.

    Attributes:
        module: The compiled module.
    """

    module: HloText

    @cached_property
    def runs(self) -> dict[str, Run]:
        """What makes each computation run."""
        return runs_of(self.module)

    def argument(self, computation: Computation, name: str) -> str:
        """The path of the argument that a value is, or a slice of; empty if it is none.

        Args:
            computation: Where the value is made.
            name: The instruction that makes it.
        """
        origin = self._origin(computation, name, ())
        while origin is not None and origin[1].opcode.startswith("collective-permute"):
            # What goes round the devices is still what it was.
            origin = self._origin(origin[0], origin[1].operand_names[0], ())
        if origin is None:
            return ""
        home, instruction = origin
        is_argument = home.name == self.module.entry and instruction.opcode == "parameter"
        return self.module.op_name(instruction) if is_argument else ""

    def producing_collective(self, computation: Computation, name: str) -> str:
        """The name of the collective whose result a value is; empty if it is none's.

        What is asynchronous goes by the name of its start.
        """
        origin = self._origin(computation, name, ())
        if origin is None or origin[1].opcode.removesuffix("-done") not in KINDS:
            return ""
        done = origin[1].opcode.endswith("-done")
        return origin[1].operand_names[0] if done else origin[1].name

    @cached_property
    def results(self) -> dict[str, int]:
        """The collectives whose values the program gives out as they are, by name: as which."""
        entry = self.module.computations.get(self.module.entry)
        if entry is None or entry.root is None:
            return {}
        names = entry.root.operand_names if entry.root.opcode == "tuple" else [entry.root.name]
        found = {}
        for number, name in enumerate(names):
            if collective := self.producing_collective(entry, name):
                found[collective] = number
        return found

    def arguments(self, computation: Computation, instruction: Instruction) -> frozenset[str]:
        """The paths of all arguments that a value of the entry is made from."""
        waiting, seen, found = [instruction.name], set[str](), set[str]()
        while waiting:
            name = waiting.pop()
            made = computation.instructions.get(name)
            if made is None or name in seen:
                continue
            seen.add(name)
            if made.opcode == "parameter":
                found.add(self.argument(computation, name))
            waiting += made.operand_names
        return frozenset(found)

    def nearest_named_producer(
        self, computation: Computation, instruction: Instruction
    ) -> Instruction | None:
        """The nearest instruction of known lines from which a value is made."""
        waiting, seen = [instruction.name], set[str]()
        while waiting:
            name = waiting.pop(0)
            found = computation.instructions.get(name)
            if found is None or name in seen:
                continue
            seen.add(name)
            if found is not instruction and self.module.frames(found):
                return found
            waiting += found.operand_names
        return None

    def _origin(
        self, computation: Computation, name: str, path: tuple[int, ...]
    ) -> tuple[Computation, Instruction] | None:
        """The instruction that a value, or an element of a tuple, comes from."""
        for _ in range(1000):  # loops in loops end at the entry; the text may be anything
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
        opcode, names = instruction.opcode, instruction.operand_names
        if opcode == "get-tuple-element":
            index = instruction.element
            return None if index is None else (computation, names[0], (index, *path))
        if opcode == "tuple":
            return (computation, names[path[0]], path[1:]) if path else None
        base = opcode.removesuffix("-start").removesuffix("-done")
        if base in _MOVES and names:
            # A start gives the result, the operand and a context.
            return computation, names[0], () if opcode.endswith("-start") else path
        if opcode == "custom-call" and instruction.call_target == _JOINS and names:
            # Slices that were fetched one by one.
            return computation, names[0], ()
        if opcode in ("async-start", "async-done"):
            return self._asynchronous(computation, instruction, path)
        if opcode == "fusion":
            return self._into(instruction, path)
        if opcode == "recv-done" and names:
            return self._sent(computation, names[0])
        if opcode == "parameter":
            return self._outside(computation, instruction, path)
        if opcode == "while" and path and self._carried(instruction, path[0]) == path[0]:
            return computation, names[0], path
        return None

    def _asynchronous(
        self, computation: Computation, instruction: Instruction, path: tuple[int, ...]
    ) -> tuple[Computation, str, tuple[int, ...]] | None:
        names = instruction.operand_names
        if not names:
            return None
        if instruction.opcode == "async-done":
            return computation, names[0], path
        inner = self._called(instruction)
        if inner is None or inner.root is None:
            return None
        return inner, inner.root.name, path

    def _sent(
        self, computation: Computation, received: str
    ) -> tuple[Computation, str, tuple[int, ...]] | None:
        """What was sent to other slices for what comes from them."""
        recv = computation.instructions.get(received)
        if recv is None:
            return None
        for instruction in computation.instructions.values():
            if instruction.opcode == "send" and rendezvous_name(instruction) == rendezvous_name(
                recv
            ):
                return computation, instruction.operand_names[0], ()
        return None

    def _into(
        self, fusion: Instruction, path: tuple[int, ...]
    ) -> tuple[Computation, str, tuple[int, ...]] | None:
        inner = self._called(fusion)
        if inner is None or inner.root is None:
            return None
        return inner, inner.root.name, path

    def _called(self, instruction: Instruction) -> Computation | None:
        called = dict(instruction.called())
        return self.module.computations.get(called.get("calls", ""))

    def _outside(
        self, computation: Computation, parameter: Instruction, path: tuple[int, ...]
    ) -> tuple[Computation, str, tuple[int, ...]] | None:
        """What the caller of a computation gives it."""
        run = self.runs.get(computation.name)
        if run is None or run.caller is None:
            return None
        site, caller = self.module.computations[run.site], run.caller
        if caller.opcode == "while":
            before = self._carried(caller, path[0]) if path else None
            # What is fetched one run ahead is a slice of what all runs have alike.
            if before is None or self._carried(caller, before) != before:
                return None
            return site, caller.operand_names[0], (before, *path[1:])
        operand = run.operand_for(computation, parameter)
        return (site, operand, path) if operand else None

    def _carried(self, loop: Instruction, index: int) -> int | None:
        """The element of a loop's state that an element becomes in each run, or a slice of it.

        An element that only goes round the devices becomes itself. None for one that is computed.
        """
        body = self.module.computations.get(dict(loop.called()).get("body", ""))
        if body is None or body.root is None or body.root.opcode != "tuple":
            return None
        names = body.root.operand_names
        if index >= len(names):
            return None
        home, name, path = body, names[index], ()
        for _ in range(200):
            found = home.instructions.get(name)
            if found is None:
                return None
            if found.opcode == "parameter" and home is body:
                return path[0] if path else None
            if found.opcode.startswith("collective-permute"):
                name, path = found.operand_names[0], ()
                continue
            step = self._step(home, found, path)
            if step is None:
                return None
            home, name, path = step
        return None

    def windowed(self, computation: Computation) -> str:
        """`gather` or `scatter` where a computation is a loop that does one beside a product.

        TPU's compiler cuts a product whose operand is gathered, or whose result is scattered, into
        steps, and sends what the next one needs while it multiplies.
        """
        found = re.search(r"windowed_dot_general_body_(ag|rs)", computation.name)
        return {"ag": "gather", "rs": "scatter"}[found[1]] if found else ""

    def unrolled(self, computation: Computation, step: Instruction) -> str:
        """What `windowed` says of a loop, of a step of one that was unrolled.

        A result that is scattered goes round as sums, which the product makes, from zeros on;
        an operand that is gathered was made before.

        Args:
            computation: Where the step stands.
            step: A collective-permute of a product, by which all devices pass on in a ring.
        """
        told = self.module.op_name(step), self.module.frames(step)
        origin = self._origin(computation, step.operand_names[0], ())
        while origin is not None and origin[1].opcode.startswith("collective-permute"):
            origin = self._origin(origin[0], origin[1].operand_names[0], ())
        if origin is None:
            return ""
        made = origin[1]
        by_itself = (self.module.op_name(made), self.module.frames(made)) == told
        return "scatter" if by_itself else "gather"

    def sites(self, computation: Computation) -> Iterator[Computation]:
        """A computation and those around it, from the inside out."""
        current: Computation | None = computation
        while current is not None:
            yield current
            run = self.runs.get(current.name)
            outside = None if run is None or run.caller is None else run.site
            current = None if outside is None else self.module.computations.get(outside)
