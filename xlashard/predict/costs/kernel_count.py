"""Work of a kernel, counted in its Mosaic module over all steps of its grid.

Scalars that depend on grid and loop indices only are computed for all steps at once, so that a
block under a condition counts the steps in which it runs: a causal attention kernel skips blocks
above the diagonal.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from xlashard.hlo.shapes import HBM, Shape
from xlashard.predict.costs.rates import in_registers, multiplied_dtype
from xlashard.support.kernel_module import KernelBlock, KernelModule, KernelOp, KernelType

type Array = np.ndarray[Any, Any]

LOOPS = 6
"""Depth of nested loops whose indices are tracked."""

LARGEST = 1 << 22
"""Elements up to which a scalar is computed for all steps."""


@dataclass(frozen=True)
class Unknown:
    """A scalar that is known at run time only.

    Attributes:
        axes: Dimensions of grid and loops that it depends on.
    """

    axes: frozenset[int]


type Scalar = Array | Unknown
"""A value for each step, with an axis of size 1 for a dimension that it does not depend on."""


def axes_of(values: Sequence[Scalar]) -> frozenset[int]:
    """Return the dimensions that scalars depend on."""
    return frozenset(
        axis
        for value in values
        for axis in (
            value.axes
            if isinstance(value, Unknown)
            else (a for a, size in enumerate(value.shape) if size > 1)
        )
    )


class KernelScalars:
    """Values of scalars by number, over the dimensions of the grid and of nested loops.

    Attributes:
        sizes: Size of each dimension: those of the grid, then those of the loops that are open.
        rank: Number of dimensions of the grid.
        dynamic: Dimensions of the grid that are known at run time only.
        unbounded: Those among them without a bound, which count as one step.
    """

    def __init__(self, kernel: KernelModule, prefetched: Sequence[Array | None]) -> None:
        """Compute the scalars of a kernel.

        Args:
            kernel: The kernel.
            prefetched: Values of the scalar arguments behind the grid, where they are known.
        """
        self._kernel = kernel
        self._values: dict[int, Scalar] = {}
        self._arrays: dict[int, Array] = {}
        self._prefetched: set[int] = set()
        self.rank = len(kernel.grid)
        self.dynamic = kernel.grid.count(None)
        self.unbounded = 0
        self.sizes = [*map(self._grid_size, range(self.rank)), *[1] * LOOPS]
        self.everything = frozenset(range(len(self.sizes)))
        # Everything that the grid places sees the same scalars.
        for block in kernel.functions.values():
            arguments = block.arguments[self.rank :][: kernel.scalar_prefetch]
            self._prefetched.update(arguments)
            for number, known in zip(arguments, prefetched, strict=False):
                if known is not None:
                    self._arrays[number] = known
            for axis, number in enumerate(block.arguments[: self.rank]):
                self._values[number] = self.along(axis)

    def _grid_size(self, axis: int) -> int:
        size = self._kernel.grid[axis]
        if size is not None:
            return size
        bounds = [
            bound
            for block in self._kernel.functions.values()
            for bound in self._loaded_with(block, axis)
        ]
        self.unbounded += not bounds
        return min(bounds, default=1)

    def _loaded_with(self, block: KernelBlock, axis: int) -> list[int]:
        """Return the sizes of scalar arrays that a step number indexes: it is less than those."""
        numbers, sizes = {block.arguments[axis]}, []
        for op in block.walk():
            if op.name in ("arith.index_cast", "arith.extsi") and op.operands[0] in numbers:
                numbers.update(op.results)
            elif op.name == "memref.load":
                shape = self._kernel.types[op.operands[0]].shape or ()
                indexed = zip(op.operands[1:], shape, strict=False)
                sizes += [size for n, size in indexed if n in numbers and size is not None]
        return sizes

    def along(self, axis: int) -> Scalar:
        """Return the indices along a dimension."""
        size = self.sizes[axis]
        if size > LARGEST:
            return Unknown(frozenset((axis,)))
        shape = [1] * len(self.sizes)
        shape[axis] = size
        return np.arange(size).reshape(shape)

    def constant(self, value: int) -> Array:
        """Return a scalar that is the same in every step."""
        return np.full((1,) * len(self.sizes), value)

    def __getitem__(self, number: int) -> Scalar:
        """Return the value of a number; unknown if it was not computed."""
        return self._values.get(number, Unknown(self.everything))

    def update(self, numbers: Sequence[int], values: Sequence[Scalar]) -> None:
        """Keep values under their numbers."""
        self._values.update(zip(numbers, values, strict=False))

    def fits(self, *arrays: Array) -> bool:
        """Return whether a value of several others is small enough to be computed."""
        return math.prod(np.broadcast_shapes(*(a.shape for a in arrays))) <= LARGEST

    def computed(self, function: Callable[..., Array], *values: Scalar) -> Scalar:
        """Return a function of scalars; unknown if one of them is."""
        known = [value for value in values if not isinstance(value, Unknown)]
        if len(known) < len(values) or not self.fits(*known):
            return Unknown(axes_of(values))
        return function(*known)

    def compute(self, op: KernelOp) -> None:
        """Keep the results of an operation that are scalars."""
        for number in op.results:
            if self._kernel.types[number].shape is None:
                self._values[number] = self._scalar(op)

    def _scalar(self, op: KernelOp) -> Scalar:
        if op.name == "arith.constant":
            value = op.attributes.get("value")
            if not isinstance(value, int):
                return Unknown(frozenset())
            truth = self._kernel.types[op.results[0]].element == "i1"
            return self.constant(bool(value) if truth else value)
        values = [self[n] for n in op.operands if self._kernel.types[n].shape is None]
        if op.name == "memref.load":
            return self._load(op, values)
        if op.name == "tpu.iteration_bound":
            axis = next((n for n in op.attributes.values() if isinstance(n, int)), self.rank)
            size = self._kernel.grid[axis] if axis < self.rank else None
            return Unknown(frozenset()) if size is None else self.constant(size)
        function = _FUNCTIONS.get(op.name)
        if op.name == "arith.cmpi":
            function = _COMPARISONS[op.attributes["predicate"] % len(_COMPARISONS)]
        if function is None or len(values) < len(op.operands):
            return Unknown(self.everything)
        return self.computed(function, *values)

    def _load(self, op: KernelOp, indices: Sequence[Scalar]) -> Scalar:
        number = op.operands[0]
        known = self._arrays.get(number)
        if known is None:
            # Prefetched scalars don't change from step to step.
            fixed = number in self._prefetched
            return Unknown(axes_of(indices) if fixed else self.everything)

        def load(*indices: Array) -> Array:
            inside = (np.clip(i, 0, n - 1) for i, n in zip(indices, known.shape, strict=True))
            return known[tuple(inside)]

        return self.computed(load, *indices)


def _truncated(a: Array, b: Array) -> Array:
    """Return a quotient rounded towards zero, as in MLIR."""
    quotient = np.abs(a) // np.maximum(np.abs(b), 1)
    return np.where((a < 0) != (b < 0), -quotient, quotient)


def _divisor(b: Array) -> Array:
    """Return a divisor, with 1 for 0: the steps in which it is 0 don't divide."""
    return np.where(b == 0, 1, b)


_FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.divsi": _truncated,
    "arith.divui": _truncated,
    "arith.ceildivsi": lambda a, b: -(-a // _divisor(b)),
    "arith.ceildivui": lambda a, b: -(-a // _divisor(b)),
    "arith.floordivsi": lambda a, b: a // _divisor(b),
    "arith.remsi": lambda a, b: a - _truncated(a, b) * b,
    "arith.remui": lambda a, b: a - _truncated(a, b) * b,
    "arith.andi": lambda a, b: a & b,
    "arith.ori": lambda a, b: a | b,
    "arith.xori": lambda a, b: a ^ b,
    "arith.shli": lambda a, b: a << b,
    "arith.shrsi": lambda a, b: a >> b,
    "arith.shrui": lambda a, b: a >> b,
    "arith.minsi": np.minimum,
    "arith.minui": np.minimum,
    "arith.maxsi": np.maximum,
    "arith.maxui": np.maximum,
    "arith.select": lambda c, a, b: np.where(c != 0, a, b),
    "arith.extui": lambda a: a & 1 if a.dtype == bool else a,
    # The sign of a true bit is negative.
    "arith.extsi": lambda a: -a.astype(int) if a.dtype == bool else a,
    "arith.trunci": lambda a: a,
    "arith.index_cast": lambda a: a,
    "arith.index_castui": lambda a: a,
    "tpu.assume_multiple": lambda a: a,
}

_COMPARISONS: Sequence[Callable[..., Array]] = (
    *(np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal),
    *(np.less, np.less_equal, np.greater, np.greater_equal),
)
"""By the number of MLIR's predicate: eq, ne, slt, sle, sgt, sge, ult, ule, ugt, uge."""


_TRANSCENDENTAL_NAMES = """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf exp exp2 expm1 log log10 log1p log2
    powf rsqrt sin sinh sqrt tan tanh
"""
_TRANSCENDENTAL = frozenset(
    ("tpu.reciprocal", *(f"math.{n}" for n in _TRANSCENDENTAL_NAMES.split()))
)
_VECTOR_NAMES = "extf fptosi fptoui iota sitofp truncf uitofp"
_VECTOR = frozenset(f"tpu.{name}" for name in _VECTOR_NAMES.split())
_REDUCTIONS = ("vector.multi_reduction", "vector.reduction", "tpu.all_reduce")
_COPIES = ("tpu.enqueue_dma", "tpu.enqueue_indirect_dma")


@dataclass
class KernelWork:
    """Work of one run of a kernel on one device.

    Attributes:
        matmul_flops: FLOP of matrix products, by operand dtype.
        transcendentals: Elements of functions such as exp, in whole vector registers.
        vector_ops: Elements of other arithmetic, in whole vector registers.
        hbm_bytes: Bytes that the kernel reads and writes in HBM.
        steps: Steps of the grid; 1 if it is unknown.
        origin: `given` by the caller, `estimate` of the kernel's author, or `module`: counted in
            the Mosaic module.
        seconds: Time that the caller gave.
        products: Number of matrix products by operand dtype, rows, depth and columns; empty if
            they are unknown.
        upper_bound: Whether a condition, an index or the size of the grid depends on data: a block
            under such a condition counts as if it always ran.
        unknown_loops: Loops of unknown trip count, counted as one iteration.
        by_xla: Whether the kernel is XLA's own.
        parallel_steps: Steps that cores may divide among them: the size of a parallel dimension of
            the grid; infinity if it is unknown.
    """

    matmul_flops: dict[str, float] = field(default_factory=dict)
    transcendentals: float = 0.0
    vector_ops: float = 0.0
    hbm_bytes: float = 0.0
    steps: int = 1
    origin: Literal["given", "estimate", "module"] = "module"
    seconds: float | None = None
    products: dict[tuple[str, int, int, int], float] = field(default_factory=dict)
    upper_bound: bool = False
    unknown_loops: int = 0
    by_xla: bool = False
    parallel_steps: float = math.inf

    def busy_share(self, cores: int) -> float:
        """Return the share of a device's cores that the kernel keeps busy.

        Args:
            cores: Number of cores of the device.
        """
        if math.isinf(self.parallel_steps):
            return 1.0
        return self.parallel_steps / math.ceil(self.parallel_steps / cores) / cores


def count_kernel(
    kernel: KernelModule,
    prefetched: Sequence[Array | None] = (),
    operands: Sequence[Shape] = (),
    *,
    sorted_blocks: bool = False,
) -> KernelWork:
    """Return the work of one run of a kernel.

    Args:
        kernel: The kernel.
        prefetched: Values of the scalar arguments behind the grid, where they are known.
        operands: Arrays of the kernel's windows; all in HBM if they are fewer.
        sorted_blocks: Whether unknown block numbers increase along the grid, as the groups of a
            ragged product do.
    """
    counter = _Counter(kernel, prefetched, sorted_blocks)
    counter.run(kernel.body, counter.everywhere)
    if not kernel.windows:
        counter.add_whole(operands)
    for place, window in enumerate(kernel.windows):
        operand = operands[place] if place < len(operands) else None
        if window is not None and (operand is None or operand.memory_space == HBM):
            counter.add_window(place, window, operand)
    for (dtype, m, k, n), runs in counter.count.products.items():
        flops = counter.count.matmul_flops
        flops[dtype] = flops.get(dtype, 0.0) + 2.0 * m * k * n * runs
    return counter.count


def _parallel_steps(kernel: KernelModule) -> float:
    """Return the steps of the first parallel dimension, along which Mosaic divides the grid."""
    sizes = zip(kernel.grid, kernel.parallel, strict=False)
    along = [math.inf if size is None else size for size, parallel in sizes if parallel]
    return next((float(size) for size in along if size > 1), 1.0)


class _Counter:
    def __init__(
        self, kernel: KernelModule, prefetched: Sequence[Array | None], sorted_blocks: bool
    ) -> None:
        self._kernel = kernel
        self._types = kernel.types
        self._sorted = sorted_blocks
        self._scalars = scalars = KernelScalars(kernel, prefetched)
        self._depth = 0
        self.everywhere = scalars.constant(True)
        self.count = KernelWork(
            steps=math.prod(scalars.sizes),
            upper_bound=scalars.dynamic > 0,
            unknown_loops=scalars.unbounded,
            parallel_steps=_parallel_steps(kernel),
        )

    def _runs(self, mask: Array) -> float:
        """Return the number of steps and iterations of a mask."""
        repeated = (
            n for n, length in zip(self._scalars.sizes, mask.shape, strict=True) if length == 1
        )
        return float(np.count_nonzero(mask)) * math.prod(repeated)

    def run(self, block: KernelBlock, mask: Array) -> list[Scalar]:
        """Count the work of a block in the steps of a mask, and return what it yields."""
        yielded: list[Scalar] = []
        for op in block.ops:
            if op.name in ("scf.yield", "func.return", "scf.condition", "tpu.yield"):
                yielded = [self._scalars[number] for number in op.operands]
            elif op.blocks or op.name == "func.call":
                self._nested(op, mask)
            else:
                self._work(op, mask)
                self._scalars.compute(op)
        return yielded

    def _nested(self, op: KernelOp, mask: Array) -> None:
        results: Sequence[Scalar] = ()
        if op.name == "scf.if":
            results = self._branches(op, mask)
        elif op.name == "scf.for":
            self._loop(op, mask)
        elif op.name == "func.call":
            called = self._kernel.functions.get(str(op.attributes.get("callee")), KernelBlock())
            self._scalars.update(called.arguments, [self._scalars[n] for n in op.operands])
            results = self.run(called, mask)
        else:
            has_work = any(map(self._has_work, op.blocks))
            self.count.unknown_loops += op.name == "scf.while" and has_work
            for block in op.blocks:
                results = self.run(block, mask)
            results = () if op.name == "scf.while" else results
        self._scalars.update(op.results, results)

    def _branches(self, op: KernelOp, mask: Array) -> list[Scalar]:
        condition = self._scalars[op.operands[0]]
        yielded = []
        for block, branch in zip(op.blocks, (True, False), strict=False):
            taken_steps = self._scalars.computed(
                lambda m, c, branch=branch: m & ((c != 0) == branch), mask, condition
            )
            yielded.append(self.run(block, self._known(taken_steps, mask, block)))
        if len(yielded) < 2:
            return []
        return [
            self._scalars.computed(lambda c, a, b: np.where(c != 0, a, b), condition, *pair)
            for pair in zip(*yielded, strict=False)
        ]

    def _known(self, steps: Scalar, mask: Array, block: KernelBlock) -> Array:
        """Return the steps in which a block runs; all of its parent if that depends on data."""
        if not isinstance(steps, Unknown):
            return steps
        self.count.upper_bound |= self._has_work(block)
        return mask

    def _loop(self, op: KernelOp, mask: Array) -> None:
        block, scalars = op.blocks[0], self._scalars
        low, high, step = (scalars[number] for number in op.operands[:3])
        trips = scalars.computed(lambda a, b, c: np.maximum(-((a - b) // c), 0), low, high, step)
        if isinstance(trips, Unknown) or self._depth == LOOPS:
            self.count.unknown_loops += self._has_work(block)
            self.run(block, mask)
            return
        axis = scalars.rank + self._depth
        scalars.sizes[axis] = max(int(trips.max()), 1)
        number = scalars.along(axis)
        first = scalars.computed(lambda n, a, c: a + n * c, number, low, step)
        scalars.update(block.arguments[:1], [first])
        inside: Scalar = mask
        if trips.size > 1 or not trips.all():
            inside = scalars.computed(lambda m, n, t: m & (n < t), mask, number, trips)
        self._depth += 1
        self.run(block, self._known(inside, mask, block))
        self._depth -= 1
        scalars.sizes[axis] = 1

    def _has_work(self, block: KernelBlock) -> bool:
        return any(self._is_work(op) for op in block.walk())

    def _is_work(self, op: KernelOp) -> bool:
        if op.name in _COPIES:
            return True
        shaped = any(self._types[n].shape is not None for n in op.results)
        return shaped and (op.name == "tpu.matmul" or bool(self._elements(op)))

    def _work(self, op: KernelOp, mask: Array) -> None:
        count = self.count
        if op.name in _COPIES:
            count.hbm_bytes += self._runs(mask) * self._copied(op)
        elif op.name == "tpu.matmul":
            product, number = self._product(op)
            count.products[product] = count.products.get(product, 0.0) + number * self._runs(mask)
        elif elements := self._elements(op):
            if op.name in _TRANSCENDENTAL:
                count.transcendentals += elements * self._runs(mask)
            else:
                count.vector_ops += elements * self._runs(mask)

    def _elements(self, op: KernelOp) -> int:
        """Return the elements that an operation computes on the vector unit."""
        if not op.results or op.name == "arith.constant":
            return 0
        counted = op.name in _TRANSCENDENTAL or op.name in _VECTOR
        if op.name in _REDUCTIONS:
            return _register_elements(self._types[op.operands[0]])
        if counted or op.name.startswith(("arith.", "math.")):
            return _register_elements(self._types[op.results[0]])
        return 0

    def _product(self, op: KernelOp) -> tuple[tuple[str, int, int, int], int]:
        left, right = (self._types[number] for number in op.operands[:2])
        rows, columns = (tuple(n or 0 for n in t.shape or ()) for t in (left, right))
        text = str(op.attributes.get("dimension_numbers", ""))
        lists = [[int(n) for n in part.split(",") if n.strip()] for part in _LIST.findall(text)]
        if len(lists) < 7:
            transposed = bool(op.attributes.get("transpose_rhs"))
            lists = [[1], [int(transposed)], [0], [1 - transposed], [], [], []]
        depth = math.prod(rows[n] for n in lists[0])
        m = math.prod(rows[n] for n in lists[2])
        n = math.prod(columns[n] for n in lists[3])
        batch = math.prod(rows[n] for n in lists[5])
        passes = 6 if "fp32" in str(op.attributes.get("precision", "")) else 1
        dtype = multiplied_dtype(_hlo_dtype(left.element), _hlo_dtype(right.element), passes)
        return (dtype, m, depth, n), batch

    def _copied(self, op: KernelOp) -> int:
        """Return the bytes that a copy reads and writes in HBM."""
        references = [self._types[n] for n in op.operands if _is_buffer(self._types[n])]
        return sum(_nbytes(t) for t in references[:2] if t.memory in ("hbm", "any"))

    def add_window(
        self, place: int, window: tuple[tuple[int, ...], str], operand: Shape | None
    ) -> None:
        """Add the copies of an array's blocks: one whenever the number of the block changes.

        Args:
            place: Place of the array behind the scalar arguments.
            window: Dimensions of a block, and the function that returns its number.
            operand: The array, if it is known.
        """
        bounds, transform = window
        rank, sizes = self._scalars.rank, self._scalars.sizes
        argument = self._kernel.body.arguments[rank + self._kernel.scalar_prefetch + place]
        bits = _bits(self._types[argument].element)
        block = self._kernel.functions.get(transform)
        indices = [] if block is None else self.run(block, np.zeros_like(self.everywhere))
        if any(isinstance(index, Unknown) for index in indices):
            self.count.upper_bound |= not self._sorted
            if self._sorted and operand is not None:
                blocks = (-(-n // bound) for n, bound in zip(operand.dims, bounds, strict=False))
                indices = list(map(self._increasing, indices, blocks))
        steps = sizes[: max((a for a in axes_of(indices) if a < rank), default=-1) + 1]
        if math.prod(steps) > LARGEST:
            # A number that depends on a dimension changes with it.
            self.count.hbm_bytes += math.prod(steps) * math.prod(bounds) * bits / 8
            return
        copied = np.ones(math.prod(steps), bool)
        elements = np.full(copied.shape, math.prod(bounds), float)
        numbers = [self._by_step(index, steps) for index in indices]
        for number in numbers[:1]:
            copied[1:] = number[1:] != number[:-1]
        for number in numbers[1:]:
            copied[1:] |= number[1:] != number[:-1]
        if operand is not None and len(operand.dims) == len(bounds) == len(indices):
            for index, n, size, bound in zip(indices, numbers, operand.dims, bounds, strict=True):
                if not isinstance(index, Unknown) and bound:
                    # The last block may reach over the end of the array.
                    elements *= np.clip(size - n * bound, 0, bound) / bound
        self.count.hbm_bytes += float(elements[copied].sum()) * bits / 8

    def add_whole(self, operands: Sequence[Shape]) -> None:
        """Add the copies of the arrays of a kernel without a grid to on-chip memory.

        Args:
            operands: The arrays, without scratch memory.
        """
        arguments = self._kernel.body.arguments[self._kernel.scalar_prefetch :]
        for argument, operand in zip(arguments, operands, strict=False):
            array = self._types[argument]
            if operand.memory_space == HBM and array.memory in ("vmem", "smem"):
                self.count.hbm_bytes += _nbytes(array)

    def _by_step(self, index: Scalar, steps: Sequence[int]) -> Array:
        """Return the number of a block by step; all different where it is unknown."""
        if isinstance(index, Unknown):
            numbers: Array = np.zeros((1,) * len(self._scalars.sizes), int)
            for axis in range(len(steps)):
                if axis in index.axes:
                    shape = [1] * len(self._scalars.sizes)
                    shape[axis] = self._scalars.sizes[axis]
                    along = np.arange(self._scalars.sizes[axis]).reshape(shape)
                    numbers = numbers * self._scalars.sizes[axis] + along
        else:
            numbers = index
        first = numbers[(slice(None),) * len(steps) + (0,) * (numbers.ndim - len(steps))]
        return np.broadcast_to(first, tuple(steps)).reshape(-1)

    def _increasing(self, index: Scalar, blocks: int) -> Scalar:
        """Return numbers of blocks that increase along the dimension that they depend on."""
        if not isinstance(index, Unknown) or len(index.axes) != 1:
            return index
        (axis,) = index.axes
        size, along = self._scalars.sizes[axis], self._scalars.along(axis)
        return self._scalars.computed(lambda n: n * blocks // size, along)


_LIST = re.compile(r"\[([^\]]*)\]")


def _register_elements(array: KernelType) -> int:
    """Return the elements of a vector with the padding to whole registers; 0 for a scalar."""
    if array.shape is None:
        return 0
    return in_registers(tuple(n or 0 for n in array.shape))


def _is_buffer(value: KernelType) -> bool:
    return bool(value.shape is not None and value.memory and "semaphore" not in value.memory)


def _bits(element: str) -> int:
    match = re.search(r"\d+", element)
    return max(int(match[0]), 4) if match else 32


def _nbytes(array: KernelType) -> int:
    return math.prod(n or 0 for n in array.shape or ()) * _bits(array.element) // 8


def _hlo_dtype(element: str) -> str:
    """Return the HLO dtype of an element type of MLIR; all integers are taken as signed."""
    return re.sub(r"^[su]?i(?=\d)", "s", element).lower()
