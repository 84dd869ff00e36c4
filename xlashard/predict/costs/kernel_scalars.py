"""Scalars of a kernel that depend on its grid and loops, computed for all steps at once."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xlashard.support.kernel_module import KernelBlock, KernelModule, KernelOp

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
