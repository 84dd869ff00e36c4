"""FLOP of single HLO instructions, and their arrays in tiled layouts.

Matrix products are separate from elementwise operations of the vector unit. A multiply-add counts
as two operations.
"""

import math
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from xlashard.costs.gpu.cuda_calls import contracted_dims, convolved, is_library_product
from xlashard.hlo.module import Computation, HloModule, Instruction, WindowDimension
from xlashard.hlo.shapes import Shape

_ELEMENTWISE_NAMES = """
    abs add ceil clamp compare divide floor maximum minimum multiply negate remainder
    round-nearest-afz round-nearest-even select sign subtract
"""
_ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
_TRANSCENDENTAL_NAMES = """
    acos acosh asin asinh atan2 atanh cbrt cosh cosine erf exponential exponential-2
    exponential-minus-one log log-2 log-plus-one logistic power rsqrt sine sinh sqrt tan tanh
"""
TRANSCENDENTAL = frozenset(_TRANSCENDENTAL_NAMES.split())

REDUCERS = frozenset(("reduce", "reduce-window", "scatter", "select-and-scatter", "map", "sort"))
"""Operations with a called computation per element, which they are counted with."""

_NAMES = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}


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
    module: HloModule, computation: Computation, instruction: Instruction
) -> InstructionFlops:
    """Return the arithmetic of one run of an instruction, without called computations.

    Floating-point comparisons and selections count; integers, logic, conversions and copies don't.

    Args:
        module: The module.
        computation: Computation of the instruction.
        instruction: The instruction.
    """
    opcode = instruction.opcode
    if opcode in ("convolution", "dot") or is_library_product(instruction):
        return _product(computation, instruction)
    if opcode in _ELEMENTWISE:
        operands = operand_arrays(computation, instruction)
        floating = bool(operands) and _is_floating(operands[-1].dtype)
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


def operand_arrays(computation: Computation, instruction: Instruction) -> list[Shape]:
    """Return the operand arrays of an instruction, in their layouts."""
    named = (computation.instructions.get(name) for name in instruction.operands)
    return [array for i in named if i is not None for array in i.shape.arrays]


_ESTIMATE = re.compile(r'"cost_estimate":\s*\{([^}]*)\}')
_ESTIMATED = re.compile(r'"(flops|transcendentals|bytes_accessed)":\s*"?([\d.eE+]+)')


def kernel_estimate(call: Instruction) -> dict[str, float]:
    """Return the author's cost estimate of a kernel, or an empty dict.

    Args:
        call: Custom call of a Pallas kernel.
    """
    found = _ESTIMATE.search(call.attributes.backend_config)
    return {name: float(n) for name, n in _ESTIMATED.findall(found[1])} if found else {}


def dtype_name(dtype: str) -> str:
    """Return the NumPy name of an HLO dtype.

    Example:
        >>> [dtype_name(dtype) for dtype in ("bf16", "s8", "f8e4m3fn", "pred")]
        ['bfloat16', 'int8', 'float8_e4m3fn', 'bool']
    """
    if dtype == "pred":
        return "bool"
    found = re.fullmatch(r"([a-z]+)(\d+)(e\w+)?", dtype)
    if found is None or found[1] not in _NAMES:
        return dtype
    return f"{_NAMES[found[1]]}{found[2]}" + (f"_{found[3]}" if found[3] else "")


def _size(instruction: Instruction) -> int:
    return sum(array.size for array in instruction.shape.arrays)


def _is_floating(dtype: str) -> bool:
    return dtype[0] in "fc" or dtype.startswith("bf")


def _product(computation: Computation, instruction: Instruction) -> InstructionFlops:
    operands = operand_arrays(computation, instruction)
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
    return InstructionFlops(matmul_flops=flops, dtype=_multiplied_dtype(instruction, left, right))


_PASSES = {"high": "bfloat16 x3", "highest": "bfloat16 x6"}


def _multiplied_dtype(instruction: Instruction, left: Shape, right: Shape) -> str:
    wider = max(left, right, key=lambda a: (_is_floating(a.dtype), _bits(a.dtype)))
    if wider.dtype not in ("f32", "c64"):
        return dtype_name(wider.dtype)
    # The matrix unit multiplies bfloat16; float32 takes several passes.
    requested = instruction.attributes.precision
    return next((_PASSES[p] for p in ("highest", "high") if p in requested), "bfloat16")


def _bits(dtype: str) -> int:
    """Return the number of bits in the name of a dtype."""
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 1


def _convolution(instruction: Instruction, left: Shape, right: Shape, result: Shape) -> int:
    """Return the multiplications of a convolution, without padding and dilation holes.

    On TPU, a batch dimension or a contraction over two dimensions of a matrix product becomes a
    window dimension with mostly out-of-bounds positions.
    """
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attributes.dim_labels)
    if labels is None:
        return 0
    taken, kernel, given = labels.groups()
    counted = result.dims[given.index("b")] * result.dims[given.index("f")]
    # With feature or batch groups, operands and result hold the share of one group.
    counted *= right.dims[kernel.index("i")]
    windows = instruction.attributes.window
    for digit in (label for label in given if label.isdigit()):
        window = windows[int(digit)] if int(digit) < len(windows) else WindowDimension()
        size = left.dims[taken.index(digit)]
        counted *= _places(window, size, result.dims[given.index(digit)])
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
    operands = operand_arrays(computation, instruction)
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


def _window_runs(instruction: Instruction, taken: Shape, result: Shape) -> int:
    """Return the number of additions of a reduce-window.

    TPU's compiler writes a reduction followed by a broadcast, as in softmax, as a window over the
    whole dimension: a single reduction.
    """
    places = results = 1
    windows = instruction.attributes.window
    for window, size, count in zip(windows, taken.dims, result.dims, strict=False):
        met = _places(window, size, count)
        whole = met == size * count
        places *= size if whole else met
        results *= 1 if whole else count
    return places - results
