"""Programs from StableHLO modules that no function of JAX made."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from xlashard._jax import analysis, dispatch
from xlashard._jax.context import is_x64_enabled
from xlashard._jax.lowering import dtype_name
from xlashard._jax.shardings import Device
from xlashard._jax.tracing import Tracer, abstractify
from xlashard.array import Array, wrap_tree
from xlashard.errors import ArgumentError, ModuleError
from xlashard.pjit.arguments import check_concrete, describe_arguments
from xlashard.pjit.checks import check_place, check_type
from xlashard.pjit.options import compiler_option_items
from xlashard.pjit.prepare import Prepared
from xlashard.pjit.resources import UNSPECIFIED
from xlashard.pjit.run import (
    are_laid_out,
    check_donated_once,
    fast_path,
    mark_donated,
    run_prepared,
)
from xlashard.pjit.stablehlo_plan import Said, place_module, plan_module
from xlashard.program import ForeignModule, compile_program, lower_foreign, read_foreign
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
    """Compiles a StableHLO module into a program that takes and gives Arrays.

    What the module itself says of shardings, donation, layouts and memories is followed wherever
    nothing is said here.

    Args:
        source: The module: MLIR text, MLIR bytecode or a portable StableHLO artifact. It starts in
            `@main`, or in its only public function.
        in_shardings: Where the arguments go: one for all, or a tuple with one for each. Each is a
            Sharding, a PartitionSpec on the mesh, None (replicated) or `UNSPECIFIED` (as the module
            says, else where the partitioner wants it).
        out_shardings: Where the results go, likewise.
        donate_argnums: Positions of arguments whose buffers the results may take over.
        name: The program's name; the module's own if not given.
        compiler_options: Options of XLA.
        devices: The devices to run on, in order; those of the shardings or of the mesh if not
            given, else as many as the module says that it is for.
        mesh: The mesh of PartitionSpecs; the one in force if not given, else the module's own.

    Raises:
        ModuleError: If the module can't be read (with the line), or no program can have what is in
            it (sizes that are not fixed, several replicas).
        ResourceError: If a sharding does not fit its argument or result, named by its place.
        DeviceMismatchError: If two of those who have a say name different devices.
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
    if not isinstance(source, str | bytes):
        raise ArgumentError(
            f"the module must be MLIR text or bytes, not {type(source).__name__}: for a file write "
            "compile_stablehlo(Path(...).read_bytes())"
        )
    foreign = read_foreign(source)
    _check_widths(foreign)
    said = Said.of(foreign, (in_shardings, out_shardings), donate_argnums, devices, mesh)
    placement = place_module(foreign, said)
    plan = plan_module(foreign, said, placement, name or foreign.name or "stablehlo")
    lowered = lower_foreign(foreign, plan)
    avals = tuple(v.aval for v in foreign.args), tuple(v.aval for v in foreign.results)
    options = compiler_option_items(compiler_options)
    program = compile_program(lowered, avals, committed=placement.committed, options=options)
    lowered.report_donation("warn", plan.name)
    donated = tuple(d or v.donated for d, v in zip(said.donated, foreign.args, strict=True))
    return StableHLOProgram(Prepared(program, lowered, (), (True,) * len(donated)), donated)


