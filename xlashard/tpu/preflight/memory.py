"""What a program takes of a device's memory, by what it is for.

The compiler refuses a program twice. Once values have their places, if these take all the memory
that it may use; then there is no code yet. And once there is code, if that doesn't fit in what is
left. So the sum here is that of both, and a program that was refused for its code takes at least
as much for it as there was not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from xlashard.program.hlo import read_hlo
from xlashard.tpu.preflight.buffers import HBM, HOST, Allocation, read_buffers
from xlashard.tpu.preflight.compilation import Compilation
from xlashard.tpu.preflight.holdings import Holdings
from xlashard.tpu.preflight.liveness import describe_temporaries, read_live_ranges
from xlashard.tpu.preflight.parts import MemoryBreakdown
from xlashard.tpu.preflight.values import program_of
from xlashard.tpu.topologies import Topology


def describe_memory(compilation: Compilation, topology: Topology) -> MemoryBreakdown:
    """Says what a program takes of one device's memory.

    Args:
        compilation: The program, which need not have been finished.
        topology: What it was compiled for.
    """
    program, dump = program_of(compilation), compilation.dump
    module = next(iter(read_hlo(dump.hlo)))
    allocations = read_buffers(dump.buffers)
    ranges = read_live_ranges(dump.live_ranges)
    held = Holdings(program, module, allocations)
    sums = _sums(allocations)
    available = topology.generation.available_bytes
    planned = sums.arguments + sums.results + sums.temporaries + sums.constants
    code = _code_bytes(compilation, available - planned)
    total = planned + code
    return MemoryBreakdown(
        available_bytes=available,
        total_bytes=total if compilation.compiled is None else min(total, available),
        argument_bytes=sums.arguments,
        result_bytes=sums.results,
        alias_bytes=sums.aliased,
        temporary_bytes=sums.temporaries,
        constant_bytes=sums.constants,
        code_bytes=code,
        arguments=held.arguments,
        results=held.results,
        temporaries=describe_temporaries(allocations, ranges, module, program.sources),
        host_bytes=sum(a.size for a in allocations if a.memory == HOST),
    )


@dataclass(frozen=True)
class _Sums:
    arguments: int
    results: int
    aliased: int
    temporaries: int
    constants: int


def _sums(allocations: Sequence[Allocation]) -> _Sums:
    here = [a for a in allocations if a.memory == HBM]
    arguments = [a for a in here if a.parameter is not None]
    others = [a for a in here if a.parameter is None]
    return _Sums(
        arguments=sum(a.size for a in arguments),
        results=sum(a.size for a in others if a.holds_result),
        aliased=sum(a.size for a in arguments if a.holds_result),
        temporaries=sum(a.size for a in others if a.is_temporary),
        constants=sum(a.size for a in others if a.constant and not a.holds_result),
    )


def _code_bytes(compilation: Compilation, left: int) -> int:
    """Bytes of the program itself; of one that was refused for them the least that they can be."""
    if compilation.compiled is not None:
        return compilation.compiled.memory_analysis().generated_code_size_in_bytes
    return left + 1 if left >= 0 else 0
