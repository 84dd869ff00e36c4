"""Print, inspect and annotate StableHLO modules."""

import hashlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from xlashard._jax.private import func_dialect, hlo_dialect, ir, mlir, passmanager
from xlashard.support.lazily import dataclass

type Module = Any
type Function = Any
type Value = Any
type Attributes = Mapping[str, Any]
"""Names and values; a value is a bool, an int (i32), a string, or `Parsed` MLIR text."""


# XLA's entry point.
ENTRY = "main"

SHARDY_ATTRIBUTE, GSPMD_ATTRIBUTE = "sdy.sharding", "mhlo.sharding"
"""Names of the attributes by which the partitioners annotate a value."""


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
    code = io.BytesIO()
    module.operation.write_bytecode(file=code)
    return code.getvalue()


_INSPECTION = "InspectSharding"
"""Target of the calls of `jax.debug.inspect_array_sharding`."""


def to_portable_bytecode(module: Module) -> bytes:
    """Serialize a module for a compiler in another process.

    A call that inspects a sharding holds addresses of this process, at which a compiler elsewhere
    ends; it has no effect on values, and is left out.
    """
    code = to_bytecode(module)
    if _INSPECTION.encode() not in code:
        return code
    copy = from_bytecode(code)
    for op in list(operations(copy.operation)):
        if _call_target(op) == _INSPECTION:
            op.erase()
    return to_bytecode(copy)


def from_bytecode(code: bytes) -> Module:
    """Return the module of MLIR bytecode."""
    with mlir.make_ir_context() as context:
        return ir.Module.parse(code, context)


def without_locations(module: Module) -> Module:
    """Return a copy of the module without source locations."""
    with module.context:
        copy = module.operation.clone()
        strip = passmanager.PassManager.parse("builtin.module(strip-debuginfo)")
        # Removing locations keeps a module valid, and the verifier takes longer than the pass.
        strip.enable_verifier(False)
        strip.run(copy)
    return copy


def without_layout_modes(
    module: Module, parameters: Sequence[int], results: Sequence[int]
) -> Module:
    """Return a copy of the module that leaves layouts of its `@main` to the compiler.

    Args:
        module: The module; it is returned itself if there is nothing to leave.
        parameters: Positions of parameters.
        results: Positions of results.
    """
    if not parameters:
        return module
    copy = from_bytecode(to_bytecode(module))
    attributes = functions(copy)[ENTRY].operation.attributes
    with copy.context:
        for name, positions in (("arg_attrs", parameters), ("res_attrs", results)):
            rows = list(attributes[name])
            for i in positions:
                row = {a.name: a.attr for a in rows[i] if a.name != "mhlo.layout_mode"}
                rows[i] = ir.DictAttr.get(row)
            attributes[name] = ir.ArrayAttr.get(rows)
    return copy


_PORTABLE = (
    _INSPECTION,
    "Sharding",
    "SPMD",
    "annotate_device_placement",
    "xla.sdy.",
    "mhlo.",
    "shape_assertion",
)
"""Targets of custom calls that mean the same on every platform, or how they begin."""


def list_unportable_calls(module: Module) -> list[str]:
    """Return the targets of custom calls that one platform alone has."""
    targets = set(map(_call_target, operations(module.operation)))
    return sorted(t for t in targets if t and not t.startswith(_PORTABLE))


def _call_target(op: Any) -> str:
    """Return the target of a custom call; empty for another operation."""
    is_call = op.name == "stablehlo.custom_call"
    return ir.StringAttr(op.attributes["call_target_name"]).value if is_call else ""


def find_call(module: Module, target: str) -> tuple[SourceLocation, ...]:
    """Return the call stack of the first custom call with a target; empty without one."""
    ops = (op for op in operations(module.operation) if _call_target(op) == target)
    op = next(ops, None)
    return () if op is None else tuple(_source_locations(op.location))


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


def functions(module: Module) -> dict[str, Function]:
    """Return the functions of a module by name, in order."""
    return {
        ir.StringAttr(op.attributes["sym_name"]).value: op
        for op in module.body.operations
        if isinstance(op, func_dialect.FuncOp)
    }


def main_function(module: Module) -> Function | None:
    """Return the entry point of a module: `@main`, or the only public function."""
    public = []
    for name, op in functions(module).items():
        if op.is_external:
            continue
        if name == ENTRY:
            return op
        visibility = op.attributes.get("sym_visibility")
        if visibility is None or ir.StringAttr(visibility).value == "public":
            public.append(op)
    return public[0] if len(public) == 1 else None


def function_types(main: Function) -> tuple[list[TensorType | str], list[TensorType | str]]:
    """Return the types of arguments and results; as text unless they are ranked tensors."""
    inputs, results = main.type.inputs, main.type.results
    known = {kind: _tensor_type(kind) for kind in {*inputs, *results}}
    return [known[kind] for kind in inputs], [known[kind] for kind in results]


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
    callees = functions(main.operation.parent.opview)
    return [_is_of_one_device(value, callees) for value in _return(main).operands]


def _return(function: Function) -> Any:
    """Return the operation that ends a function."""
    operations = entry_block(function).operations
    return operations[len(operations) - 1]


def _is_of_one_device(value: Value, callees: Mapping[str, Function]) -> bool:
    """Follow a value through calls to the operation that it comes from."""
    while not isinstance(value.owner, ir.Block):
        op = value.owner.operation
        if op.name != "func.call":
            shardings = map(op.attributes.get, (SHARDY_ATTRIBUTE, GSPMD_ATTRIBUTE))
            return any([s is not None and _ONE_DEVICE.search(str(s)) for s in shardings])
        callee = callees[ir.FlatSymbolRefAttr(op.attributes["callee"]).value]
        value = _return(callee).operands[ir.OpResult(value).result_number]
    return False