class StableHLOProgram:
    """A compiled StableHLO module; made by `compile_stablehlo`.

    Call it with one array for each argument of the module, an Array, a `jax.Array`, a NumPy array
    or a number; it gives a tuple with one Array for each result.
    """

    def __init__(self, prepared: Prepared, donated: tuple[bool, ...]) -> None:
        self._prepared = prepared
        self._donated = donated
        self._paths = tuple(f"args[{i}]" for i in range(len(donated)))

    def __repr__(self) -> str:
        parts = self._prepared.program.parts
        takes, gives = (
            ", ".join(map(dtype_name, avals)) for avals in (parts.in_avals, parts.out_avals)
        )
        return f"StableHLOProgram({self.name}: ({takes}) -> ({gives}))"

    @property
    def name(self) -> str:
        """The program's name."""
        return self._prepared.program.name

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices it runs on, in order."""
        return self._prepared.program.parts.plan.devices

    @property
    def in_info(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape, dtype and sharding of each argument."""
        parts = self._prepared.program.parts
        return _structs(parts.in_avals, self._prepared.program.in_twins)

    @property
    def out_info(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape, dtype and sharding of each result."""
        parts = self._prepared.program.parts
        return _structs(parts.out_avals, self._prepared.program.out_twins)

    @property
    def input_shardings(self) -> tuple[XLACompatibleSharding, ...]:
        """The sharding of each argument."""
        return self._prepared.program.parts.in_shardings

    @property
    def output_shardings(self) -> tuple[XLACompatibleSharding, ...]:
        """The sharding of each result."""
        return self._prepared.program.parts.out_shardings

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the arguments whose buffers the results may take over."""
        return tuple(i for i, donated in enumerate(self._donated) if donated)

    def as_text(self, dialect: str = "hlo") -> str:
        """The program as text.

        Args:
            dialect: `"hlo"`, optimised and partitioned, or `"stablehlo"`, the annotated module.
        """
        if dialect == "hlo":
            return analysis.compiled_text(self.runtime_executable())
        if dialect == "stablehlo":
            return self._prepared.lowered.as_text()
        raise ArgumentError(f"dialect must be 'hlo' or 'stablehlo', not {dialect!r}")

    def cost_analysis(self) -> dict[str, float]:
        """XLA's estimates for the optimised program, per device: FLOP, bytes accessed."""
        return analysis.compiled_cost(self.runtime_executable())

    def memory_analysis(self) -> Any:
        """Bytes per device: arguments, results, aliases, temporaries, code."""
        return analysis.compiled_memory(self.runtime_executable())

    def runtime_executable(self) -> Any:
        """PJRT's loaded executable."""
        return self._prepared.program.executable

    def __call__(self, *args: Any) -> tuple[Array, ...]:
        """Runs the program.

        Args:
            args: One array for each argument of the module. Arrays that are bound to their devices
                must be dealt out as `input_shardings` says; others are placed so.

        Returns:
            One Array for each result.

        Raises:
            ArgumentError: If there are more or fewer, or one is of another shape or dtype.
            ResourceError: If an argument is bound to another place.
            DeletedError: If an argument's buffers are gone.
        """
        try:
            return self._dispatcher(*args)
        except (RuntimeError, ValueError):
            if len(args) == len(self._paths):
                check_donated_once(args, self._donated, self._paths, self.name)
            raise

    @cached_property
    def _dispatcher(self) -> Any:
        return dispatch.new_dispatcher(self.name, None, self._miss, ((), ()), self.name)

    @cached_property
    def _out_tree(self) -> Any:
        return jax.tree_util.tree_structure((0,) * len(self.output_shardings))

    def _miss(self, *args: Any) -> tuple[Any, Any, bool]:
        values, cast = self._checked(args)
        # An argument that has to be cast or laid out anew must come this way again.
        repeatable = not cast and are_laid_out(self._prepared, values)
        handles = run_prepared(self._prepared, values)
        mark_donated(values, self._donated, self.name)
        path = fast_path(self._prepared, self._out_tree, handles) if repeatable else None
        return wrap_tree(self._out_tree, handles), path, False

    def _checked(self, args: tuple[Any, ...]) -> tuple[list[Any], bool]:
        """The arguments, numbers cast to their dtype, and whether there was such a one."""
        avals = self._prepared.program.parts.in_avals
        if len(args) != len(avals):
            raise ArgumentError(
                f"{self.name} takes {len(avals)} arguments, {len(args)} were given: it is {self!r}"
            )
        for value, path in zip(args, self._paths, strict=True):
            if isinstance(value, Tracer):
                raise ArgumentError(
                    f"{path} is a tracer: a compiled program can't be part of another one; call "
                    f"{self.name} outside of jit, grad and vmap"
                )
            _check_array(value, path)
        check_concrete(args, self._paths)
        _check_wide(avals, self.name)
        values = [_cast(v, a) for v, a in zip(args, avals, strict=True)]
        for value, aval, path in zip(values, avals, self._paths, strict=True):
            text = f"{self.name} takes {{}}, but {{}} was given"
            check_type(value, path, aval, text, "compile a module for such arguments")
        self._check_places(values)
        return values, any(v is not a for v, a in zip(values, args, strict=True))

    def _check_places(self, values: Sequence[Any]) -> None:
        arguments = describe_arguments(values, self._paths, self._prepared.program.parts.in_avals)
        for argument, sharding in zip(arguments, self.input_shardings, strict=True):
            check_place(argument, sharding, f"{self.name} takes {{}}")


def _structs(avals: Sequence[Any], twins: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=twin)
        for aval, twin in zip(avals, twins, strict=True)
    )


def _check_array(value: Any, path: str) -> None:
    try:
        abstractify(value)
    except (TypeError, ValueError, OverflowError):
        text = repr(value)
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise ArgumentError(
            f"{path} is {shown} ({type(value).__name__}), which is no array of numbers"
        ) from None


def _check_widths(foreign: ForeignModule) -> None:
    if is_x64_enabled():
        return
    for value in (*foreign.args, *foreign.results):
        if _is_wide(value.aval):
            raise ModuleError(
                f"{value.path} of the module is {dtype_name(value.aval)}, and JAX holds no 64-bit "
                "numbers unless asked to: jax.config.update('jax_enable_x64', True)"
            )


def _check_wide(avals: Sequence[Any], name: str) -> None:
    if not is_x64_enabled() and any(map(_is_wide, avals)):
        raise ArgumentError(
            f"{name} takes 64-bit numbers, which JAX holds only where jax_enable_x64 is set: call "
            "it under the setting that it was compiled under"
        )


def _is_wide(aval: Any) -> bool:
    dtype = np.dtype(aval.dtype)
    return (dtype.kind in "iuf" and dtype.itemsize == 8) or dtype == np.complex128


def _cast(value: Any, aval: Any) -> Any:
    """A Python number in the dtype of its argument, where that can hold numbers of its kind."""
    if type(value) not in (bool, int, float, complex) or aval.shape:
        return value
    number = np.asarray(value)
    if number.dtype == aval.dtype or not np.can_cast(number.dtype, aval.dtype, "same_kind"):
        return value
    return number.astype(aval.dtype)
