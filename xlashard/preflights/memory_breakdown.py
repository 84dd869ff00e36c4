"""Breakdown of a device's memory: arguments, results, temporaries, constants and code.

The compiler rejects a program at two points: after buffer assignment, when no code exists yet, and
after code generation, if the code exceeds the remaining memory. The total includes both. A program
rejected for its code counts the least code size that exceeds the remaining memory.

XLA adds values without an operation in the user's program, such as loop state and copies. They are
attributed to the nearest operation with an op name.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

from xlashard.gpu.topologies import GpuTopology
from xlashard.hardware.base_topology import BaseTopology
from xlashard.hlo.buffers import (
    Allocation,
    BufferValue,
    PeakBuffer,
    ShapeIndex,
)
from xlashard.hlo.hlo_program import HloProgram
from xlashard.hlo.module import Computation, HloModule, Instruction
from xlashard.hlo.shapes import HBM, HOST
from xlashard.pjit.report.communication import SourceLocator
from xlashard.pjit.report.model import ValueReport
from xlashard.pjit.report.program_values import ExplainedProgram, describe_inputs, describe_outputs
from xlashard.preflights.compilation import Compilation
from xlashard.preflights.report.preflight_model import (
    BufferReport,
    MemoryBreakdown,
    TemporaryReport,
)
from xlashard.preflights.runtime_memory import available_bytes, runtime_memory

_FLOW = frozenset({"while", "conditional", "call", "tuple", "get-tuple-element"})
"""Operations without a value of their own; their op names carry little information."""


_MAKES_ROOM = "AllocateBuffer"


type _Position = tuple[str, ShapeIndex]


@dataclass(frozen=True, eq=False)
class ValueOwners:
    """Maps HLO values to operations of the user's program.

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
        made = None if home is None else home.instructions[value.name]
        if home is None or made is None or made.opcode in ("while", "conditional"):
            return made is not None
        return made.opcode == "parameter" and home.name != self.module.entry

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
            found = self.instruction(position[0])
            if position in seen or found is None:
                continue
            seen.add(position)
            if self._has_op_name(found):
                if found.attributes.call_target != _MAKES_ROOM:
                    return found
                # Values written to the buffer identify the operation better.
                room = room or found
                continue
            waiting.extend(self._before(found, position[1]))
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

    def _before(self, found: Instruction, index: ShapeIndex) -> Iterator[_Position]:
        """Yield the values that a value comes from, most likely first."""
        operands = found.operands
        match found.opcode:
            case "tuple" if index and index[0] < len(operands):
                yield operands[index[0]], index[1:]
            case "get-tuple-element" if operands:
                yield operands[0], (found.attributes.tuple_index or 0, *index)
            case "while":
                yield from self._roots(found.calls[:1], index)
                yield from ((name, index) for name in operands[:1])
            case "parameter":
                yield from self._passed(found, index)
            case _:
                yield from self._roots(found.calls, index)
                yield from self._inside(found)
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
                found = reversed(home.instructions.values())
                yield from ((i.name, ()) for i in found if i.opcode != "parameter")

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


def describe_temporaries(module: HloProgram, sources: SourceLocator) -> tuple[TemporaryReport, ...]:
    """Return the temporaries that are live at the heap's peak, grouped, largest first.

    Args:
        module: The compiled module, with its buffer assignment.
        sources: Filter for lines of user code.

    Returns:
        Temporaries whose sum never exceeds the heap. Gaps between buffers, and the pointer tables
        of tuples, are not included.
    """
    operations = ValueOwners(module)
    alike: dict[TemporaryReport, list[TemporaryReport]] = {}
    for held in module.buffers_at_peak():
        if held.is_table:
            continue
        report = _describe(held, operations, sources)
        alike.setdefault(replace(report, name="", device_bytes=0), []).append(report)
    together = [
        replace(found[0], device_bytes=sum(r.device_bytes for r in found), count=len(found))
        for found in alike.values()
    ]
    return tuple(sorted(together, key=lambda r: -r.device_bytes))