_ONE_DEVICE = re.compile(r"maximal|mesh<\[\], device_ids=\[\d+\]>")
"""Shardy's mesh without axes and with one device, or GSPMD's maximal sharding."""


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


@dataclass(frozen=True)
class Constraint:
    """A sharding constraint inside the body, as an operation of GSPMD or of Shardy.

    Attributes:
        text: The HLO sharding, or Shardy's attribute.
        open_dims: Dimensions that the partitioner may shard further; Shardy's text contains them.
        shardy: True for an operation of Shardy.
    """

    text: str
    open_dims: tuple[int, ...] = ()
    shardy: bool = False


def _attribute(value: Any) -> Any:
    if isinstance(value, Parsed):
        return ir.Attribute.parse(str(value))
    if isinstance(value, bool):
        return ir.BoolAttr.get(value)
    if isinstance(value, int):
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(32), value)
    return ir.StringAttr.get(value)


def _merged(old: Any, new: Sequence[Attributes]) -> Any:
    # By type too, as True equals 1.
    known: dict[tuple[type, Any], Any] = {}
    rows: list[Any] = []
    # Most arguments of a large program are alike.
    rows_by_key: dict[tuple[Any, ...], Any] = {}
    for i, attributes in enumerate(new):
        before = None if old is None else old[i]
        key = before, *attributes.items(), *map(type, attributes.values())
        if key not in rows_by_key:
            row = {} if before is None else {a.name: a.attr for a in ir.DictAttr(before)}
            for name, value in attributes.items():
                kind = type(value), value
                row[name] = known.get(kind) or known.setdefault(kind, _attribute(value))
            rows_by_key[key] = ir.DictAttr.get(row)
        rows.append(rows_by_key[key])
    return ir.ArrayAttr.get(rows)


def make_entry(main: Function) -> None:
    """Make a function the entry point: public, and named `main`."""
    operation = main.operation
    with within(main):
        name = ir.StringAttr(operation.attributes["sym_name"]).value
        if name != ENTRY:
            ir.SymbolTable.replace_all_symbol_uses(name, ENTRY, operation.parent)
            operation.attributes["sym_name"] = ir.StringAttr.get(ENTRY)
        operation.attributes["sym_visibility"] = ir.StringAttr.get("public")


def annotate(
    main: Function,
    args: Sequence[Attributes],
    results: Sequence[Attributes],
    module_attributes: Attributes,
) -> None:
    """Set attributes of a function's arguments and results, and of its module.

    Existing attributes of other names stay.

    Raises:
        ValueError: If MLIR can't parse an attribute's text.
    """
    module = main.operation.parent.opview
    with within(main):
        attributes = main.operation.attributes
        try:
            for name, rows in (("arg_attrs", args), ("res_attrs", results)):
                attributes[name] = _merged(attributes.get(name), rows)
            for name, value in module_attributes.items():
                module.operation.attributes[name] = _attribute(value)
        except ir.MLIRError as error:
            # no-catalogue: raises an error of JAX or of the caller again
            raise ValueError(str(error)) from None


def within(main: Function) -> Any:
    return ir.Location.unknown(main.operation.context)


def sharding_call(value: Value, constraint: Constraint) -> Any:
    """Insert and return GSPMD's sharding constraint of a value."""
    dims = ",".join(map(str, constraint.open_dims))
    op = mlir.custom_call(
        "Sharding",
        result_types=[value.type],
        operands=[value],
        backend_config=f"unspecified_dims=[{dims}]" if dims else "",
        api_version=1,
    )
    op.attributes[GSPMD_ATTRIBUTE] = ir.StringAttr.get(constraint.text)
    return op


def shardy_constraint(value: Value, text: str) -> Value:
    """Insert Shardy's sharding constraint of a value, and return its result."""
    return mlir.dialects.sdy.sharding_constraint(value, ir.Attribute.parse(text))


def constrain_boundary(
    main: Function,
    args: Sequence[Constraint | None],
    results: Sequence[Sequence[Constraint]],
) -> None:
    """Insert sharding constraints after the arguments and before the results."""
    if not any(args) and not any(results):
        return
    block, ret = entry_block(main), _return(main)
    with within(main):
        with ir.InsertionPoint.at_block_begin(block):
            for value, constraint in zip(block.arguments, args, strict=True):
                if constraint is not None:
                    op = sharding_call(value, constraint)
                    value.replace_all_uses_except(op.result, op.operation)
        with ir.InsertionPoint(ret):
            for i, constraint in ((i, c) for i, each in enumerate(results) for c in each):
                if constraint.shardy:
                    ret.operands[i] = shardy_constraint(ret.operands[i], constraint.text)
                else:
                    pinned = sharding_call(ret.operands[i], constraint).result
                    # GSPMD drops a constraint whose value is a result.
                    ret.operands[i] = hlo_dialect.optimization_barrier([pinned])


def annotate_memory_kinds(main: Function, memory_kinds: Sequence[str | None]) -> None:
    """Annotate results that must be in another memory than the device's default one."""
    if not any(memory_kinds):
        return
    ret = _return(main)
    with within(main), ir.InsertionPoint(ret):
        for i, kind in enumerate(memory_kinds):
            if kind is not None:
                ret.operands[i] = _placed(ret.operands[i], kind)


def _placed(value: Value, memory_kind: str) -> Value:
    op = mlir.custom_call(
        "annotate_device_placement",
        result_types=[value.type],
        operands=[value],
        has_side_effect=True,
        api_version=1,
    )
    op.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
        {"_xla_buffer_placement": ir.StringAttr.get(memory_kind)}
    )
    return op.result
