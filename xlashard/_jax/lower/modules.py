"""Print and inspect StableHLO modules."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, NamedTuple

from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir, passmanager
from jax._src.lib.mlir.dialects import func as func_dialect

from xlashard.lazily import dataclass, deferred

if TYPE_CHECKING:
    from jaxlib.mlir.dialects import mhlo
else:
    # Importing it takes a tenth of the time of xlashard.
    mhlo = deferred("jaxlib.mlir.dialects.mhlo")


type Module = Any
type Function = Any
type Value = Any
type Attributes = Mapping[str, Any]
"""Names and values; a value is a bool, an int (i32), a string, or `Parsed` MLIR text."""


# XLA's entry point.
ENTRY = "main"


class Parsed(str):
    """Value of an attribute as MLIR text."""


@dataclass(frozen=True)
class TensorType:
    """Type of a tensor.

    Attributes:
        shape: Its dimensions, None for a dynamic one.
        element: The type of its elements in MLIR's syntax: `f32`, `ui8`, `complex<f64>`.
    """

    shape: tuple[int | None, ...]
    element: str

    def __str__(self) -> str:
        sizes = "".join(f"{'?' if size is None else size}x" for size in self.shape)
        return f"tensor<{sizes}{self.element}>"


class SourceLocation(NamedTuple):
    """A line of source and the name of its function."""

    file: str
    line: int
    function: str


def to_text(module: Module, *, debug_info: bool = False) -> str:
    """Return the module as MLIR text."""
    return mlir.module_to_string(module, enable_debug_info=debug_info)


def to_bytecode(module: Module) -> bytes:
    """Return the module as MLIR bytecode."""
    return mlir.module_to_bytecode(module)


def to_mhlo(module: Module) -> Module:
    """Return the module with its operations in MHLO, the dialect before StableHLO."""
    context = mlir.make_ir_context()
    with context:
        mhlo.register_mhlo_dialect(context)
        mhlo.register_mhlo_passes()
        converted = ir.Module.parse(to_bytecode(module))
        passmanager.PassManager.parse("builtin.module(stablehlo-legalize-to-hlo)").run(
            converted.operation
        )
    return converted


def without_locations(module: Module) -> Module:
    """Return a copy of the module without source locations."""
    with module.context:
        copy = module.operation.clone()
        strip = passmanager.PassManager.parse("builtin.module(strip-debuginfo)")
        # Removing locations keeps a module valid, and the verifier takes longer than the pass.
        strip.enable_verifier(False)
        strip.run(copy)
    return copy


def source_locations(module: Module) -> Iterator[tuple[SourceLocation, ...]]:
    """Yield the call stack that each operation of a module comes from, innermost call first."""
    for op in operations(module.operation):
        yield tuple(_source_locations(op.location))


def _source_locations(location: Any, function: str = "") -> Iterator[SourceLocation]:
    if isinstance(location, ir.FileLineColLoc):
        yield SourceLocation(location.filename, location.start_line, function)
    elif isinstance(location, ir.NameLoc):
        yield from _source_locations(location.child_loc, location.name_str)
    elif isinstance(location, ir.CallSiteLoc):
        yield from _source_locations(location.callee)
        yield from _source_locations(location.caller)


def digest(module: Module) -> str:
    """Return a digest of a module, source locations excepted."""
    return hashlib.sha256(to_bytecode(without_locations(module))).hexdigest()


def main_function(module: Module) -> Function | None:
    """Return the entry point of a module: `@main`, or the only public function."""
    public = []
    for op in module.body.operations:
        if not isinstance(op, func_dialect.FuncOp) or op.is_external:
            continue
        if ir.StringAttr(op.attributes["sym_name"]).value == ENTRY:
            return op
        visibility = op.attributes.get("sym_visibility")
        if visibility is None or ir.StringAttr(visibility).value == "public":
            public.append(op)
    return public[0] if len(public) == 1 else None


def function_names(module: Module) -> list[str]:
    """Return the names of a module's functions, in order."""
    return [
        ir.StringAttr(op.attributes["sym_name"]).value
        for op in module.body.operations
        if isinstance(op, func_dialect.FuncOp)
    ]


