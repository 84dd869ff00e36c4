"""Breakdown of a device's memory: arguments, results, temporaries, constants and code.

The compiler rejects a program at two points: after buffer assignment, when no code exists yet, and
after code generation, if the code exceeds the remaining memory. The total includes both. A program
rejected for its code counts the least code size that exceeds the remaining memory.

Programs may use what the compiler of a TPU makes available, or what JAX's allocator takes of a GPU;
the runtime of GPUs keeps memory beside it.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from xlashard._jax.runtime.executables import compiled_memory
from xlashard.analysis.explain.descriptions import (
    describe_inputs,
    describe_outputs,
    find_aliases,
)
from xlashard.analysis.explain.model import ValueReport
from xlashard.analysis.programs.program import Compilation
from xlashard.analysis.programs.source_lines import SourceLocator
from xlashard.errors import ArgumentError
from xlashard.hlo.buffers import Allocation, BufferValue, PeakBuffer, ShapeIndex
from xlashard.hlo.hlo_program import HloProgram
from xlashard.hlo.module import Computation, HloModule
from xlashard.hlo.shapes import HBM, HOST
from xlashard.predict.preflight.attribution.hlo_dataflow import ValueOwners
from xlashard.predict.preflight.report.preflight_model import (
    MemoryBreakdown,
    RuntimeMemory,
    TemporaryReport,
)
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.predict.targets.chip import Chip
from xlashard.predict.targets.gpu.gpu_models import ALLOCATOR_FRACTION, GpuModel
from xlashard.predict.targets.gpu.topologies import GpuTopology

_CONTEXT_BYTES = 1343 * 2**20
_CONTEXT_SOURCE = (
    "https://huggingface.co/docs/transformers/model_memory_anatomy: 1343 MB after the first array"
)

_CONNECTION_BYTES = 2**22 + 2**19 + 8 * 8 * 120 * 640
_CHANNELS = 24
_NCCL_SOURCE = (
    "https://github.com/NVIDIA/nccl/blob/v2.21.5-1/src/include/device.h: a buffer per protocol "
    "(Simple 4 MiB, LL 0.5 MiB, LL128 4.7 MiB), channel and communicator; 24 channels, as NCCL "
    "reports on 8 GPUs joined by NVLink"
)

_FRACTIONS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")


def describe_temporaries(
    module: HloProgram, sources: SourceLocator, arguments: Mapping[str, str]
) -> tuple[TemporaryReport, ...]:
    """Return the temporaries that are live at the heap's peak, grouped, largest first.

    Args:
        module: The compiled module, with its buffer assignment.
        sources: Filter for lines of user code.
        arguments: The path of each argument, by its path in the module.

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
        report = replace(report, op_name=arguments.get(report.op_name, report.op_name))
        alike.setdefault(replace(report, name="", device_bytes=0), []).append(report)
    together = [
        replace(reports[0], device_bytes=sum(r.device_bytes for r in reports), count=len(reports))
        for reports in alike.values()
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
    instruction = operations.instruction(value.name)
    return operations.is_phi(value), instruction is None or not instruction.op_name


def describe_values(
    program: Compilation, module: HloModule
) -> tuple[tuple[ValueReport, ...], tuple[ValueReport, ...]]:
    """Return the arguments, then the closed-over arrays, and the results, with their buffers.

    Args:
        program: The program.
        module: Its compiled module, with its buffer assignment.
    """
    tokens, buffers = program.tokens, _by_parameter(module.allocations)
    positions = (*program.parameters, *program.closed_positions)
    values = (*program.arguments, *program.closed_over)
    takers = find_aliases(program)
    arguments = tuple(
        report
        if position is None
        else replace(
            _with_buffer(report, buffers.get(tokens + position)),
            aliased=taker or "",
            donated=value.donated,
        )
        for report, position, value, taker in zip(
            describe_inputs(program), positions, values, takers, strict=True
        )
    )
    paths = {position: report.path for position, report in zip(positions, arguments, strict=True)}
    # The parameter that each aliasing result shares its buffer with.
    aliases = {result - tokens: argument - tokens for result, argument in program.aliases.items()}
    places = dict(enumerate(_result_allocations(module)[tokens:]))
    results = tuple(
        replace(_with_buffer(report, places.get(i)), aliased=paths.get(aliases.get(i, -1), ""))
        for i, report in enumerate(describe_outputs(program))
    )
    return arguments, results


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
        if (holder := holding.get((name, index))) is not None:
            return holder
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


def _with_buffer(report: ValueReport, allocation: Allocation | None) -> ValueReport:
    if allocation is None:
        return report
    return replace(report, device_bytes=allocation.size if allocation.memory == HBM else 0)


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
    module = compilation.module
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
    if not module.allocations and compilation.executable is not None:
        # An executable has sums alone.
        stats = compiled_memory(compilation.executable)
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
        temporaries=describe_temporaries(module, compilation.sources, compilation.argument_names),
        host_bytes=_bytes(a for a in module.allocations if a.memory == HOST),
        runtime=runtime,
    )


def _bytes(allocations: Iterable[Allocation]) -> int:
    return sum(allocation.size for allocation in allocations)


def _code_bytes(compilation: Compilation, left: int) -> int:
    """Return the code size, 0 if unknown; for a program rejected for its code, the least size."""
    if compilation.executable is not None:
        return compiled_memory(compilation.executable).generated_code_size_in_bytes
    return left + 1 if compilation.too_large and left >= 0 else 0


def runtime_memory(module: HloProgram) -> tuple[RuntimeMemory, ...]:
    """Return the memory of a device that the runtime keeps beside the allocator.

    NCCL has a communicator for each group of devices that communicate.

    Args:
        module: The compiled module.
    """
    buffers = [RuntimeMemory("CUDA context", _CONTEXT_BYTES, _CONTEXT_SOURCE)]
    groups = {collective.groups for collective in module.collectives}
    if groups:
        nbytes = len(groups) * _CHANNELS * _CONNECTION_BYTES
        buffers.append(RuntimeMemory("NCCL buffers", nbytes, _NCCL_SOURCE))
    return tuple(buffers)


def available_bytes(chip: Chip) -> int:
    """Return the bytes of a device that a program may use.

    Those of a TPU are what its compiler makes available; those of a GPU what JAX's allocator takes:
    the share of the environment variable `XLA_PYTHON_CLIENT_MEM_FRACTION` or
    `XLA_CLIENT_MEM_FRACTION`, by default 75 %, with or without preallocation.

    Args:
        chip: Figures of the chip.

    Raises:
        ArgumentError: If the variable is no number from 0 to 1.
    """
    if not isinstance(chip, GpuModel):
        return chip.available_bytes
    text = next((os.environ[name] for name in _FRACTIONS if os.environ.get(name)), "")
    try:
        fraction = float(text or ALLOCATOR_FRACTION)
    except ValueError:
        fraction = -1.0
    if not 0 < fraction <= 1:
        raise ArgumentError(  # no-catalogue: needs an environment variable
            f"{_FRACTIONS[0]}={text!r} is invalid: expected a share of the memory, such as 0.9"
        )
    return int(fraction * chip.hbm_bytes)
