"""Arithmetic and HBM traffic of one execution of a program on one device."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xlashard.hlo.call_graph import trip_count
from xlashard.hlo.collectives import KINDS
from xlashard.hlo.module import Computation, HloModule, Instruction
from xlashard.hlo.shapes import HBM, Shape
from xlashard.tpu.preflight.cost.flops import (
    REDUCERS,
    instruction_flops,
    kernel_estimate,
    operand_arrays,
)

_FREE_NAMES = """
    add-dependency after-all async-done async-start async-update bitcast call conditional constant
    copy-done domain get-tuple-element iota opt-barrier parameter partition-id replica-id tuple
    while
"""
_FREE = frozenset(_FREE_NAMES.split())
_PASSED_ON = ("bitcast", "reshape", "get-tuple-element", "opt-barrier")
_STARTS, _ENDS = "AsyncCollectiveStart", "AsyncCollectiveDone"


def repeated_calls(instruction: Instruction) -> tuple[str, ...]:
    """Return the computations that an instruction calls, without the condition of a loop."""
    return instruction.calls[:1] if instruction.opcode == "while" else instruction.calls


def hbm_bytes(module: HloModule, computation: Computation, instruction: Instruction) -> int:
    """Return the HBM bytes that one run of an instruction reads and writes, including padding.

    Values in another memory (VMEM, host) count nothing. Slices, gathers and in-place updates count
    only the bytes that they touch, also inside fusions. An operand that a fusion reads several
    times counts once.

    Args:
        module: The module.
        computation: Computation of the instruction, not that of a fusion.
        instruction: The instruction.
    """
    opcode = instruction.opcode
    if opcode in _FREE or (opcode.endswith("-done") and opcode != "copy-done"):
        return 0
    if opcode == "custom-call":
        return _of_custom_call(computation, instruction)
    if opcode == "fusion":
        inner = _fused(module, instruction)
        return 0 if inner is None else _of_fusion(module, instruction, inner)
    results = instruction.shape.arrays
    operands = operand_arrays(computation, instruction)
    if opcode in ("send", "recv"):
        # The type holds the transferred value and a context.
        return sum(array.hbm_bytes for array in instruction.shape.parts[0].arrays)
    if opcode.endswith("-start"):
        results = _started(instruction, len(operands))
    return _of_operation(opcode.removesuffix("-start"), operands, results)


def _of_operation(opcode: str, operands: Sequence[Shape], results: Sequence[Shape]) -> int:
    written = sum(array.hbm_bytes for array in results)
    match opcode:
        case "slice" | "dynamic-slice" | "gather":
            # Reads as many bytes of the operand as the result has; other operands are indices.
            read = _like(operands[:1], sum(array.padded_bytes for array in results))
            return read + sum(a.hbm_bytes for a in operands[1:]) + written
        case "dynamic-update-slice" if len(operands) > 1:
            update = operands[1]
            return update.hbm_bytes + _like(results, update.padded_bytes)
        case "scatter" if len(operands) > 2:
            update = operands[-1]
            # Reads and writes the updated region.
            return sum(a.hbm_bytes for a in operands[1:]) + 2 * _like(results, update.padded_bytes)
    return sum(array.hbm_bytes for array in operands) + written


def _like(arrays: Sequence[Shape], nbytes: int) -> int:
    """Return `nbytes`, limited by the bytes of the arrays in HBM."""
    return min(nbytes, sum(array.hbm_bytes for array in arrays))


def _started(instruction: Instruction, operands: int) -> tuple[Shape, ...]:
    """Return the results of an asynchronous start, whose type includes its operands."""
    if instruction.opcode == "copy-start":
        return instruction.shape.parts[0].arrays
    arrays = instruction.shape.arrays
    if instruction.opcode == "all-reduce-start" and len(arrays) == operands:
        return arrays
    return arrays[operands : 2 * operands]


def _of_custom_call(computation: Computation, instruction: Instruction) -> int:
    if instruction.attributes.call_target == "AllocateBuffer":
        return 0
    arrays = (*operand_arrays(computation, instruction), *instruction.shape.arrays)
    estimated = kernel_estimate(instruction).get("bytes_accessed")
    return round(estimated) if estimated else sum(array.hbm_bytes for array in arrays)


def _fused(module: HloModule, fusion: Instruction) -> Computation | None:
    return module.computations.get(fusion.calls[0]) if fusion.calls else None


def _of_fusion(module: HloModule, fusion: Instruction, inner: Computation) -> int:
    if _STARTS in inner.targets:
        # The type starts with the operand and the result of the collective.
        return sum(a.hbm_bytes for a in fusion.shape.arrays[:2])
    read = sum(
        min(_touched(module, inner, parameter), array.padded_bytes)
        for parameter in inner.parameters
        for array in parameter.shape.arrays
        if array.memory_space == HBM
    )
    root = inner.root
    if root is None:
        return read
    outputs = _outputs(inner, root)
    types = fusion.shape.arrays
    if len(outputs) != len(types):
        return read + sum(array.hbm_bytes for array in types)
    written = sum(
        _like([array], _written(module, inner, output, array))
        for output, array in zip(outputs, types, strict=True)
    )
    return read + written


def _outputs(inner: Computation, root: Instruction) -> list[Instruction | None]:
    if root.opcode != "tuple":
        return [root]
    return [inner.instructions.get(name) for name in root.operands]


def _touched(module: HloModule, inner: Computation, value: Instruction) -> int:
    """Return the bytes of a fusion's parameter that the fusion reads."""
    total = 0
    whole = sum(array.padded_bytes for array in value.shape.arrays)
    for user in inner.users.get(value.name, ()):
        total += _read_by(module, inner, value, user)
        if total >= whole:
            return whole
    return total


