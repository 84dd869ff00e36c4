"""Kernel of a TPU custom call as plain records: its functions, operations and types."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class KernelType:
    """Type of a value in a kernel.

    Attributes:
        element: Type of its elements in MLIR's syntax: `bf16`, `i32`, `index`.
        shape: Dimensions, None for a dynamic one; None for a scalar.
        memory: Memory of a reference, such as `vmem`, `smem`, `hbm`, `any`; empty for a value.
    """

    element: str
    shape: tuple[int | None, ...] | None = None
    memory: str = ""


@dataclass(frozen=True)
class KernelOp:
    """Operation of a kernel.

    Attributes:
        name: Dialect and name: `tpu.matmul`.
        operands: Numbers of the values that it takes.
        results: Numbers of the values that it returns.
        attributes: Attributes as Python values; text for those without one.
        blocks: First block of each region.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    attributes: Mapping[str, Any]
    blocks: tuple["KernelBlock", ...] = ()


@dataclass(frozen=True)
class KernelBlock:
    """Block of operations.

    Attributes:
        arguments: Numbers of its arguments.
        ops: Its operations in order.
    """

    arguments: tuple[int, ...] = ()
    ops: tuple[KernelOp, ...] = ()

    def walk(self) -> Iterator[KernelOp]:
        """Yield the operations with those inside them."""
        for op in self.ops:
            yield op
            for block in op.blocks:
                yield from block.walk()


@dataclass(frozen=True)
class KernelModule:
    """A kernel with the functions that place its blocks.

    Attributes:
        functions: Body of each function by name; the first is the kernel.
        types: Type of each value.
        grid: Size of each dimension of the grid; None for one that is known at run time only.
        windows: Block of each array, and the function that places it; None for an array that the
            kernel copies itself.
        scalar_prefetch: Number of arguments behind the grid that are in scalar memory before the
            kernel starts.
        parallel: For each dimension of the grid, whether its steps may run on several cores.
    """

    functions: Mapping[str, KernelBlock]
    types: tuple[KernelType, ...]
    grid: tuple[int | None, ...] = ()
    windows: tuple[tuple[tuple[int, ...], str] | None, ...] = ()
    scalar_prefetch: int = 0
    parallel: tuple[bool, ...] = ()

    @cached_property
    def name(self) -> str:
        """Return the name of the kernel."""
        return next(iter(self.functions), "")

    @cached_property
    def body(self) -> KernelBlock:
        """Return the block that runs in each step of the grid."""
        return self.functions.get(self.name, KernelBlock())
