"""Compile StableHLO modules that were not lowered from a function of JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from xlashard._jax.lowering import dtype_name
from xlashard._jax.runtime.global_state import is_x64_enabled
from xlashard._jax.runtime.shardings import Device, Format, layout_text
from xlashard._jax.runtime.tracebacks import short_tracebacks, shortened
from xlashard._jax.trace.tracing import mesh_in_force
from xlashard.errors import ArgumentError, DeviceMismatchError, ModuleError, counted
from xlashard.pjit.arguments import Argument, check_values
from xlashard.pjit.compile import CompiledProgram
from xlashard.pjit.options import compiler_option_items, index_tuple
from xlashard.pjit.shardings.device_assignment import (
    ShardingRequest,
    custom_memory_kind,
    names_devices,
)
from xlashard.pjit.shardings.resolve import ProgramPlacement, resolve, to_sharding
from xlashard.pjit.shardings.resources import (
    UNSPECIFIED,
    Resource,
    expand,
    read_resources,
)
from xlashard.pjit.signature import positions_text
from xlashard.pjit.stages.compiled import Executable
from xlashard.pjit.stages.info import StageInfo, struct
from xlashard.pjit.stages.serialization import load
from xlashard.program.compile import compile_program
from xlashard.program.environment import LoadTarget
from xlashard.program.parsed_module import (
    ModuleValue,
    ParsedModule,
    lower_parsed_module,
    parse_module,
    partitioner_for,
)
from xlashard.program.plan import ProgramPlan, ValuePlan
from xlashard.sharding import GSPMDSharding, Mesh, Sharding, XLACompatibleSharding


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
        overrides = UserOverrides.of(
            parsed, (in_shardings, out_shardings), donate_argnums, devices, mesh
        )
        placement = place_module(parsed, overrides)
        plan = plan_module(parsed, overrides, placement, name or parsed.name or "stablehlo")
        lowered = lower_parsed_module(parsed, plan)
        avals = tuple(v.aval for v in parsed.args), tuple(v.aval for v in parsed.results)
        options = compiler_option_items(compiler_options)
        program = compile_program(lowered, avals, committed=placement.committed, options=options)
        lowered.report_donation("warn", plan.name)
        lowered.report_donation("warn", plan.name, program)
        donated = tuple(d or v.donated for d, v in zip(overrides.donated, parsed.args, strict=True))
        return StableHLOProgram(
            CompiledProgram(program, lowered, (), (True,) * len(donated)), donated
        )


class StableHLOProgram(Executable):
    """A compiled StableHLO module; made by `compile_stablehlo`.

    Call it with one array for each argument of the module, an Array, a `jax.Array`, a NumPy array
    or a number; it returns a tuple with one Array for each result. Committed arrays must have the
    shardings of `input_shardings`; other arrays are placed under them.

    Example:
        >>> import numpy as np
        >>> program = compile_stablehlo('''
        ...   func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
        ...     return %x : tensor<4xf32>
        ...   }''')
        >>> program(np.ones(4, np.float32))
        (Array([1., 1., 1., 1.], dtype=float32),)
    """

    def __init__(self, compiled: CompiledProgram, donated: tuple[bool, ...]) -> None:
        self._compiled = compiled
        parts = compiled.program.parts
        self._info = StageInfo(
            name=compiled.program.name,
            in_tree=jax.tree_util.tree_structure(((0,) * len(donated), {})),
            out_tree=jax.tree_util.tree_structure((0,) * len(parts.out_avals)),
            in_avals=parts.in_avals,
            out_avals=parts.out_avals,
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
            ", ".join(map(dtype_name, avals))
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
        return tuple(map(struct, self._info.in_avals, self._compiled.program.in_jax_shardings))

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

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], bool]:
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
        _check_wide(info.in_avals, self.name)
        values = [_cast(v, a) for v, a in zip(args, info.in_avals, strict=True)]
        text = "takes {}, but {} was given"
        info.check_types(values, text, "compile a module for such arguments")
        self._check_places(values)
        # The dispatcher casts no arguments.
        return values, all(v is a for v, a in zip(values, args, strict=True))


def _check_widths(parsed: ParsedModule) -> None:
    if is_x64_enabled():
        return
    for value in (*parsed.args, *parsed.results):
        if _is_wide(value.aval):
            raise ModuleError(
                f"{value.path} of the module is {dtype_name(value.aval)}, and JAX has 64-bit "
                "numbers only under jax_enable_x64: jax.config.update('jax_enable_x64', True)"
            )


def _check_wide(avals: Sequence[Any], name: str) -> None:
    if not is_x64_enabled() and any(map(_is_wide, avals)):
        raise ArgumentError(
            f"{name} takes 64-bit numbers, which JAX has only under jax_enable_x64: call it under "
            "the setting that it was compiled under"
        )


def _is_wide(aval: Any) -> bool:
    dtype = np.dtype(aval.dtype)
    return (dtype.kind in "iuf" and dtype.itemsize == 8) or dtype == np.complex128


def _cast(value: Any, aval: Any) -> Any:
    """Return a Python number in the dtype of its argument, if that is of the same kind."""
    if type(value) not in (bool, int, float, complex) or aval.shape:
        return value
    number = np.asarray(value)
    if number.dtype == aval.dtype or not np.can_cast(number.dtype, aval.dtype, "same_kind"):
        return value
    return number.astype(aval.dtype)


@dataclass(frozen=True)
class UserOverrides:
    """Options of `compile_stablehlo` that override annotations of the module.

    Attributes:
        ins: The resource of each argument.
        outs: The resource of each result.
        donated: For each argument, True if its buffers may be reused.
        devices: The requested devices, or None.
        mesh: The requested mesh or the one in force, or None.
    """

    ins: tuple[Resource, ...]
    outs: tuple[Resource, ...]
    donated: tuple[bool, ...]
    devices: tuple[Device, ...] | None
    mesh: Mesh | None

    @classmethod
    def of(
        cls,
        parsed: ParsedModule,
        shardings: tuple[Any, Any],
        donate_argnums: int | Sequence[int],
        devices: Sequence[Device] | None,
        mesh: Mesh | None,
    ) -> "UserOverrides":
        """Check the options of `compile_stablehlo`.

        Raises:
            ArgumentError: If an option has the wrong type.
            ResourceError: If a sharding is invalid, or there are too many.
        """
        count, result_count = len(parsed.args), len(parsed.results)
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ArgumentError(
                f"mesh must be a Mesh of devices, not {type(mesh).__name__}: write "
                "Mesh(devices, axis_names)"
            )
        return cls(
            _resources(shardings[0], count, "in_shardings", "args"),
            _resources(shardings[1], result_count, "out_shardings", "results"),
            _donated(donate_argnums, count),
            None if devices is None else _checked_devices(devices),
            mesh if mesh is not None else mesh_in_force(),
        )


def _resources(shardings: Any, count: int, what: str, side: str) -> tuple[Resource, ...]:
    return tuple(
        expand(
            read_resources(shardings, what),
            jax.tree_util.tree_structure((0,) * count),
            lambda path: side + jax.tree_util.keystr(tuple(path)),
        )
    )


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


def place_module(parsed: ParsedModule, overrides: UserOverrides) -> ProgramPlacement:
    """Resolve devices and shardings, as for a call of a pjit-ed function."""
    devices = _devices(parsed, overrides)
    mesh = overrides.mesh if overrides.mesh is not None else _own_mesh(parsed, devices)
    ins, outs = (
        tuple(to_sharding(r, mesh, what, v.path) for r, v in zip(rs, values, strict=True))
        for what, rs, values in (
            ("in_shardings", overrides.ins, parsed.args),
            ("out_shardings", overrides.outs, parsed.results),
        )
    )
    return resolve(
        ShardingRequest(
            arguments=tuple(Argument(v.path, v.aval, None, False) for v in parsed.args),
            in_shardings=ins,
            out_shardings=outs,
            result_avals=tuple(v.aval for v in parsed.results),
            result_paths=tuple(v.path for v in parsed.results),
            inner=() if devices is None else (GSPMDSharding.get_replicated(devices),),
            mesh=mesh,
        )
    )


def _devices(parsed: ParsedModule, overrides: UserOverrides) -> tuple[Device, ...] | None:
    """Return the devices to run on, None for the default one."""
    sources: list[tuple[str, tuple[Device, ...]]] = []
    if overrides.devices is not None:
        sources.append(("devices", overrides.devices))
    if overrides.mesh is not None:
        sources.append(("the mesh", overrides.mesh._flat_devices_tuple))
    for what, resources, values in (
        ("in_shardings", overrides.ins, parsed.args),
        ("out_shardings", overrides.outs, parsed.results),
    ):
        for resource, value in zip(resources, values, strict=True):
            if isinstance(resource.given, Sharding) and names_devices(resource.given):
                sources.append((f"the {what} of {value.path}", tuple(resource.given.devices)))
    if not sources:
        return _devices_of(parsed)
    name, first = sources[0]
    for other_name, other in sources[1:]:
        if other != first:
            raise DeviceMismatchError(
                f"a program runs on one list of devices, but {name} names {_ids(first)} and "
                f"{other_name} names {_ids(other)}: leave devices out, or give the same to both"
            )
    return first


def _ids(devices: Sequence[Device]) -> str:
    shown = ", ".join(str(d.id) for d in devices[:8])
    return f"{len(devices)} [{shown}{', ...' if len(devices) > 8 else ''}]"


def _devices_of(parsed: ParsedModule) -> tuple[Device, ...] | None:
    count = parsed.num_partitions or 1
    if count == 1:
        return None
    devices = jax.devices()
    if count != len(devices):
        raise ModuleError(
            f"the module is for {count} partitions (mhlo.num_partitions) and there are "
            f"{len(devices)} devices: say which, devices=jax.devices()[:{count}]"
        )
    return tuple(devices)


def _own_mesh(parsed: ParsedModule, devices: tuple[Device, ...] | None) -> Mesh | None:
    grid = None if devices is None else parsed.mesh_for(len(devices))
    if grid is None:
        return None
    names = [name for name, _ in grid.axes]
    return Mesh(np.array(devices).reshape([size for _, size in grid.axes]), names)


def plan_module(
    parsed: ParsedModule, overrides: UserOverrides, placement: ProgramPlacement, name: str
) -> ProgramPlan:
    """Return the plan of a module's program."""
    donated = tuple(
        d and not v.donated for d, v in zip(overrides.donated, parsed.args, strict=True)
    )
    return ProgramPlan(
        name=name,
        devices=placement.devices,
        args=tuple(map(_value, parsed.args, placement.in_shardings, overrides.ins)),
        results=tuple(map(_value, parsed.results, placement.out_shardings, overrides.outs)),
        donated=donated,
        partitioner=partitioner_for(parsed),
        mesh=placement.mesh,
        aliased=parsed.aliased,
    )


def _value(
    value: ModuleValue, sharding: XLACompatibleSharding | None, resource: Resource
) -> ValuePlan:
    kind = value.memory_kind
    if sharding is not None:
        requested = custom_memory_kind(sharding)
        if requested is not None:
            kind = requested
        elif kind is not None:
            sharding = sharding.with_memory_kind(kind)
    layout = layout_text(resource.layout, value.aval.dtype)
    return value.plan(sharding=sharding, memory_kind=kind, layout=layout)