def _read_by(module: HloModule, inner: Computation, value: Instruction, user: Instruction) -> int:
    names = user.operands
    is_first = names[0] == value.name
    opcode = user.opcode.removesuffix("-start")
    if opcode == "tuple" or _is_part_of_collective(inner, user):
        return 0
    if opcode in _PASSED_ON:
        return _touched(module, inner, user)
    if is_first and opcode in ("slice", "dynamic-slice", "gather"):
        return sum(array.padded_bytes for array in user.shape.arrays)
    if is_first and opcode == "dynamic-update-slice":
        return 0
    if is_first and opcode == "scatter":
        update = inner.instructions.get(names[-1])
        return sum(a.padded_bytes for a in update.shape.arrays) if update is not None else 0
    if opcode == "fusion" and (nested := _fused(module, user)) is not None:
        if _only_passes_on(nested):
            return _touched(module, inner, user)
        return sum(
            _touched(module, nested, parameter)
            for name, parameter in zip(names, nested.parameters, strict=False)
            if name == value.name
        )
    return sum(array.padded_bytes for array in value.shape.arrays)


def _only_passes_on(fusion: Computation) -> bool:
    """Return whether a fusion returns its operand, so that its users read it."""
    value = fusion.root
    while value is not None and value.opcode in _PASSED_ON and value.operands:
        value = fusion.instructions.get(value.operands[0])
    return value is not None and value.opcode == "parameter"


def _is_part_of_collective(inner: Computation, user: Instruction) -> bool:
    """Return whether an instruction continues or ends a collective spread over fusions.

    The start of the collective counts its bytes.
    """
    spread = inner.name.startswith("async_collective_fusion") or _ENDS in inner.targets
    return spread and (user.opcode in KINDS or user.opcode == "custom-call")


def _written(
    module: HloModule, inner: Computation, output: Instruction | None, array: Shape
) -> int:
    """Return the bytes that a fusion writes for one of its results."""
    while output is not None and output.opcode in _PASSED_ON and output.operands:
        output = inner.instructions.get(output.operands[0])
    if output is None:
        return array.padded_bytes
    if output.opcode == "parameter" or _is_part_of_collective(inner, output):
        return 0
    names = output.operands
    if output.opcode in ("dynamic-update-slice", "scatter"):
        place = 1 if output.opcode == "dynamic-update-slice" else len(names) - 1
        update = inner.instructions.get(names[place])
        return sum(a.padded_bytes for a in update.shape.arrays) if update else array.padded_bytes
    if output.opcode == "fusion" and (nested := _fused(module, output)) is not None:
        roots = _outputs(nested, nested.root) if nested.root is not None else []
        return _written(module, nested, roots[0], array) if len(roots) == 1 else array.padded_bytes
    return array.padded_bytes


_HARMLESS_NAMES = """
    AllocateBuffer AssumeGatherIndicesInBound AsyncCollectiveDone AsyncCollectiveStart
    ConcatBitcast SliceId GatherScatterIndicesBitpacked Sharding SPMDFullToShardShape
    SPMDShardToFullShape MoveToHost MoveToDevice annotate_device_placement LayoutConstraint
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
"""Custom calls of the compiler without arithmetic."""

_UNCOUNTED_NAMES = """
    batch-norm-grad batch-norm-inference batch-norm-training cholesky collective-reduce ragged-dot
    rng rng-bit-generator scaled-dot stochastic-convert topk triangular-solve
