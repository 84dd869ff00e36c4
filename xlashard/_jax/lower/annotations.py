"""Write attributes, shardings and memory kinds into StableHLO modules."""

from collections.abc import Sequence
from typing import Any

from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo

from xlashard._jax.lower.modules import ENTRY, Attributes, Function, Parsed, Value, entry_block
from xlashard.lazily import dataclass


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


def drop_attributes(main: Function, of: str, chosen: Sequence[bool], names: Sequence[str]) -> None:
    """Remove attributes of the chosen arguments or results.

    Args:
        main: The function.
        of: `"arg_attrs"` or `"res_attrs"`.
        chosen: For each argument or result, True to remove its attributes.
        names: The names of the attributes.
    """
    rows = main.operation.attributes.get(of)
    if rows is None or not any(chosen):
        return
    with _within(main):
        left = []
        for row, drop in zip(rows, chosen, strict=True):
            kept = {a.name: a.attr for a in ir.DictAttr(row) if not (drop and a.name in names)}
            left.append(ir.DictAttr.get(kept))
        main.operation.attributes[of] = ir.ArrayAttr.get(left)


def _attribute(value: Any) -> Any:
    if isinstance(value, Parsed):
        return ir.Attribute.parse(str(value))
    if isinstance(value, bool):
        return ir.BoolAttr.get(value)
    if isinstance(value, int):
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(32), value)
    return ir.StringAttr.get(value)


def _merged(old: Any, new: Sequence[Attributes]) -> Any:
    rows = []
    for i, attributes in enumerate(new):
        row = {} if old is None else {a.name: a.attr for a in ir.DictAttr(old[i])}
        row.update({name: _attribute(value) for name, value in attributes.items()})
        rows.append(ir.DictAttr.get(row))
    return ir.ArrayAttr.get(rows)


def make_entry(main: Function) -> None:
    """Make a function the entry point: public, and named `main`."""
    operation = main.operation
    with _within(main):
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
    with _within(main):
        attributes = main.operation.attributes
        try:
            for name, rows in (("arg_attrs", args), ("res_attrs", results)):
                attributes[name] = _merged(attributes.get(name), rows)
            for name, value in module_attributes.items():
                module.operation.attributes[name] = _attribute(value)
        except ir.MLIRError as error:
            # no-catalogue: raises an error of JAX or of the caller again
            raise ValueError(str(error)) from None


def _within(main: Function) -> Any:
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
    op.attributes["mhlo.sharding"] = ir.StringAttr.get(constraint.text)
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
    block = entry_block(main)
    ret = block.operations[len(block.operations) - 1]
    with _within(main):
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
                    ret.operands[i] = hlo.optimization_barrier([pinned])


def annotate_memory_kinds(main: Function, memory_kinds: Sequence[str | None]) -> None:
    """Annotate results that must be in another memory than the device's default one."""
    if not any(memory_kinds):
        return
    block = entry_block(main)
    ret = block.operations[len(block.operations) - 1]
    with _within(main), ir.InsertionPoint(ret):
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
