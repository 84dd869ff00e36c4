"""Arithmetic of HLO instructions, and arithmetic and HBM traffic of one execution of a program.

Matrix products are separate from elementwise operations of the vector unit. A multiply-add counts
as two operations.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from xlashard.hlo.call_graph import trip_count
from xlashard.hlo.collective_kinds import REDUCING_KINDS
from xlashard.hlo.module import Computation, HloModule, Instruction, WindowDimension
from xlashard.hlo.shapes import Shape, dtype_name, is_floating
from xlashard.predict.costs.gpu.cuda_calls import contracted_dims, convolved, is_library_product
from xlashard.predict.costs.kernel_costs import KernelCost
from xlashard.predict.costs.kernel_work import is_kernel, kernel_name, kernel_work
from xlashard.predict.costs.memory_traffic import hbm_bytes
from xlashard.predict.costs.rates import multiplied_dtype, wider_dtype

_ELEMENTWISE_NAMES = """
    abs add ceil clamp compare divide floor maximum minimum multiply negate remainder
    round-nearest-afz round-nearest-even select sign subtract
"""
ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
"""Operations whose elements count as one floating-point operation each."""

_TRANSCENDENTAL_NAMES = """
    acos acosh asin asinh atan2 atanh cbrt cosh cosine erf exponential exponential-2
    exponential-minus-one log log-2 log-plus-one logistic power rsqrt sine sinh sqrt tan tanh