"""
_UNCOUNTED = frozenset(_UNCOUNTED_NAMES.split())
"""Operations whose arithmetic is not known here; the compiler mostly replaces them by others."""


@dataclass(frozen=True)
class CostAnalysis:
    """Arithmetic and memory traffic of one execution on one device.

    Attributes:
        matmul_flops: FLOP of matrix products, by operand dtype.
        elementwise: Other floating-point operations.
        transcendental: Elements of transcendental functions such as exp and tanh.
        hbm_bytes: Bytes read and written in HBM.
        unknown_calls: Custom calls and operations of unknown cost, by op name, with their number of
            runs.
        unknown_loops: Loops with an unknown trip count, counted as one iteration.
    """

    matmul_flops: Mapping[str, float] = field(default_factory=dict)
    elementwise: float = 0.0
    transcendental: float = 0.0
    hbm_bytes: float = 0.0
    unknown_calls: Mapping[str, int] = field(default_factory=dict)
    unknown_loops: int = 0

    @property
    def flops(self) -> float:
        """Floating-point operations of all kinds; a transcendental counts as one."""
        return sum(self.matmul_flops.values()) + self.elementwise + self.transcendental


@dataclass
class _CostSum:
    """Running sum of costs."""

    matmul_flops: dict[str, float] = field(default_factory=dict)
    elementwise: float = 0.0
    transcendental: float = 0.0
    hbm_bytes: float = 0.0
    unknown_calls: Counter[str] = field(default_factory=Counter)
    unknown_loops: int = 0

    def multiply(self, dtype: str, flops: float) -> None:
        self.matmul_flops[dtype] = self.matmul_flops.get(dtype, 0.0) + flops

    def add(self, other: "_CostSum", times: int) -> None:
        for dtype, flops in other.matmul_flops.items():
            self.multiply(dtype, flops * times)
        for name, count in other.unknown_calls.items():
            self.unknown_calls[name] += count * times
        self.elementwise += other.elementwise * times
        self.transcendental += other.transcendental * times
        self.hbm_bytes += other.hbm_bytes * times
        self.unknown_loops += other.unknown_loops


def analyze_cost(module: HloModule) -> CostAnalysis:
    """Return the arithmetic and memory traffic of one execution on one device.

    A conditional counts its most expensive branch.

    Args:
        module: Compiled module.
    """
    if module.entry not in module.computations:
        return CostAnalysis()
    total = _CostCounter(module).of(module.entry, fused=False)
    return CostAnalysis(
        dict(total.matmul_flops),
        total.elementwise,
        total.transcendental,
        total.hbm_bytes,
        dict(total.unknown_calls),
        total.unknown_loops,
    )


class _CostCounter:
    """Analyses each computation once, independent of its number of calls."""

    def __init__(self, module: HloModule) -> None:
        self._module = module
        self._done: dict[tuple[str, bool], _CostSum] = {}

    def of(self, name: str, *, fused: bool) -> _CostSum:
        """Return the cost of one run of a computation, without memory traffic inside a fusion."""
        if (name, fused) not in self._done:
            self._done[name, fused] = self._count(self._module.computations[name], fused)
        return self._done[name, fused]

    def _count(self, computation: Computation, fused: bool) -> _CostSum:
        total = _CostSum()
        for instruction in computation.instructions.values():
            found = instruction_flops(self._module, computation, instruction)
            if found.matmul_flops:
                total.multiply(found.dtype, found.matmul_flops)
            total.elementwise += found.elementwise
            total.transcendental += found.transcendental
            if instruction.opcode == "custom-call":
                self._add_custom_call(total, instruction)
            elif instruction.opcode in _UNCOUNTED:
                total.unknown_calls[instruction.op_name or instruction.opcode] += 1
            if not fused:
                total.hbm_bytes += hbm_bytes(self._module, computation, instruction)
            self._add_called(total, computation, instruction, fused)
        return total

    def _add_called(
        self, total: _CostSum, computation: Computation, instruction: Instruction, fused: bool
    ) -> None:
        opcode = instruction.opcode
        if opcode in REDUCERS or opcode.startswith(("all-reduce", "reduce-scatter")):
            return
        if opcode.endswith(("-update", "-done")):
            # The start of the asynchronous call counts the called computation.
            return
        called = [n for n in repeated_calls(instruction) if n in self._module.computations]
        if opcode == "conditional":
            branches = [self.of(name, fused=fused) for name in called]
            if branches:
                most = max(branches, key=lambda w: (sum(w.matmul_flops.values()), w.hbm_bytes))
                total.add(most, 1)
            return
        trips = 1
        if opcode == "while":
            known = trip_count(self._module, computation, instruction)
            trips = 1 if known is None else known
            total.unknown_loops += known is None
        for name in called:
            total.add(self.of(name, fused=fused or opcode == "fusion"), trips)

    def _add_custom_call(self, total: _CostSum, call: Instruction) -> None:
        target = call.attributes.call_target
        numbers = kernel_estimate(call)
        if numbers:
            # Kernel estimates have no dtype; TPU kernels usually multiply bfloat16.
            total.multiply("bfloat16", numbers.get("flops", 0.0))
            total.transcendental += numbers.get("transcendentals", 0.0)
        elif target not in _HARMLESS:
            total.unknown_calls[call.op_name or target] += 1
