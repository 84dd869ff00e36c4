"""Compile StableHLO modules that were not lowered from a function of JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import numpy as np

from xlashard._jax.lowering import aval_text
from xlashard._jax.runtime.global_state import unsupported
from xlashard._jax.runtime.shardings import Device, Format, layout_text
from xlashard._jax.trace.tracing import mesh_in_force
from xlashard.core.pjit.arguments import Argument, check_values
from xlashard.core.pjit.options import compiler_option_items, index_tuple
from xlashard.core.pjit.shardings.device_assignment import ShardingRequest
from xlashard.core.pjit.shardings.resolve import ProgramPlacement, resolve, to_sharding
from xlashard.core.pjit.shardings.resources import (
    UNSPECIFIED,
    Resource,
    expand,
    read_resources,
)
from xlashard.core.pjit.stages.compiled import Executable
from xlashard.core.pjit.stages.info import StageInfo, struct
from xlashard.core.pjit.stages.serialization import load
from xlashard.core.program.compile import compile_program
from xlashard.core.program.environment import LoadTarget
from xlashard.core.program.execute import CompiledProgram
from xlashard.core.program.parsed_module import (
    ModuleValue,
    ParsedModule,
    lower_parsed_module,
    parse_module,
    partitioner_for,
)
from xlashard.core.program.plan import ProgramPlan, ValuePlan
from xlashard.core.program.signature import positions_text
from xlashard.core.sharding import GSPMDSharding, Mesh, Sharding, XLACompatibleSharding
from xlashard.core.sharding.replicated import custom_memory_kind, names_devices
from xlashard.errors import ArgumentError, DeviceMismatchError, ModuleError, counted
from xlashard.support.formatting import format_two_device_lists
from xlashard.support.tracebacks import short_tracebacks, shortened


def compile_stablehlo(
    source: str | bytes,
    *,
    in_shardings: Any = UNSPECIFIED,
    out_shardings: Any = UNSPECIFIED,
    donate_argnums: int | Sequence[int] = (),
    name: str | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    devices: Sequence[Device] | None = None,
    mesh: Mesh | None = None,
) -> "StableHLOProgram":
    """Compile a StableHLO module into a program that takes and gives Arrays.

    The module's own shardings, donation, layouts and memory kinds apply, unless an argument
    overrides them.

    Args:
        source: The module: MLIR text, MLIR bytecode or a portable StableHLO artifact. It starts in
            `@main`, or in its only public function.
        in_shardings: Shardings of the arguments: one for all, or a tuple with one for each. Each is
            a Sharding, a PartitionSpec on the mesh, None (replicated) or `UNSPECIFIED` (that of the
            module, or else the partitioner's choice).
        out_shardings: Shardings of the results, likewise.
        donate_argnums: Positions of arguments whose buffers the results may reuse.
        name: The program's name; by default that of the module.
        compiler_options: Options of XLA.
        devices: The devices to run on, in order; by default those of the shardings or of the mesh,
            or else as many as the module has partitions.
        mesh: The mesh of PartitionSpecs; by default the one in force, or else that of the module.

    Raises:
        ModuleError: If the module can't be read (with the line), or has dynamic shapes or several
            replicas.
        ResourceError: If a sharding does not fit its argument or result.
        DeviceMismatchError: If shardings, mesh or `devices` name different devices.
        CompileError: If XLA refuses the module.

    Example:
        >>> import numpy as np
        >>> program = compile_stablehlo('''
        ...   func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
        ...     %y = stablehlo.add %x, %x : tensor<4xf32>
        ...     return %y : tensor<4xf32>
        ...   }''')
        >>> program(np.ones(4, np.float32))
        (Array([2., 2., 2., 2.], dtype=float32),)
    """
    with short_tracebacks:
        if not isinstance(source, str | bytes):
            raise ArgumentError(
                f"the module must be MLIR text or bytes, not {type(source).__name__}: for a file "
                "write compile_stablehlo(Path(...).read_bytes())"
            )
        parsed = parse_module(source)
        _check_widths(parsed)
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ArgumentError(
                f"mesh must be a Mesh of devices, not {type(mesh).__name__}: write "
                "Mesh(devices, axis_names)"
            )
        sides = (
            _Side.of("in_shardings", in_shardings, "args", parsed.args),
            _Side.of("out_shardings", out_shardings, "results", parsed.results),
        )
        marked = _donated(donate_argnums, len(parsed.args))
        requested = None if devices is None else _checked_devices(devices)
        mesh = mesh if mesh is not None else mesh_in_force()
        placement = _place(parsed, sides, _devices(parsed, sides, requested, mesh), mesh)
        plan = ProgramPlan(
            name=name or parsed.name or "stablehlo",
            devices=placement.devices,
            args=sides[0].plans(placement.in_shardings),
            results=sides[1].plans(placement.out_shardings),
            donated=tuple(m and not v.donated for m, v in zip(marked, parsed.args, strict=True)),
            partitioner=partitioner_for(parsed),
            mesh=placement.mesh,
            aliased=parsed.aliased,
        )
        lowered = lower_parsed_module(parsed, plan)
        options = compiler_option_items(compiler_options)
        program = compile_program(lowered, options, committed=placement.committed)
        lowered.report_donation("warn", plan.name)
        program.report_donation("warn", plan.name)
        donated = tuple(m or v.donated for m, v in zip(marked, parsed.args, strict=True))
        return StableHLOProgram(program, donated)


class StableHLOProgram(Executable):
    """A compiled StableHLO module; made by `compile_stablehlo`.

    Call it with one array for each argument of the module, an Array, a `jax.Array`, a NumPy array
    or a number; it returns a tuple with one Array for each result. Committed arrays must have the
    shardings of `input_shardings`; other arrays are placed under them. Arrays of another layout are
    converted at each call.

    Example:
        >>> import numpy as np
        >>> program = compile_stablehlo('''
        ...   func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
        ...     return %x : tensor<4xf32>
        ...   }''')
        >>> program(np.ones(4, np.float32))
        (Array([1., 1., 1., 1.], dtype=float32),)
    """

    _converts_layouts = True

    def __init__(self, compiled: CompiledProgram, donated: tuple[bool, ...]) -> None:
        self._compiled = compiled
        self._info = StageInfo(
            name=compiled.name,
            in_tree=jax.tree_util.tree_structure(((0,) * len(donated), {})),
            out_tree=jax.tree_util.tree_structure((0,) * len(compiled.out_avals)),
            in_avals=compiled.in_avals,
            out_avals=compiled.out_avals,
            paths=tuple(f"args[{i}]" for i in range(len(donated))),
            donated=donated,
        )

    @classmethod
    @shortened
    def deserialize(
        cls,
        data: bytes,
        *,
        devices: Sequence[Device] | Mesh | None = None,
        allow_other_flags: bool = False,
    ) -> Self:
        """Return the program of the bytes that `serialize` gave.

        Load trusted data only: it contains machine code. Nothing else in it is run or imported.

        Args:
            data: The bytes.
            devices: The devices to run on, in the program's order or as a mesh; without them those
                at the same coordinates of the TPU's torus, or with the same ids.
            allow_other_flags: Accept a program that was compiled with other compiler flags than
                this process has.

        Raises:
            ArgumentError: If an argument has the wrong type.
            SavedProgramError: If the bytes are damaged or no saved program, or were made by another
                version, with other flags or for other devices.
        """
        info, compiled = load(
            cls.__name__, data, LoadTarget(devices, allow_other_flags), (None, None)
        )
        return cls(compiled, info.donated)

    def __repr__(self) -> str:
        takes, gives = (
            ", ".join(map(aval_text, avals))
            for avals in (self._info.in_avals, self._info.out_avals)
        )
        return f"StableHLOProgram({self.name}: ({takes}) -> ({gives}))"

    @property
    def name(self) -> str:
        """Return the program's name."""
        return self._info.name

    @property
    def in_info(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shape, dtype and sharding of each argument."""
        return tuple(map(struct, self._info.in_avals, self._compiled.in_jax_shardings))

    @property
    def input_shardings(self) -> tuple[XLACompatibleSharding, ...]:
        """Return the sharding of each argument."""
        return super().input_shardings[0]

    @property
    def input_formats(self) -> tuple[Format, ...]:
        """Return the layout and sharding of each argument."""
        return super().input_formats[0]

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Return the positions of the arguments whose buffers the results may take over."""
        return tuple(i for i, donated in enumerate(self._info.donated) if donated)

    def _check_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], bool]:
        info = self._info
        if kwargs:
            raise ArgumentError(
                f"{self.name} got the unexpected keyword {next(iter(kwargs))}: the arguments of a "
                "module go by their place, as in program(x, y)"
            )
        if len(args) != len(info.in_avals):
            raise ArgumentError(
                f"{self.name} takes {counted(len(info.in_avals), 'argument')}, but got "
                f"{len(args)}: it is {self!r}"
            )
        check_values(args, info.paths, static=False)
        info.check_concrete(args, f"call {info.name} outside of jit, grad and vmap")
        if next(unsupported(info.in_avals), None) is not None:
            raise ArgumentError(
                f"{self.name} takes 64-bit numbers, which JAX has only under jax_enable_x64: call "
                "it under the setting that it was compiled under"
            )
        values = [_cast(v, a) for v, a in zip(args, info.in_avals, strict=True)]
        text = "takes {}, but {} was given"
        info.check_types(values, text, "compile a module for such arguments")
        self._check_places(values)
        # The dispatcher casts no arguments.
        return values, all(v is a for v, a in zip(values, args, strict=True))