"""
TRANSCENDENTAL = frozenset(_TRANSCENDENTAL_NAMES.split())

REDUCERS = frozenset(("reduce", "reduce-window", "scatter", "select-and-scatter", "map", "sort"))
"""Operations with a called computation per element, which they are counted with."""


@dataclass(frozen=True, slots=True)
class InstructionFlops:
    """Arithmetic of an instruction.

    Attributes:
        matmul_flops: FLOP of a matrix product or convolution.
        dtype: Operand dtype: `bfloat16`; `bfloat16 x6` for float32 operands multiplied in six
            passes.
        elementwise: Other floating-point operations, one per element.
        transcendental: Elements of transcendental functions such as exp and tanh.
    """

    matmul_flops: float = 0.0
    dtype: str = ""
    elementwise: float = 0.0
    transcendental: float = 0.0


NOTHING = InstructionFlops()


def instruction_flops(
    module: HloModule, computation: Computation, instruction: Instruction, *, on_gpu: bool = False
) -> InstructionFlops:
    """Return the arithmetic of one run of an instruction, without called computations.

    Floating-point comparisons and selections count; integers, logic, conversions and copies don't.

    Args:
        module: The module.
        computation: Computation of the instruction.
        instruction: The instruction.
        on_gpu: Whether a GPU runs it, whose dtypes of products differ from those of a TPU.
    """
    opcode = instruction.opcode
    if is_product(instruction):
        return _product(computation, instruction, on_gpu)
    if opcode in ELEMENTWISE:
        operands = computation.operand_arrays(instruction)
        floating = bool(operands) and is_floating(operands[-1].dtype)
        return InstructionFlops(elementwise=float(_size(instruction)) if floating else 0.0)
    if opcode in TRANSCENDENTAL:
        return InstructionFlops(transcendental=float(_size(instruction)))
    if opcode in REDUCERS:
        return _reduction(module, computation, instruction)
    if opcode == "fft":
        length = instruction.attributes.fft_length
        steps = math.log2(max(math.prod(length), 2))
        return InstructionFlops(elementwise=5.0 * _size(instruction) * steps)
    return NOTHING


def is_product(instruction: Instruction) -> bool:
    """Return whether an instruction is a matrix product or convolution, of XLA or of a library."""
    return instruction.opcode in ("convolution", "dot") or is_library_product(instruction)


def _size(instruction: Instruction) -> int:
    return sum(array.size for array in instruction.shape.arrays)


def _product(computation: Computation, instruction: Instruction, on_gpu: bool) -> InstructionFlops:
    operands = computation.operand_arrays(instruction)
    result = instruction.shape.arrays[0]
    if len(operands) < 2:
        return NOTHING
    left, right = operands[:2]
    if arrays := convolved(instruction, left, right, result):
        multiplications = _convolution(instruction, *arrays)
    else:
        contracted = contracted_dims(instruction)
        multiplications = result.size * math.prod(left.dims[n] for n in contracted)
    # A complex product takes four real ones.
    parts = 4 if left.dtype[0] == "c" else 1
    flops = 2.0 * parts * multiplications
    requested = instruction.attributes.precision
    if on_gpu:
        dtype = _gpu_dtype(wider_dtype(left.dtype, right.dtype), requested)
    else:
        passes = max((_PASSES.get(p, 1) for p in requested), default=1)
        dtype = multiplied_dtype(left.dtype, right.dtype, passes)
    return InstructionFlops(matmul_flops=flops, dtype=dtype)


def _gpu_dtype(operand: str, requested: Sequence[str]) -> str:
    """Return the dtype in which a GPU multiplies operands.

    Args:
        operand: HLO dtype of the wider operand.
        requested: Requested precisions of the operands.
    """
    if operand in ("f32", "c64"):
        # Tensor cores take float32 with fewer bits, for the parts of complex numbers too.
        return next((_GPU_PRECISIONS[p] for p in _GPU_PRECISIONS if p in requested), _GPU_FLOAT32)
    # Tensor cores have no wide integers: their lanes are those of float32 at most.
    lanes = {"f64": "float64", "c128": "float64"} | dict.fromkeys(_WIDE_INTEGERS, "float32")
    return lanes.get(operand, dtype_name(operand))


_GPU_FLOAT32 = "tensorfloat32"
_GPU_PRECISIONS = {"high": "tensorfloat32 x3", "highest": "float32"}
_WIDE_INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")


_PASSES = {"high": 3, "highest": 6}
"""Passes in bfloat16 for operands of float32, by the requested precision."""


def _convolution(instruction: Instruction, left: Shape, right: Shape, result: Shape) -> int:
    """Return the multiplications of a convolution, without padding and dilation holes.

    On TPU, a batch dimension or a contraction over two dimensions of a matrix product becomes a
    window dimension with mostly out-of-bounds positions.
    """
    labels = instruction.attributes.convolution_labels
    if labels is None:
        return 0
    left_labels, right_labels, result_labels = labels
    counted = result.dims[result_labels.index("b")] * result.dims[result_labels.index("f")]
    # With feature or batch groups, operands and result hold the share of one group.
    counted *= right.dims[right_labels.index("i")]
    windows = instruction.attributes.window
    for digit in (label for label in result_labels if label.isdigit()):
        window = windows[int(digit)] if int(digit) < len(windows) else WindowDimension()
        size = left.dims[left_labels.index(digit)]
        counted *= _places(window, size, result.dims[result_labels.index(digit)])
    return counted


@lru_cache(maxsize=4096)
def _places(window: WindowDimension, size: int, result: int) -> int:
    """Return the number of (window, result) position pairs that meet an operand element.

    Window position `k` of result position `o` reads index `o * stride + k * dilation - before` of
    the dilated operand, which holds an element if the base dilation divides it.
    """
    if not size or not result or not window.size:
        return 0
    stride, base = window.stride, window.base_dilation
    offsets = np.arange(window.size, dtype=np.int64) * window.window_dilation - window.before
    last = (size - 1) * base
    low = np.maximum(-(offsets // stride), 0)
    high = np.minimum((last - offsets) // stride, result - 1)
    common = math.gcd(stride, base)
    period = base // common
    if period == 1:
        counts = high - low + 1
    else:
        inverse = pow(stride // common, -1, period)
        first = (-offsets // common * inverse) % period
        start = low + (first - low) % period
        counts = (high - start) // period + 1
    counts = np.where((offsets % common == 0) & (counts > 0), counts, 0)
    return int(counts.sum())


def _reduction(
    module: HloModule, computation: Computation, instruction: Instruction
) -> InstructionFlops:
    """Return the arithmetic of a computation that runs per element or pair of elements."""
    if instruction.opcode == "sort":
        return NOTHING
    operands = computation.operand_arrays(instruction)
    result = instruction.shape.arrays[0]
    if not operands:
        return NOTHING
    match instruction.opcode:
        case "reduce":
            runs = operands[0].size - result.size
        case "reduce-window":
            runs = _window_runs(instruction, operands[0], result)
        case "scatter" | "select-and-scatter":
            runs = operands[-1].size
        case _:
            runs = result.size
    # A select-and-scatter selects once per element of its operand.
    inner = module.computations.get(instruction.calls[-1]) if instruction.calls else None
    if inner is None or runs <= 0:
        return NOTHING
    elementwise = transcendental = 0.0
    for each in inner.instructions.values():
        counted = instruction_flops(module, inner, each)
        elementwise += counted.elementwise
        transcendental += counted.transcendental
    return InstructionFlops(elementwise=runs * elementwise, transcendental=runs * transcendental)


def _window_runs(instruction: Instruction, operand: Shape, result: Shape) -> int:
    """Return the number of additions of a reduce-window.

    TPU's compiler writes a reduction followed by a broadcast, as in softmax, as a window over the
    whole dimension: a single reduction.
    """
    places = results = 1
    windows = instruction.attributes.window
    for window, size, count in zip(windows, operand.dims, result.dims, strict=False):
        met = _places(window, size, count)
        whole = met == size * count
        places *= size if whole else met
        results *= 1 if whole else count
    return places - results


_HARMLESS_NAMES = """
    AllocateBuffer AssumeGatherIndicesInBound AsyncCollectiveDone AsyncCollectiveStart
    ConcatBitcast SliceId GatherScatterIndicesBitpacked Sharding SPMDFullToShardShape
    SPMDShardToFullShape MoveToHost MoveToDevice annotate_device_placement LayoutConstraint ZeroCrop
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
"""Custom calls of the compiler without arithmetic."""