def _describe(held: PeakBuffer, operations: ValueOwners, sources: SourceLocator) -> TemporaryReport:
    value = min(held.values, key=lambda v: _name_preference(v, operations))
    owner = operations.owner(value.name, value.index)
    return TemporaryReport(
        name=owner.name if operations.is_phi(value) and owner is not None else value.name,
        type=str(value.shape),
        device_bytes=held.nbytes,
        op_name="" if owner is None else owner.op_name,
        source=None if owner is None else sources.line(owner.frames),
    )


def _name_preference(value: BufferValue, operations: ValueOwners) -> tuple[bool, bool]:
    """Return a sort key that prefers values with an op name."""
    made = operations.instruction(value.name)
    return operations.is_phi(value), made is None or not made.op_name


def io_buffers(
    program: ExplainedProgram, module: HloModule
) -> tuple[tuple[BufferReport, ...], tuple[BufferReport, ...]]:
    """Return the buffers of the arguments, and those of the results, largest first.

    Args:
        program: The program.
        module: Its compiled module, with its buffer assignment.
    """
    tokens, donated = program.facts.tokens, program.info.donated
    # The parameter that each aliasing result shares its buffer with.
    aliases = {result - tokens: position for result, position in program.facts.aliases.items()}
    inputs, outputs = _parameter_numbers(program), describe_outputs(program)
    takers = {argument: outputs[result].path for result, argument in aliases.items()}
    by_parameter = _by_parameter(module.allocations)
    arguments = [
        _held(
            report,
            by_parameter.get(position),
            aliased=takers.get(position, ""),
            donated=place < len(donated) and donated[place],
        )
        for place, (report, position) in enumerate(inputs)
        if position is not None
    ]
    paths = {position: report.path for report, position in inputs}
    places = _result_allocations(module)
    results = [
        _held(
            report,
            places[tokens + i] if tokens + i < len(places) else None,
            aliased=paths.get(aliases.get(i), ""),
        )
        for i, report in enumerate(outputs)
    ]
    return _largest_first(arguments), _largest_first(results)


def _parameter_numbers(program: ExplainedProgram) -> list[tuple[ValueReport, int | None]]:
    """Return arguments, then closed-over constants, with parameter numbers; None if pruned."""
    facts = program.facts
    reports = describe_inputs(program)
    arguments = len(reports) - facts.closed_over
    positions = count(facts.tokens + facts.closed_over)
    taken: list[tuple[ValueReport, int | None]] = [
        (report, next(positions) if kept else None)
        for report, kept in zip(reports[:arguments], facts.kept, strict=True)
    ]
    closed = ((r, i) for i, r in enumerate(reports[arguments:], facts.tokens))
    return [*taken, *closed]


def _by_parameter(allocations: Sequence[Allocation]) -> dict[int, Allocation]:
    parameters = [(a.parameter, a) for a in allocations if a.parameter is not None]
    if any(a.index for _, a in parameters):
        # Tupled arguments: the allocation of the tuple itself is a table of addresses.
        return {a.index[0]: a for _, a in parameters if len(a.index) == 1}
    return dict(parameters)


def _result_allocations(module: HloModule) -> list[Allocation | None]:
    entry = module.computations.get(module.entry)
    root = None if entry is None else entry.root
    if entry is None or root is None:
        return []
    holding = {
        (value.name, value.index): allocation
        for allocation in module.allocations
        if allocation.holds_result
        for value in allocation.values
    }
    names = root.operands if root.opcode == "tuple" else [root.name]
    return [_find(entry, name, holding) for name in names]


def _find(
    entry: Computation, name: str, holding: Mapping[tuple[str, ShapeIndex], Allocation]
) -> Allocation | None:
    """Return the allocation of a result, past instructions that pass it on."""
    index: ShapeIndex = ()
    while (instruction := entry.instructions.get(name)) is not None:
        if (found := holding.get((name, index))) is not None:
            return found
        operands = instruction.operands
        if not operands:
            return None
        if instruction.opcode == "tuple":
            if not index or index[0] >= len(operands):
                return None
            name, index = operands[index[0]], index[1:]
            continue
        if instruction.opcode == "get-tuple-element":
            index = (instruction.attributes.tuple_index or 0, *index)
        elif instruction.opcode.endswith("-done"):
            index = next((i for i in ((0,), (1,)) if (operands[0], i) in holding), index)
        name = operands[0]
    return None