def _check_widths(parsed: ParsedModule) -> None:
    for value in (*parsed.args, *parsed.results):
        for aval in unsupported([value.aval]):
            raise ModuleError(
                f"{value.path} of the module is {aval_text(aval)}, and JAX has 64-bit numbers "
                "only under jax_enable_x64: jax.config.update('jax_enable_x64', True)"
            )


def _cast(value: Any, aval: Any) -> Any:
    """Return a Python number in the dtype of its argument, if that is of the same kind."""
    if type(value) not in (bool, int, float, complex) or aval.shape:
        return value
    number = np.asarray(value)
    if number.dtype == aval.dtype or not np.can_cast(number.dtype, aval.dtype, "same_kind"):
        return value
    return number.astype(aval.dtype)


@dataclass(frozen=True)
class _Side:
    """Arguments or results of a module, and the shardings that the user gave for them.

    Attributes:
        option: `in_shardings` or `out_shardings`.
        values: The values.
        resources: For each value the user's sharding.
    """

    option: str
    values: tuple[ModuleValue, ...]
    resources: tuple[Resource, ...]

    @classmethod
    def of(cls, option: str, requested: Any, path: str, values: tuple[ModuleValue, ...]) -> "_Side":
        tree = jax.tree_util.tree_structure((0,) * len(values))
        return cls(option, values, tuple(expand(read_resources(requested, option), tree, path)))

    def shardings(self, mesh: Mesh | None) -> tuple[Any, ...]:
        pairs = zip(self.resources, self.values, strict=True)
        return tuple(to_sharding(r, mesh, self.option, value.path) for r, value in pairs)

    def plans(self, shardings: Sequence[XLACompatibleSharding | None]) -> tuple[ValuePlan, ...]:
        return tuple(map(_planned, self.values, shardings, self.resources))