_UNCOUNTED_NAMES = """
    batch-norm-grad batch-norm-inference batch-norm-training cholesky collective-reduce ragged-dot
    rng rng-bit-generator scaled-dot stochastic-convert topk triangular-solve
"""
_UNCOUNTED = frozenset(_UNCOUNTED_NAMES.split())
"""Operations whose arithmetic is not known here; the compiler mostly replaces them by others."""


@dataclass
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

    matmul_flops: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    elementwise: float = 0.0
    transcendental: float = 0.0
    hbm_bytes: float = 0.0
    unknown_calls: Counter[str] = field(default_factory=Counter)
    unknown_loops: int = 0

    @property
    def flops(self) -> float:
        """Floating-point operations of all kinds; a transcendental counts as one."""
        return sum(self.matmul_flops.values()) + self.elementwise + self.transcendental

    def add(self, other: "CostAnalysis", times: int) -> None:
        """Add the cost of a computation that runs some times."""
        for dtype, flops in other.matmul_flops.items():
            self.matmul_flops[dtype] += flops * times
        for name, count in other.unknown_calls.items():
            self.unknown_calls[name] += count * times
        self.elementwise += other.elementwise * times
        self.transcendental += other.transcendental * times
        self.hbm_bytes += other.hbm_bytes * times
        self.unknown_loops += other.unknown_loops


def analyze_cost(
    module: HloModule,
    kernel_costs: Mapping[str, KernelCost] | None = None,
    *,
    on_gpu: bool = False,
) -> CostAnalysis:
    """Return the arithmetic and memory traffic of one execution on one device.

    A conditional counts its most expensive branch.

    Args:
        module: Compiled module.
        kernel_costs: Costs of kernels that the caller gives, by name.
        on_gpu: Whether the module is for GPUs.
    """
    if module.entry not in module.computations:
        return CostAnalysis()
    return _CostCounter(module, kernel_costs or {}, on_gpu).of(module.entry, fused=False)


class _CostCounter:
    """Cost of each computation, analysed once, independent of its number of calls."""

    def __init__(
        self, module: HloModule, kernel_costs: Mapping[str, KernelCost], on_gpu: bool
    ) -> None:
        self._module = module
        self._on_gpu = on_gpu
        self._kernel_costs = kernel_costs
        self._done: dict[tuple[str, bool], CostAnalysis] = {}

    def of(self, name: str, *, fused: bool) -> CostAnalysis:
        """Return the cost of one run of a computation, without memory traffic inside a fusion."""
        if (name, fused) not in self._done:
            self._done[name, fused] = self._count(self._module.computations[name], fused)
        return self._done[name, fused]

    def _count(self, computation: Computation, fused: bool) -> CostAnalysis:
        total = CostAnalysis()
        for instruction in computation.instructions.values():
            flops = instruction_flops(self._module, computation, instruction, on_gpu=self._on_gpu)
            if flops.matmul_flops:
                total.matmul_flops[flops.dtype] += flops.matmul_flops
            total.elementwise += flops.elementwise
            total.transcendental += flops.transcendental
            if instruction.opcode == "custom-call":
                self._add_custom_call(total, computation, instruction)
            elif instruction.opcode in _UNCOUNTED:
                total.unknown_calls[instruction.op_name or instruction.opcode] += 1
            if not fused:
                total.hbm_bytes += hbm_bytes(self._module, computation, instruction)
            self._add_called(total, computation, instruction, fused)
        return total

    def _add_called(
        self, total: CostAnalysis, computation: Computation, instruction: Instruction, fused: bool
    ) -> None:
        opcode = instruction.opcode
        if opcode in REDUCERS or opcode.startswith(REDUCING_KINDS):
            return
        if opcode.endswith(("-update", "-done")):
            # The start of the asynchronous call counts the called computation.
            return
        called = [n for n in instruction.repeated_calls if n in self._module.computations]
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
        self, total: CostAnalysis, computation: Computation, call: Instruction
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
            total.matmul_flops[dtype] += flops
        total.elementwise += work.vector_ops
        total.transcendental += work.transcendentals
