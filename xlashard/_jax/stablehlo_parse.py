"""Read, check and convert StableHLO modules, and drop their annotations."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import Any

import numpy as np

from xlashard._jax import stablehlo_modules as modules
from xlashard._jax.lowering import LoweredBody
from xlashard._jax.private import hlo_dialect, ir, mhlo, mlir, passmanager, sdy
from xlashard._jax.stablehlo_modules import GSPMD_ATTRIBUTE, SHARDY_ATTRIBUTE, Function, Module

_PORTABLE = "vhlo."
_PLACE = re.compile(r':(\d+):(\d+)"?\)?$')


@dataclass(frozen=True)
class NamedMesh:
    """Mesh of a module, with named axes.

    Attributes:
        axes: Names and sizes, major to minor.
        device_ids: The order of its devices, empty for the default order.
    """

    axes: tuple[tuple[str, int], ...]
    device_ids: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(size for _, size in self.axes)

    def __str__(self) -> str:
        return ", ".join(f"{name!r}={size}" for name, size in self.axes)


def read_module(source: str | bytes) -> Module:
    """Parse a module from MLIR text, MLIR bytecode or a portable StableHLO artifact.

    Raises:
        ValueError: With the line and the error there, for any other source.
    """
    context = mlir.make_ir_context()
    with context, ir.Location.unknown(context):
        try:
            module = ir.Module.parse(source)
        except ir.MLIRError as error:
            raise ValueError(_diagnosis(error, source)) from None
        if not any(op.operation.name.startswith(_PORTABLE) for op in module.body.operations):
            return module
        try:
            return hlo_dialect.deserialize_portable_artifact(context, source)
        except Exception as error:
            # no-catalogue: no supported JAX writes one
            raise ValueError(f"the portable artifact is of a version too new: {error}") from None


def _diagnosis(error: Any, source: str | bytes) -> str:
    diagnostics = list(error.error_diagnostics)
    if not diagnostics:
        return str(error)
    first = diagnostics[0]
    place = _PLACE.search(str(first.location))
    if isinstance(source, bytes):
        return f"{first.message} (in {len(source)} bytes that should be MLIR text or bytecode)"
    if place is None:
        return first.message
    line, column = map(int, place.groups())
    lines = source.splitlines()
    if not 0 < line <= len(lines):
        return f"line {line}: {first.message}"
    shown = lines[line - 1]
    return f"line {line}, column {column}: {first.message}\n{shown}\n{' ' * (column - 1)}^"


def sharding_dialects(module: Module) -> tuple[str | None, str | None]:
    """Return an example of the annotations of Shardy and of GSPMD in a module, each or None."""
    shardy = gspmd = None
    for op in modules.operations(module.operation):
        names = {name for name, _ in _shardings(op)}
        if SHARDY_ATTRIBUTE in names:
            shardy = shardy or SHARDY_ATTRIBUTE
        elif op.name.startswith("sdy.") and op.name != "sdy.mesh":
            shardy = shardy or op.name
        if GSPMD_ATTRIBUTE in names:
            gspmd = GSPMD_ATTRIBUTE
    return shardy, gspmd


def _shardings(op: Any) -> Iterator[tuple[str, Any]]:
    """Yield the sharding attributes of an operation, and of a function's arguments and results."""
    rows = [op.attributes.get(of) or () for of in ("arg_attrs", "res_attrs")]
    inner = ((a.name, a.attr) for row in chain(*rows) for a in ir.DictAttr(row))
    own = ((name, op.attributes.get(name)) for name in _SHARDINGS)
    yield from ((name, text) for name, text in (*inner, *own) if name in _SHARDINGS and text)


_SHARDINGS = (SHARDY_ATTRIBUTE, GSPMD_ATTRIBUTE)


def gspmd_texts(module: Module) -> set[str]:
    """Return the texts of all HLO shardings in a module."""
    pairs = chain.from_iterable(map(_shardings, modules.operations(module.operation)))
    return {ir.StringAttr(text).value for name, text in pairs if name == GSPMD_ATTRIBUTE}


def named_meshes(module: Module) -> list[NamedMesh]:
    """Return the meshes with axes that a module has symbols of."""
    meshes = []
    for op in module.body.operations:
        if op.operation.name != "sdy.mesh":
            continue
        mesh = sdy.MeshAttr(op.attributes["mesh"])
        axes = [sdy.MeshAxisAttr(a) for a in mesh.axes]
        if axes:
            meshes.append(NamedMesh(tuple((a.name, a.size) for a in axes), tuple(mesh.device_ids)))
    return meshes


def dtype_of(element: str) -> np.dtype[Any] | None:
    """Return the dtype of a tensor's elements, None for a type that arrays don't have."""
    return _dtypes().get(element)


@lru_cache(maxsize=1)
def _dtypes() -> dict[str, np.dtype[Any]]:
    with mlir.make_ir_context():
        dtypes = {str(make()): dtype for dtype, make in mlir._dtype_to_ir_type.items()}
    # JAX has more dtypes of one bit.
    return {**dtypes, "i1": np.dtype(bool)}


def body_of_module(module: Module) -> LoweredBody:
    """Return a module without effects or callbacks as a lowered body."""
    return LoweredBody(module, modules.main_function(module))


def call_cycle(module: Module) -> list[str]:
    """Return the names of functions that call each other in a cycle; an empty list without one."""
    calls = {name: _callees(function) for name, function in modules.functions(module).items()}
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def _callees(function: Function) -> list[str]:
    return [
        ir.FlatSymbolRefAttr(op.attributes["callee"]).value
        for op in modules.operations(function.operation)
        if op.name == "func.call"
    ]


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
    return modules.Parsed(str(attribute))


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
    with modules.within(main):
        left = []
        for row, drop in zip(rows, chosen, strict=True):
            kept = {a.name: a.attr for a in ir.DictAttr(row) if not (drop and a.name in names)}
            left.append(ir.DictAttr.get(kept))
        main.operation.attributes[of] = ir.ArrayAttr.get(left)


def to_mhlo(module: Module) -> Module:
    """Return the module with its operations in MHLO, the dialect before StableHLO."""
    context = mlir.make_ir_context()
    with context:
        mhlo.register_mhlo_dialect(context)
        mhlo.register_mhlo_passes()
        converted = ir.Module.parse(modules.to_bytecode(module))
        passmanager.PassManager.parse("builtin.module(stablehlo-legalize-to-hlo)").run(
            converted.operation
        )
    return converted
