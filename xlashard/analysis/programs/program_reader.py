"""Read the program of whatever a user passes to a report."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from xlashard._jax.runtime.shardings import Device
from xlashard._jax.trace import jitted
from xlashard._jax.trace.target_chip import trace_for_chip
from xlashard._jax.trace.tracing import Tracer
from xlashard.analysis.programs import from_jax
from xlashard.analysis.programs.from_script import RecordedProgram
from xlashard.analysis.programs.program import Compilation, LoweredModule, Program
from xlashard.core.program.signature import Signature, function_name
from xlashard.errors import ArgumentError
from xlashard.hlo.compiler_log import captured_log
from xlashard.support.lazily import deferred

if TYPE_CHECKING:
    from xlashard.analysis.programs import from_pjit
else:
    # For functions and stages of pjit, which have it loaded.
    from_pjit = deferred("xlashard.analysis.programs.from_pjit")


_PROGRAMS = (RecordedProgram, Program, LoweredModule, Compilation)


def read(
    fun: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    caller: str,
    device: Device | None = None,
) -> Program | LoweredModule | Compilation:
    """Return the program of a call, or of a stage as far as it has come.

    Args:
        fun: A function of `xlashard.pjit`, `jax.jit`, `nnx.jit` or `eqx.filter_jit`, a partial or
            method of one, or a plain function, as `jax.jit` would run it; or one of their stages,
            or a program made by `compile_stablehlo` or recorded in a script, without arguments.
        args: Positional arguments of a call.
        kwargs: Keyword arguments of the call.
        caller: The function that the user called, for errors.
        device: A device of the topology that the program is for; None for those at hand.

    Raises:
        ArgumentError: If `fun` is of another type, or arguments come with a stage.
    """
    stage, more = find_stage(fun), ", topology=..." if caller == "preflight" else ""
    if stage is not None:
        if args or kwargs:
            raise ArgumentError(
                f"{caller} takes a {type(stage).__name__} without arguments: write "
                f"xlashard.{caller}(stage{more}), or pass the function and its arguments"
            )
        return read_stage(stage)
    if not callable(fun):
        raise ArgumentError(
            f"{caller} takes a function or one of its stages, not {type(fun).__name__}: write "
            f"xlashard.{caller}(f, x{more}), without calling f"
        )
    return read_call(*from_jax.unwrap(fun, args, kwargs), device)


def read_call(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: Device | None = None
) -> Program:
    """Trace a call of a function, which is as `xlashard.analysis.programs.from_jax.unwrap` returns.

    Args:
        fun: The function.
        args: Positional arguments.
        kwargs: Keyword arguments.
        device: As for `read`.

    Raises:
        ArgumentError: If an argument is a tracer.
    """
    check_tracers(fun, args, kwargs)
    function = find_pjit_function(fun)
    if function is not None:
        return from_pjit.read_function(function, args, kwargs, device)
    if any(map(find_pjit_function, jitted.list_held(fun))):
        return _read_wrapper(fun, args, kwargs, device)
    return from_jax.read_function(fun, args, kwargs, device)


def _read_wrapper(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: Device | None
) -> Program:
    """Trace a call of a wrapper of a pjit-ed function, such as `plan.apply` returns."""
    trace = fun.trace if hasattr(fun, "trace") else fun.lower

    def read() -> Any:
        stage, structs = jitted.call_with_tracers(
            lambda args, kwargs: find_stage(trace(*args, **kwargs)), args, kwargs
        )
        return from_pjit.read_traced(stage, structs)

    program, _ = trace_for_chip(read, device)
    paths = from_jax.find_wrapper_paths(
        (fun, args, kwargs), (program.in_tree, program.out_tree), program.paths, program.call.values
    )
    return program.with_paths(*paths)


def find_stage(value: Any) -> Any:
    """Return a stage, or a recorded or loaded program; None for anything else.

    Of a stage of flax or equinox, that of JAX inside is returned.
    """
    stage = jitted.inner_stage(value)
    is_program = isinstance(value, _PROGRAMS) or hasattr(value, "runtime_executable")
    return value if stage is None and is_program else stage


def read_stage(stage: Any) -> Program | LoweredModule | Compilation:
    """Return the program of a stage, as far as it has come."""
    if isinstance(stage, _PROGRAMS):
        return stage.program if isinstance(stage, RecordedProgram) else stage
    if type(stage).__module__.startswith("xlashard."):
        return from_pjit.read_stage(stage)
    match stage:
        case jax.stages.Traced():
            return from_jax.read_trace(jitted.JitTrace(stage))
        case jax.stages.Lowered():
            return from_jax.read_user_lowered(stage)
    return from_jax.read_compiled(stage)


def compile_program(program: Program | LoweredModule | Compilation) -> Compilation:
    """Return the compiled form of a program, as a call of it would compile it."""
    if isinstance(program, Program):
        program = program.lower()
    if isinstance(program, Compilation):
        return program
    with captured_log() as log:
        compiled = program.compile()
    return replace(compiled, log="".join([compiled.log, *log]))


def find_pjit_function(fun: Any) -> Any:
    """Return what `pjit` keeps of a function that it returned; None for any other callable."""
    function = getattr(fun, "_function", None)
    return function if type(function).__module__.startswith("xlashard.") else None


def check_tracers(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if an argument of a call is a tracer."""
    leaves = jax.tree_util.tree_leaves((args, kwargs))
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        return
    paths = Signature.of(getattr(fun, "__wrapped__", fun)).paths(args, kwargs)
    path = next(p for p, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, Tracer))
    raise ArgumentError(
        f"{path} of {function_name(fun)} is a tracer: inside jax.jit, grad or vmap the call is "
        "part of another program; call explain or preflight outside of it, with arrays or "
        "jax.ShapeDtypeStructs"
    )
