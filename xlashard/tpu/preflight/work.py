"""What one execution of a compiled program does on one device: its loops counted by their trips."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from xlashard.program.hlo import Computation, HloText, Instruction
from xlashard.program.loops import trip_count
from xlashard.tpu.preflight.flops import REDUCERS, arithmetic, kernel_estimate
from xlashard.tpu.preflight.hbm import hbm_bytes

_HARMLESS_NAMES = """
    AllocateBuffer AssumeGatherIndicesInBound AsyncCollectiveDone AsyncCollectiveStart
    ConcatBitcast SliceId GatherScatterIndicesBitpacked Sharding SPMDFullToShardShape
    SPMDShardToFullShape MoveToHost MoveToDevice annotate_device_placement LayoutConstraint
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
"""Custom calls of the compiler's own that calculate nothing."""


@dataclass(frozen=True)
class Work:
    """Arithmetic and memory traffic.

    Attributes:
        multiplied: FLOP of matrix products, by the dtype that is multiplied.
        elementwise: Other floating-point operations.
        transcendental: Values of functions such as exp and tanh.
        hbm_bytes: Bytes read and written in HBM.
        unknown_calls: Custom calls of which nobody knows what they calculate, by JAX's name of the
            operation, and how often each runs.
        unknown_loops: Loops of unknown trip count, which count as one run.
    """

    multiplied: Mapping[str, float] = field(default_factory=dict)
    elementwise: float = 0.0
    transcendental: float = 0.0
    hbm_bytes: float = 0.0
    unknown_calls: Mapping[str, int] = field(default_factory=dict)
    unknown_loops: int = 0

    @property
    def flops(self) -> float:
        """Floating-point operations of all kinds, those of exp and the like as one each."""
        return sum(self.multiplied.values()) + self.elementwise + self.transcendental


@dataclass
class _Sum:
    """Work that is being added up."""

    multiplied: dict[str, float] = field(default_factory=dict)
    elementwise: float = 0.0
    transcendental: float = 0.0
    hbm_bytes: float = 0.0
    unknown_calls: Counter[str] = field(default_factory=Counter)
    unknown_loops: int = 0

    def multiply(self, dtype: str, flops: float) -> None:
        self.multiplied[dtype] = self.multiplied.get(dtype, 0.0) + flops

    def add(self, other: "_Sum", times: int) -> None:
        for dtype, flops in other.multiplied.items():
            self.multiply(dtype, flops * times)
        for name, count in other.unknown_calls.items():
            self.unknown_calls[name] += count * times
        self.elementwise += other.elementwise * times
        self.transcendental += other.transcendental * times
        self.hbm_bytes += other.hbm_bytes * times
        self.unknown_loops += other.unknown_loops


def count_work(module: HloText) -> Work:
    """What one execution of a program does on one device.

    Of a conditional the branch counts that calculates most.

    Args:
        module: A compiled program.
    """
    if module.entry not in module.computations:
        return Work()
    total = _Counting(module).of(module.entry, fused=False)
    return Work(
        dict(total.multiplied),
        total.elementwise,
        total.transcendental,
        total.hbm_bytes,
        dict(total.unknown_calls),
        total.unknown_loops,
    )


class _Counting:
    """Counts each computation once, however often it runs."""

    def __init__(self, module: HloText) -> None:
        self._module = module
        self._done: dict[tuple[str, bool], _Sum] = {}

    def of(self, name: str, *, fused: bool) -> _Sum:
        """The work of one run of a computation; of one inside a fusion without its memory."""
        if (name, fused) not in self._done:
            self._done[name, fused] = self._count(self._module.computations[name], fused)
        return self._done[name, fused]

    def _count(self, computation: Computation, fused: bool) -> _Sum:
        total = _Sum()
        for instruction in computation.instructions.values():
            found = arithmetic(self._module, computation, instruction)
            if found.multiplied:
                total.multiply(found.dtype, found.multiplied)
            total.elementwise += found.elementwise
            total.transcendental += found.transcendental
            if instruction.opcode == "custom-call":
                self._add_custom_call(total, instruction)
            if not fused:
                total.hbm_bytes += hbm_bytes(self._module, computation, instruction)
            self._add_called(total, computation, instruction, fused)
        return total

    def _add_called(
        self, total: _Sum, computation: Computation, instruction: Instruction, fused: bool
    ) -> None:
        opcode = instruction.opcode
        if opcode in REDUCERS or opcode.startswith(("all-reduce", "reduce-scatter")):
            return
        if opcode.endswith(("-update", "-done")):
            # The start of an asynchronous call has named what it calls.
            return
        called = [
            (attribute, name)
            for attribute, name in instruction.called()
            if name in self._module.computations
        ]
        if opcode == "conditional":
            branches = [self.of(name, fused=fused) for _, name in called]
            if branches:
                most = max(branches, key=lambda w: (sum(w.multiplied.values()), w.hbm_bytes))
                total.add(most, 1)
            return
        trips = 1
        if opcode == "while":
            known = trip_count(self._module, computation, instruction)
            trips = 1 if known is None else known
            total.unknown_loops += known is None
        for attribute, name in called:
            if attribute != "condition":
                total.add(self.of(name, fused=fused or opcode == "fusion"), trips)

    def _add_custom_call(self, total: _Sum, call: Instruction) -> None:
        target = call.call_target
        numbers = kernel_estimate(call)
        if numbers:
            # A kernel doesn't say what it multiplies: on TPU that is bfloat16, but for the rare.
            total.multiply("bfloat16", numbers.get("flops", 0.0))
            total.transcendental += numbers.get("transcendentals", 0.0)
        elif target not in _HARMLESS:
            total.unknown_calls[self._module.op_name(call) or target] += 1
