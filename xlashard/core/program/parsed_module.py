"""StableHLO modules from outside of JAX: their attributes, and programs made of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xlashard._jax import stablehlo_modules as modules
from xlashard._jax import stablehlo_parse
from xlashard._jax.runtime import executables
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.stablehlo_modules import GSPMD_ATTRIBUTE, SHARDY_ATTRIBUTE
from xlashard.core.program.lowered import LoweredProgram, lower_program
from xlashard.core.program.plan import Partitioner, ProgramPlan, ValuePlan
from xlashard.core.sharding import Mesh
from xlashard.errors import GeometryError, ModuleError
from xlashard.geometry import TileAssignment, Tiling

_ALIAS, _DONOR = "tf.aliasing_output", "jax.buffer_donor"


@dataclass(frozen=True)
class ModuleValue:
    """An argument or result of a module, with the attributes of the module.

    Attributes:
        path: `args[0]`, `results[2]`.
        plan: Its plan by the module alone, named as there, else by the path.
        aval: Its abstract value.
        tiles: Its sharding in HLO syntax; None without one, or for one of Shardy.
        donated: Whether the module lets its buffers be reused.
    """

    path: str
    plan: ValuePlan
    aval: Any
    tiles: str | None
    donated: bool


@dataclass(frozen=True, eq=False)
class ParsedModule:
    """A parsed module, before its annotation.

    Attributes:
        module: The module.
        name: Its name, or an empty text.
        args: Its arguments.
        results: Its results.
        aliased: Positions of results that take over an argument's buffers.
        num_partitions: Its number of devices; None if unspecified.
        partitioner: Partitioner of its annotations; None without annotations.
        meshes: Meshes of its annotations.
    """

    module: modules.Module
    name: str
    args: tuple[ModuleValue, ...]
    results: tuple[ModuleValue, ...]
    aliased: tuple[int, ...]
    num_partitions: int | None
    partitioner: Partitioner | None
    meshes: tuple[stablehlo_parse.NamedMesh, ...]

    def mesh_on(self, devices: Sequence[Device]) -> Mesh | None:
        """Return the only mesh, on these devices, if it is one of them in their order."""
        (grid, *others) = self.meshes or (None,)
        if grid is None or others or grid.device_ids or grid.size != len(devices):
            return None
        names, sizes = zip(*grid.axes, strict=True)
        return Mesh(np.array(devices).reshape(sizes), names)

    def default_devices(self) -> tuple[Device, ...] | None:
        """Return all devices, if it has a partition for each; None, the default, if it has one.

        Raises:
            ModuleError: If it has partitions for some devices only.
        """
        count = self.num_partitions or 1
        if count == 1:
            return None
        devices = jax.devices()
        if count != len(devices):
            raise ModuleError(
                f"the module is for {count} partitions (mhlo.num_partitions) and there are "
                f"{len(devices)} devices: say which, devices=jax.devices()[:{count}]"
            )
        return tuple(devices)


def parse_module(source: str | bytes) -> ParsedModule:
    """Parse a module, and check that a program can be made of it.

    Args:
        source: MLIR text, MLIR bytecode or a portable StableHLO artifact.

    Raises:
        ModuleError: The text is invalid, or no program can be made of the module.
    """
    try:
        module = stablehlo_parse.read_module(source)
    except ValueError as error:
        raise ModuleError(f"the module can't be read: {error}") from None
    main = modules.main_function(module)
    if main is None:
        raise ModuleError(_no_entry_text(module))
    circle = stablehlo_parse.call_cycle(module)
    if circle:
        raise ModuleError(  # no-catalogue: in tests/core/program/goldens/modules/errors.txt
            f"the module's functions call each other in a circle, {' -> '.join(circle)}; XLA takes "
            "programs without recursion"
        )
    replicas = _count(module, "mhlo.num_replicas") or 1
    if replicas != 1:
        raise ModuleError(
            f"the module is for {replicas} replicas (mhlo.num_replicas): a program has one, "
            "sharded over its devices"
        )
    kinds, result_kinds = modules.function_types(main)
    rows = stablehlo_parse.function_attributes(main, "arg_attrs")
    result_rows = stablehlo_parse.function_attributes(main, "res_attrs")
    return ParsedModule(
        module=module,
        name=stablehlo_parse.module_attribute(module, "sym_name") or "",
        args=_values("args", kinds, rows),
        results=_values("results", result_kinds, result_rows),
        aliased=tuple(row[_ALIAS] for row in rows if _ALIAS in row),
        num_partitions=_count(module, "mhlo.num_partitions"),
        partitioner=_partitioner(module),
        meshes=tuple(stablehlo_parse.named_meshes(module)),
    )


def _count(module: modules.Module, name: str) -> int | None:
    count = stablehlo_parse.module_attribute(module, name)
    if count is not None and (type(count) is not int or count < 1):
        # no-catalogue: in tests/core/program/goldens/modules/errors.txt
        raise ModuleError(f"the module has {name} = {count!r}, expected a number from 1 on")
    return count


def _no_entry_text(module: modules.Module) -> str:
    names = modules.functions(module)
    start = "the module has no function @main, and not exactly one public function"
    if not names:
        return f"{start}; it has no function"
    return f"{start}; it has {', '.join('@' + n for n in names)}: name the one to start in @main"


def _values(
    side: str, kinds: Sequence[modules.TensorType | str], rows: Sequence[dict[str, Any]]
) -> tuple[ModuleValue, ...]:
    return tuple(
        _value(f"{side}[{i}]", kind, row)
        for i, (kind, row) in enumerate(zip(kinds, rows, strict=True))
    )


def _value(path: str, kind: modules.TensorType | str, row: dict[str, Any]) -> ModuleValue:
    if isinstance(kind, str):
        # no-catalogue: in tests/core/program/goldens/modules/errors.txt
        raise ModuleError(f"{path} of the module is {kind}, which no array can be")
    shape = tuple(size for size in kind.shape if size is not None)
    if len(shape) != len(kind.shape):
        raise ModuleError(
            f"{path} of the module is {kind}: its dimension {kind.shape.index(None)} has no fixed "
            "size, and a program is compiled for fixed ones: make the module with sizes for all "
            "dimensions"
        )
    dtype = stablehlo_parse.dtype_of(kind.element)
    if dtype is None:
        # no-catalogue: in tests/core/program/goldens/modules/errors.txt
        raise ModuleError(f"{path} of the module is {kind}, and no array has such elements")
    plan = ValuePlan(
        shape=shape,
        dtype=dtype.name,
        layout=row.get("mhlo.layout_mode"),
        memory_kind=row.get("mhlo.memory_kind"),
        name=row.get("jax.result_info") or path,
        annotated=SHARDY_ATTRIBUTE in row or GSPMD_ATTRIBUTE in row,
    )
    donated = _ALIAS in row or bool(row.get(_DONOR))
    return ModuleValue(
        path, plan, executables.aval(shape, dtype), row.get(GSPMD_ATTRIBUTE), donated
    )


def _partitioner(module: modules.Module) -> Partitioner | None:
    shardy, gspmd = stablehlo_parse.sharding_dialects(module)
    if shardy and gspmd:
        raise ModuleError(  # no-catalogue: in tests/core/program/goldens/modules/errors.txt
            f"the module holds annotations for both partitioners, {shardy} and "
            f"{gspmd}: no program can follow both"
        )
    if shardy:
        return Partitioner.SHARDY
    return Partitioner.GSPMD if gspmd else None


def lower_parsed_module(parsed: ParsedModule, plan: ProgramPlan) -> LoweredProgram:
    """Annotate a module by a plan; other attributes of the module stay.

    Args:
        parsed: The module; the program takes it over.
        plan: The plan, made of the values' own plans.

    Raises:
        ModuleError: The module's own annotations are for other devices.
        PlanError: The plan and the module disagree.
    """
    _check_partitions(parsed, len(plan.devices))
    body = stablehlo_parse.body_of_module(parsed.module)
    for side, described, values in (
        ("arg_attrs", parsed.args, plan.args),
        ("res_attrs", parsed.results, plan.results),
    ):
        # `lower_program` checks that the numbers are equal.
        overridden = [
            own.plan.annotated and not value.annotated
            for own, value in zip(described, values, strict=False)
        ]
        overridden += [False] * (len(described) - len(overridden))
        stablehlo_parse.drop_attributes(
            body.main, side, overridden, (SHARDY_ATTRIBUTE, GSPMD_ATTRIBUTE)
        )
        for own, value in zip(described, values, strict=False):
            if value.annotated and own.tiles is not None:
                _check_tiles(own, own.tiles, len(plan.devices))
    avals = [v.aval for v in parsed.args], [v.aval for v in parsed.results]
    return lower_program(plan, body, avals)


def partitioner_for(parsed: ParsedModule) -> Partitioner:
    """Return the partitioner of the module's own notation, else that of JAX's configuration."""
    return parsed.partitioner or Partitioner.in_force()


def _check_partitions(parsed: ParsedModule, num_devices: int) -> None:
    """Check the number of devices; XLA aborts the process for tiles of other devices."""
    count = parsed.num_partitions or 1
    if count not in (1, num_devices):
        raise ModuleError(
            f"the module is for {count} partitions (mhlo.num_partitions), but {num_devices} "
            f"device(s) were chosen: write devices=jax.devices()[:{count}], or a mesh of {count} "
            "devices"
        )
    for mesh in parsed.meshes:
        if mesh.size != num_devices:
            raise ModuleError(  # no-catalogue: in tests/core/program/goldens/modules/errors.txt
                f"the module's mesh {mesh} has {mesh.size} devices, but {num_devices} were chosen"
            )
    for text in stablehlo_parse.gspmd_texts(parsed.module):
        _check_text(text, num_devices)


def _check_tiles(value: ModuleValue, text: str, num_devices: int) -> None:
    """Check that an argument or result is cut into equal tiles, one per device."""
    if num_devices == 1:
        return
    try:
        assignment = TileAssignment.parse_text(text)
        shape = value.plan.shape
        Tiling.from_tile_assignment(assignment, len(shape), num_devices).shard_shape(shape)
    except GeometryError as error:
        side = "in_shardings" if value.path.startswith("args") else "out_shardings"
        raise ModuleError(
            f"{value.path} of the module has mhlo.sharding = {text!r}, which is invalid: "
            f"{error}; write another one in {side}"
        ) from None


def _check_text(text: str, num_devices: int) -> None:
    try:
        assignment = TileAssignment.parse_text(text)
    except GeometryError as error:
        # no-catalogue: in tests/core/program/goldens/modules/errors.txt
        raise ModuleError(f"the module has mhlo.sharding = {text!r}: {error}") from None
    for part in assignment.elements or (assignment,):
        count = part.num_devices
        if count is None and part.devices:
            count = part.devices[0] + 1 if part.devices[0] >= num_devices else None
        if count not in (None, num_devices):
            raise ModuleError(  # no-catalogue: in tests/core/program/goldens/modules/errors.txt
                f"the module has mhlo.sharding = {text!r}, which is for {count} devices, but "
                f"{num_devices} were chosen"
            )
