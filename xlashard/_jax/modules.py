"""StableHLO modules as jaxlib's MLIR bindings hold them: parse, print, annotate."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import func as func_dialect
from jax._src.lib.mlir.dialects import hlo

type Module = Any
type Attributes = Mapping[str, Any]
"""Names and values; a value is a bool, an int (i32), a text, or `Parsed` MLIR text."""

MlirError = ir.MLIRError


class Parsed(str):
    """An attribute's value given as MLIR text."""


def to_text(module: Module, *, debug_info: bool = False) -> str:
    """The module as MLIR text."""
    return mlir.module_to_string(module, enable_debug_info=debug_info)


def to_bytecode(module: Module) -> bytes:
    """The module as MLIR bytecode."""
    return mlir.module_to_bytecode(module)


def from_source(source: str | bytes) -> Module:
    """Reads a module from MLIR text, MLIR bytecode or a portable StableHLO artifact.

    Raises:
        ValueError: With the parser's own messages, if it is none of them.
    """
    context = mlir.make_ir_context()
    portable = isinstance(source, bytes)
    with context, ir.Location.unknown(context):
        try:
            return ir.Module.parse(source)
        except ir.MLIRError as error:
            if not portable:
                raise ValueError(str(error)) from None
            try:
                return hlo.deserialize_portable_artifact(context, source)
            except Exception:
                raise ValueError(str(error)) from None


def clone(module: Module) -> Module:
    """A module of its own that may be annotated without touching the first."""
    with module.context, ir.Location.unknown(module.context):
        return ir.Module.parse(to_bytecode(module))


def main_function(module: Module) -> Any | None:
    """The `func.func` that a program starts in: `@main`, or the only public function."""
    public = []
    for op in module.body.operations:
        if not isinstance(op, func_dialect.FuncOp):
            continue
        if ir.StringAttr(op.attributes["sym_name"]).value == "main":
            return op
        if "sym_visibility" not in op.attributes:
            public.append(op)
    return public[0] if len(public) == 1 else None


def function_types(main: Any) -> tuple[list[tuple[tuple[int, ...], Any]], list[Any]]:
    """`(shape, dtype)` of the arguments and of the results; None for what is no static array."""
    kind = main.type
    return [_shape_dtype(t) for t in kind.inputs], [_shape_dtype(t) for t in kind.results]


def _shape_dtype(kind: Any) -> Any:
    if not isinstance(kind, ir.RankedTensorType):
        return None
    tensor = ir.RankedTensorType(kind)
    if not tensor.has_static_shape:
        return None
    return tuple(tensor.shape), str(tensor.element_type)


def _attribute(value: Any) -> Any:
    if isinstance(value, Parsed):
        return ir.Attribute.parse(str(value))
    if isinstance(value, bool):
        return ir.BoolAttr.get(value)
    if isinstance(value, int):
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(32), value)
    return ir.StringAttr.get(value)


def _merged(old: Any, count: int, new: Sequence[Attributes]) -> Any:
    rows = []
    for i in range(count):
        row = {a.name: a.attr for a in ir.DictAttr(old[i])} if len(old) else {}
        row.update({name: _attribute(value) for name, value in new[i].items()})
        rows.append(ir.DictAttr.get(row))
    return ir.ArrayAttr.get(rows)


def annotate(
    main: Any,
    args: Sequence[Attributes],
    results: Sequence[Attributes],
    module_attributes: Attributes,
) -> None:
    """Writes attributes on a function's arguments and results, and on its module.

    Raises:
        ValueError: If an attribute's text is not what MLIR reads.
    """
    module = main.operation.parent.opview
    context = main.operation.context
    with context, ir.Location.unknown(context):
        try:
            old_args = main.operation.attributes.get("arg_attrs", ())
            old_results = main.operation.attributes.get("res_attrs", ())
            main.arg_attrs = _merged(old_args, len(args), args)
            main.operation.attributes["res_attrs"] = _merged(old_results, len(results), results)
            for name, value in module_attributes.items():
                module.operation.attributes[name] = _attribute(value)
        except ir.MLIRError as error:
            raise ValueError(str(error)) from None


def place_results(main: Any, memory_kinds: Sequence[str | None]) -> None:
    """Marks results that must end in a memory other than the device's default one."""
    context = main.operation.context
    with context, ir.Location.unknown(context):
        block = main.regions[0].blocks[0]
        ret = block.operations[len(block.operations) - 1]
        with ir.InsertionPoint(ret):
            for i, kind in enumerate(memory_kinds):
                if kind is None:
                    continue
                value = ret.operands[i]
                op = mlir.custom_call(
                    "annotate_device_placement",
                    result_types=[value.type],
                    operands=[value],
                    has_side_effect=True,
                    api_version=1,
                )
                op.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
                    {"_xla_buffer_placement": ir.StringAttr.get(kind)}
                )
                ret.operands[i] = op.result


def verify(module: Module) -> None:
    """Checks a module.

    Raises:
        ValueError: With what the verifier found.
    """
    try:
        module.operation.verify()
    except ir.MLIRError as error:
        raise ValueError(str(error)) from None


def sanitize(name: str) -> str:
    """A function's name as a module may bear it."""
    return mlir.sanitize_name(name).rstrip("_")
