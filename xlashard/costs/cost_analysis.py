"""Arithmetic and HBM traffic of one execution of a program on one device."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from xlashard.costs.flops import REDUCERS, instruction_flops
from xlashard.costs.gpu.cuda_calls import is_library_product
from xlashard.costs.kernel_costs import KernelCost
from xlashard.costs.kernel_work import is_kernel, kernel_name, kernel_work
from xlashard.costs.memory_traffic import hbm_bytes
from xlashard.hlo.call_graph import trip_count
from xlashard.hlo.collective_kinds import REDUCING_KINDS
from xlashard.hlo.module import Computation, HloModule, Instruction


def repeated_calls(instruction: Instruction) -> tuple[str, ...]:
    """Return the computations that an instruction calls, without the condition of a loop."""
    return instruction.calls[:1] if instruction.opcode == "while" else instruction.calls


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
        unknown_calls: Custom calls and operations of unknown cost, by op name, and kernels by name,
            with their number of runs.
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


def analyze_cost(
    module: HloModule, kernel_costs: Mapping[str, KernelCost] | None = None
) -> CostAnalysis:
    """Return the arithmetic and memory traffic of one execution on one device.

    A conditional counts its most expensive branch.

    Args:
        module: Compiled module.
        kernel_costs: Costs of kernels that the caller gives, by name.
    """
    if module.entry not in module.computations:
        return CostAnalysis()
    total = _CostCounter(module, kernel_costs or {}).of(module.entry, fused=False)
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

    def __init__(self, module: HloModule, kernel_costs: Mapping[str, KernelCost]) -> None:
        self._module = module
        self._kernel_costs = kernel_costs
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
                self._add_custom_call(total, computation, instruction)
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
        if opcode in REDUCERS or opcode.startswith(REDUCING_KINDS):
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

    def _add_custom_call(
        self, total: _CostSum, computation: Computation, call: Instruction
    ) -> None:
        target = call.attributes.call_target
        if not is_kernel(call):
            if target not in _HARMLESS and not is_library_product(call):
                total.unknown_calls[call.op_name or target] += 1
            return
        work = kernel_work(self._module, computation, call, self._kernel_costs)
        if work is None:
            total.unknown_calls[kernel_name(call)] += 1
            return
        for dtype, flops in work.matmul_flops.items():
            total.multiply(dtype, flops)
        total.elementwise += work.vector_ops
        total.transcendental += work.transcendentals
