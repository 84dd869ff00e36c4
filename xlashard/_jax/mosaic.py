"""Read Mosaic modules: the kernels of Pallas and of XLA, as they lie in a TPU custom call."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from xlashard._jax.private import ir, mlir, passmanager, tpu_dialect

_DYNAMIC = -(1 << 63)
_OF_FUNCTIONS = ("iteration_bounds", "scalar_prefetch", "window_params")


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
    """

    functions: Mapping[str, KernelBlock]
    types: tuple[KernelType, ...]
    grid: tuple[int | None, ...] = ()
    windows: tuple[tuple[tuple[int, ...], str] | None, ...] = ()
    scalar_prefetch: int = 0

    @cached_property
    def name(self) -> str:
        """Return the name of the kernel."""
        return next(iter(self.functions), "")

    @cached_property
    def body(self) -> KernelBlock:
        """Return the block that runs in each step of the grid."""
        return self.functions.get(self.name, KernelBlock())


def read_kernel(body: bytes) -> KernelModule | None:
    """Read a Mosaic module, in MLIR text or bytecode.

    Args:
        body: The module in a custom call's configuration.

    Returns:
        The kernel; None for a module that this release of JAX can't read.
    """
    context = mlir.make_ir_context()
    tpu_dialect.register_dialect(context)
    # The dialect of serialized modules has no name in Python.
    context.allow_unregistered_dialects = True
    try:
        with context, ir.Location.unknown(context):
            module = ir.Module.parse(body)
            if "stable_mosaic.version" in module.operation.attributes:
                serde = "builtin.module(mosaic-serde{serialize=false})"
                passmanager.PassManager.parse(serde).run(module.operation)
            return _MosaicReader().module(module)
    except (ir.MLIRError, ValueError, RuntimeError):
        return None


@dataclass
class _MosaicReader:
    """Numbers of values by MLIR value."""

    numbers: dict[Any, int] = field(default_factory=dict)
    types: list[KernelType] = field(default_factory=list)

    def module(self, module: Any) -> KernelModule | None:
        entries = [
            op.operation for op in module.body.operations if op.operation.name == "func.func"
        ]
        if not entries:
            return None
        functions = {
            ir.StringAttr(op.attributes["sym_name"]).value: self._block(op.regions[0].blocks[0])
            for op in entries
        }
        attributes = entries[0].attributes
        read = {name: _plain(attributes[name]) for name in _OF_FUNCTIONS if name in attributes}
        return KernelModule(
            functions,
            tuple(self.types),
            tuple(None if n == _DYNAMIC else n for n in read.get("iteration_bounds", ())),
            tuple(
                (window["window_bounds"], window["transform_indices"])
                if "transform_indices" in window and "window_bounds" in window
                else None
                for window in read.get("window_params", ())
            ),
            read.get("scalar_prefetch", 0),
        )

    def _block(self, block: Any) -> KernelBlock:
        arguments = tuple(map(self._number, block.arguments))
        return KernelBlock(arguments, tuple(self._op(op.operation) for op in block.operations))

    def _op(self, op: Any) -> KernelOp:
        return KernelOp(
            op.name,
            tuple(map(self._number, op.operands)),
            tuple(map(self._number, op.results)),
            {name: _plain(op.attributes[name]) for name in op.attributes},
            tuple(self._block(r.blocks[0]) for r in op.regions if len(r.blocks)),
        )

    def _number(self, value: Any) -> int:
        if value not in self.numbers:
            self.numbers[value] = len(self.types)
            self.types.append(_type(value.type))
        return self.numbers[value]


def _type(mlir_type: Any) -> KernelType:
    if not isinstance(mlir_type, ir.ShapedType):
        return KernelType(str(mlir_type))
    shape = tuple(
        None if mlir_type.is_dynamic_dim(n) else mlir_type.get_dim_size(n)
        for n in range(mlir_type.rank)
    )
    memory = ""
    if isinstance(mlir_type, ir.MemRefType):
        memory = str(mlir_type.memory_space).partition("memory_space<")[2].rstrip(">")
    return KernelType(str(mlir_type.element_type), shape, memory)


def _plain(attribute: Any) -> Any:
    """Return an attribute as a Python value; its text for one without a Python value."""
    match attribute:
        case ir.DictAttr():
            return {item.name: _plain(item.attr) for item in attribute}
        case ir.ArrayAttr() | ir.DenseI64ArrayAttr() | ir.DenseI32ArrayAttr():
            return tuple(n if isinstance(n, int) else _plain(n) for n in attribute)
        case ir.StringAttr() | ir.FlatSymbolRefAttr() | ir.IntegerAttr() | ir.BoolAttr():
            return attribute.value
        case _:
            return str(attribute)