def call_cycle(module: Module) -> list[str]:
    """Return the names of functions that call each other in a cycle; an empty list without one."""
    calls = {
        ir.StringAttr(op.attributes["sym_name"]).value: _callees(op)
        for op in module.body.operations
        if isinstance(op, func_dialect.FuncOp)
    }
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def _callees(function: Function) -> list[str]:
    return [
        ir.FlatSymbolRefAttr(op.attributes["callee"]).value
        for op in operations(function.operation)
        if op.name == "func.call"
    ]


def function_types(main: Function) -> tuple[list[TensorType | str], list[TensorType | str]]:
    """Return the types of arguments and results; as text unless they are ranked tensors."""
    kind = main.type
    return [_tensor_type(t) for t in kind.inputs], [_tensor_type(t) for t in kind.results]


def _tensor_type(kind: Any) -> TensorType | str:
    if not isinstance(kind, ir.RankedTensorType):
        return str(kind)
    tensor = ir.RankedTensorType(kind)
    shape = tuple(
        [None if tensor.is_dynamic_dim(i) else size for i, size in enumerate(tensor.shape)]
    )
    return TensorType(shape, str(tensor.element_type))


def single_device_results(main: Function) -> list[bool]:
    """Return for each result True if it comes from an operation that runs on one device alone.

    A callback into Python is such an operation. As a result of a program over several devices its
    value is zeros on the other devices.
    """
    functions = {
        ir.StringAttr(op.attributes["sym_name"]).value: op
        for op in main.operation.parent.opview.body.operations
        if isinstance(op, func_dialect.FuncOp)
    }
    return [_is_of_one_device(value, functions) for value in _returned(main)]


def _returned(function: Function) -> Sequence[Value]:
    block = entry_block(function)
    return block.operations[len(block.operations) - 1].operands


def _is_of_one_device(value: Value, functions: Mapping[str, Function]) -> bool:
    """Follow a value through calls to the operation that it comes from."""
    while not isinstance(value.owner, ir.Block):
        op = value.owner.operation
        if op.name != "func.call":
            shardings = map(op.attributes.get, ("sdy.sharding", "mhlo.sharding"))
            return any([s is not None and _ONE_DEVICE.search(str(s)) for s in shardings])
        callee = functions[ir.FlatSymbolRefAttr(op.attributes["callee"]).value]
        value = _returned(callee)[ir.OpResult(value).result_number]
    return False


_ONE_DEVICE = re.compile(r"maximal|mesh<\[\], device_ids=\[\d+\]>")
"""Shardy's mesh without axes and with one device, or GSPMD's maximal sharding."""


def function_attributes(main: Function, of: str) -> list[dict[str, Any]]:
    """Return the attributes of each argument or result as Python values or `Parsed` text.

    Args:
        main: The function.
        of: `"arg_attrs"` or `"res_attrs"`.
    """
    kinds = main.type.inputs if of == "arg_attrs" else main.type.results
    rows = main.operation.attributes.get(of)
    if rows is None:
        return [{} for _ in kinds]
    return [{a.name: _python_value(a.attr) for a in ir.DictAttr(row)} for row in rows]


def module_attribute(module: Module, name: str) -> Any:
    """Return an attribute of the module, None if the module lacks it."""
    value = module.operation.attributes.get(name)
    return None if value is None else _python_value(value)


def _python_value(attribute: Any) -> Any:
    for kind in (ir.BoolAttr, ir.IntegerAttr, ir.StringAttr):
        if isinstance(attribute, kind):
            return kind(attribute).value
    return Parsed(str(attribute))


def operations(op: Any) -> Iterator[Any]:
    """Yield an operation and all operations inside it."""
    yield op
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from operations(inner.operation)


def entry_block(main: Function) -> Any:
    return main.regions[0].blocks[0]


def verify(module: Module) -> None:
    """Verify a module.

    Raises:
        ValueError: With the verifier's message.
    """
    try:
        module.operation.verify()
    except ir.MLIRError as error:
        # no-catalogue: raises an error of JAX or of the caller again
        raise ValueError(str(error)) from None


def sanitize(name: str) -> str:
    """Return a name with every character replaced that a module's name can't contain."""
    return mlir.sanitize_name(name).rstrip("_") or "module"
