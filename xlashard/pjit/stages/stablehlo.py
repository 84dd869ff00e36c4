"""Compiles StableHLO modules that were not lowered from a function of JAX."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from xlashard._jax.lowering import dtype_name
from xlashard._jax.runtime.global_state import is_x64_enabled
from xlashard._jax.runtime.shardings import Device, Format
from xlashard._jax.runtime.tracebacks import short_tracebacks, shortened
from xlashard.errors import ArgumentError, ModuleError, counted
from xlashard.pjit.arguments import check_values
from xlashard.pjit.compile import CompiledProgram
from xlashard.pjit.options import compiler_option_items
from xlashard.pjit.shardings.resources import UNSPECIFIED
from xlashard.pjit.stages.compiled import Executable
from xlashard.pjit.stages.info import StageInfo, struct
from xlashard.pjit.stages.serialization import load
from xlashard.pjit.stages.stablehlo_plan import UserOverrides, place_module, plan_module
from xlashard.program.compile import compile_program
from xlashard.program.environment import LoadTarget
from xlashard.program.parsed_module import ParsedModule, lower_parsed_module, parse_module
from xlashard.sharding import Mesh, XLACompatibleSharding


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
        """Shape, dtype and sharding of each argument."""
        return tuple(map(struct, self._info.in_avals, self._compiled.program.in_jax_shardings))

    @property
    def input_shardings(self) -> tuple[XLACompatibleSharding, ...]:
        """Return the sharding of each argument."""
        return super().input_shardings[0]

    @property
    def input_formats(self) -> tuple[Format, ...]:
        """Layout and sharding of each argument."""
        return super().input_formats[0]

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the arguments whose buffers the results may take over."""
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