def _held(
    report: ValueReport, allocation: Allocation | None, *, aliased: str, donated: bool = False
) -> BufferReport:
    here = allocation is None or allocation.memory == HBM
    padded = report.device_bytes if allocation is None else allocation.size
    return BufferReport(
        path=report.path,
        type=report.type,
        spec=report.spec,
        device_bytes=padded if here else 0,
        copies=report.copies,
        aliased=aliased,
        donated=donated,
    )


def _largest_first(held: Sequence[BufferReport]) -> tuple[BufferReport, ...]:
    return tuple(sorted(held, key=lambda h: -h.device_bytes))


def device_allocations(module: HloModule, topology: BaseTopology | None) -> list[Allocation]:
    """Return the allocations in the memory of a device.

    Args:
        module: The compiled module.
        topology: Topology of the program; None for devices without one.
    """
    if isinstance(topology, GpuTopology):
        # GPUs keep buffers of collectives and of temporaries in memory spaces of their own, and
        # those of threads in registers.
        return [a for a in module.allocations if a.memory != HOST and not a.thread_local]
    return [a for a in module.allocations if a.memory == HBM]


def describe_memory(compilation: Compilation, topology: BaseTopology) -> MemoryBreakdown:
    """Return the memory breakdown of a program on one device.

    Args:
        compilation: The program, compiled or rejected for its memory.
        topology: Topology of the program.
    """
    program, module = compilation.program, compilation.module
    arguments, results = io_buffers(program, module)
    is_gpu = isinstance(topology, GpuTopology)
    in_hbm = device_allocations(module, topology)
    parameters = [a for a in in_hbm if a.parameter is not None]
    others = [a for a in in_hbm if a.parameter is None]
    argument_bytes = _bytes(parameters)
    result_bytes = _bytes(a for a in others if a.holds_result)
    temporary_bytes = _bytes(a for a in others if a.is_temporary)
    constant_bytes = _bytes(a for a in others if a.constant and not a.holds_result)
    runtime = runtime_memory(module) if is_gpu else ()
    left = topology.chip.device_hbm_bytes - sum(kept.device_bytes for kept in runtime)
    available = min(available_bytes(topology.chip), left)
    alias_bytes = _bytes(a for a in parameters if a.holds_result)
    if not module.allocations and compilation.compiled is not None:
        # An executable has sums alone.
        stats = compilation.compiled.memory_analysis()
        argument_bytes, alias_bytes = stats.argument_size_in_bytes, stats.alias_size_in_bytes
        result_bytes = stats.output_size_in_bytes - alias_bytes
        temporary_bytes = stats.temp_size_in_bytes
    planned = argument_bytes + result_bytes + temporary_bytes + constant_bytes
    code = _code_bytes(compilation, available - planned)
    total = planned + code
    return MemoryBreakdown(
        available_bytes=available,
        total_bytes=total if compilation.too_large or is_gpu else min(total, available),
        argument_bytes=argument_bytes,
        result_bytes=result_bytes,
        alias_bytes=alias_bytes,
        temporary_bytes=temporary_bytes,
        constant_bytes=constant_bytes,
        code_bytes=code,
        arguments=arguments,
        results=results,
        temporaries=describe_temporaries(module, program.sources),
        host_bytes=_bytes(a for a in module.allocations if a.memory == HOST),
        runtime=runtime,
    )


def _bytes(allocations: Iterable[Allocation]) -> int:
    return sum(allocation.size for allocation in allocations)


def _code_bytes(compilation: Compilation, left: int) -> int:
    """Return the code size, 0 if unknown; for a program rejected for its code, the least size."""
    if compilation.compiled is not None:
        return compilation.compiled.memory_analysis().generated_code_size_in_bytes
    return left + 1 if compilation.too_large and left >= 0 else 0