def _donated(argnums: int | Sequence[int], count: int) -> tuple[bool, ...]:
    positions = set()
    for i in index_tuple(argnums, "donate_argnums"):
        if not -count <= i < count:
            raise ArgumentError(
                f"donate_argnums names argument {i}, the module has {counted(count, 'argument')}: "
                f"give {positions_text(count)}"
            )
        positions.add(i % count)
    return tuple(i in positions for i in range(count))


def _checked_devices(devices: Sequence[Device]) -> tuple[Device, ...]:
    checked = tuple(devices)
    if not checked or not all(isinstance(d, jax.Device) for d in checked):
        raise ArgumentError(
            f"devices must be a list of at least one device such as jax.devices(), not {devices!r}"
        )
    return checked


def _place(
    parsed: ParsedModule,
    sides: tuple[_Side, _Side],
    devices: tuple[Device, ...] | None,
    mesh: Mesh | None,
) -> ProgramPlacement:
    """Resolve devices and shardings, as for a call of a pjit-ed function."""
    if mesh is None and devices is not None:
        mesh = parsed.mesh_on(devices)
    return resolve(
        ShardingRequest(
            arguments=tuple(Argument(v.path, v.aval, None, False) for v in parsed.args),
            in_shardings=sides[0].shardings(mesh),
            out_shardings=sides[1].shardings(mesh),
            result_avals=tuple(v.aval for v in parsed.results),
            result_paths=tuple(v.path for v in parsed.results),
            inner=() if devices is None else (GSPMDSharding.get_replicated(devices),),
            mesh=mesh,
        )
    )


def _devices(
    parsed: ParsedModule,
    sides: Sequence[_Side],
    requested: tuple[Device, ...] | None,
    mesh: Mesh | None,
) -> tuple[Device, ...] | None:
    """Return the devices to run on, None for the default one."""
    sources: list[tuple[str, tuple[Device, ...]]] = []
    if requested is not None:
        sources.append(("devices", requested))
    if mesh is not None:
        sources.append(("the mesh", mesh._flat_devices_tuple))
    for side in sides:
        for resource, value in zip(side.resources, side.values, strict=True):
            if isinstance(resource.value, Sharding) and names_devices(resource.value):
                where = f"the {side.option} of {value.path}"
                sources.append((where, tuple(resource.value.devices)))
    if not sources:
        return parsed.default_devices()
    name, first = sources[0]
    for other_name, other in sources[1:]:
        if other != first:
            texts = format_two_device_lists(first, other)
            raise DeviceMismatchError(
                f"a program runs on one list of devices, but {name} names {texts[0]} "
                f"and {other_name} names {texts[1]}: leave devices out, or give the "
                "same to both"
            )
    return first


def _planned(
    value: ModuleValue, sharding: XLACompatibleSharding | None, resource: Resource
) -> ValuePlan:
    plan, kind = value.plan, value.plan.memory_kind
    if sharding is not None:
        requested = custom_memory_kind(sharding)
        if requested is not None:
            kind = requested
        elif kind is not None:
            sharding = sharding.with_memory_kind(kind)
    return replace(
        plan,
        sharding=sharding,
        memory_kind=kind,
        layout=layout_text(resource.layout, value.aval.dtype) or plan.layout,
        annotated=plan.annotated and sharding is None,
    )
