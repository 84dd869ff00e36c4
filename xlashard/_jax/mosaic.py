"""Read Mosaic modules: the kernels of Pallas and of XLA, as they lie in a TPU custom call."""

from dataclasses import dataclass, field
from typing import Any

from xlashard._jax.private import ir, mlir, passmanager, tpu_dialect
from xlashard.support.kernel_module import KernelBlock, KernelModule, KernelOp, KernelType

_DYNAMIC = -(1 << 63)
_OF_FUNCTIONS = ("iteration_bounds", "scalar_prefetch", "window_params", "dimension_semantics")


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
            tuple("parallel" in kind for kind in read.get("dimension_semantics", ())),
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
