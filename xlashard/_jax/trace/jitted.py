"""Read what JAX traced of functions of `jax.jit`, and of wrappers whose methods reach it."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax

from xlashard._jax import originals
from xlashard._jax.private import api_util, jax_pjit, replace_name
from xlashard._jax.trace.tracing import (
    Jaxpr,
    Tracer,
    TreeDef,
    replace_fields,
    struct_of,
)
from xlashard._jax.tree_definitions import in_default_registry
from xlashard.support.lazily import dataclass


@dataclass(frozen=True, eq=False)
class JaxProgram:
    """A program that JAX traced for `jax.jit`.

    Attributes:
        jaxpr: Its closed jaxpr.
        params: The parameters of JAX's `jit` primitive, by name.
        values: Its dynamic arguments, flat; of a stage, their shapes with shardings.
        in_tree: The tree of `(args, kwargs)`, without static arguments.
        out_tree: The tree of its result.
        consts: The closed-over tracers; they precede the arguments.
    """

    jaxpr: Jaxpr
    params: Mapping[str, Any]
    values: tuple[Any, ...]
    in_tree: TreeDef
    out_tree: TreeDef
    consts: tuple[Any, ...] = ()


def is_jitted(fun: Any) -> bool:
    """Return True for a function that `jax.jit` returned."""
    return isinstance(fun, _JITTED) and hasattr(fun, "_jit_info") and hasattr(fun, "_fun")


_JITTED = type(originals.jit(lambda: None))


# Attributes through which wrappers hold a jitted function: nnx.jit, eqx.filter_jit,
# functools.partial, bound methods.
_HELD_BY = ("jitted_fn", "_cached", "func", "__func__")
_DEEPEST = 8


def jitted_within(fun: Any) -> Any | None:
    """Return the function of `jax.jit` that a callable is or wraps; None without one."""
    for _ in range(_DEEPEST):
        if is_jitted(fun):
            return fun
        fun = next((getattr(fun, name) for name in _HELD_BY if hasattr(fun, name)), None)
    return None


def has_programs(jitted: Any) -> bool:
    """Return True if a jitted function has compiled programs, of calls outside of other traces."""
    return jitted._cache_size() > 0


def function_of(jitted: Any) -> tuple[Callable[..., Any], tuple[int, ...], tuple[str, ...]]:
    """Return the Python function of a jitted one, with positions and names of static arguments."""
    info = jitted._jit_info
    return jitted._fun, tuple(info.static_argnums), tuple(info.static_argnames)


def options_of(jitted: Any) -> dict[str, Any]:
    """Return the keywords of `jax.jit` by which a function was jitted, without its shardings."""
    names = "static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "keep_unused"
    options = {name: getattr(jitted._jit_info, name) for name in names}
    return {**options, "compiler_options": dict(jitted._jit_info.compiler_options_kvs) or None}


def requested_shardings(jitted: Any) -> list[Any]:
    """Return the leaves of `in_shardings` and `out_shardings` of a jitted function."""
    info = jitted._jit_info
    return [*info.in_shardings_leaves, *info.out_shardings_leaves]


def trace_jitted(jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JaxProgram:
    """Trace a jitted function for a call, in JAX's own cache of traces."""
    traced, values = jax_pjit._infer_params(jitted._fun, jitted._jit_info, args, kwargs)
    return _program(traced, values)


def _program(traced: Any, values: Sequence[Any]) -> JaxProgram:
    """Return a program with the arguments of its call, from what JAX inferred for it."""
    jaxpr, count = traced.params["jaxpr"], len(traced.consts)
    if jaxpr.is_high:
        types = list(map(jax_pjit.convert_to_metaty, values))
        parts = types, traced.params, traced.in_tree, traced.out_tree, traced.consts, ""
        return read_traced(jax.stages.Traced(*parts))
    return JaxProgram(
        jaxpr=jaxpr,
        params=traced.params,
        values=tuple(values[count:]),
        in_tree=in_default_registry(traced.in_tree),
        out_tree=in_default_registry(traced.out_tree),
        consts=tuple(traced.consts),
    )


def read_traced(stage: Any) -> JaxProgram:
    """Return the program of a `jax.stages.Traced`.

    Types of JAX's high-level values (hijax) are lowered to those of the arrays behind them.
    """
    low = stage.lojax
    count = len(low._consts)
    return JaxProgram(
        jaxpr=low.jaxpr,
        params=low._params,
        values=tuple(map(_struct, low._meta_tys_flat[count:])),
        in_tree=in_default_registry(low._in_tree),
        out_tree=in_default_registry(low.out_tree),
        consts=tuple(low._consts),
    )


def _struct(meta: Any) -> Any:
    """Return shape, dtype and sharding of an argument that a stage was traced for."""
    aval = meta.aval
    if not hasattr(aval, "shape"):
        return aval
    return struct_of(aval, meta.sharding if meta.committed else None)


def inner_stage(stage: Any) -> Any:
    """Return the stage of JAX inside of a stage of flax or equinox; None without one."""
    parts = [stage, *(getattr(stage, name, None) for name in ("traced", "lowered", "compiled"))]
    return next((part for part in parts if isinstance(part, _STAGES)), None)


_STAGES = (jax.stages.Traced, jax.stages.Lowered, jax.stages.Compiled)

INFER_PARAMS_LOCK = threading.RLock()
"""Held while JAX's `_infer_params` is replaced: while a wrapper is read, and to begin a watch."""


class _Reached(BaseException):
    """Ends the method `lower` of a wrapper where JAX would lower what it has traced."""


def capture(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JaxProgram | None:
    """Return the program that the method `trace` or `lower` of a wrapper of `jax.jit` makes.

    The wrapper prepares the arguments in its own way; they are read where JAX infers the program's
    parameters. A `lower` ends before JAX lowers.

    Args:
        fun: The wrapper.
        args: Positional arguments of a call of it.
        kwargs: Keyword arguments of the call.

    Returns:
        None if the method does not reach `jax.jit`.
    """
    with _recorded() as recorded:
        try:
            stage = fun.trace(*args, **kwargs) if hasattr(fun, "trace") else None
            if stage is None:
                with _stopped():
                    fun.lower(*args, **kwargs)
        except _Reached as reached:
            (stage,) = reached.args
    traced = None if stage is None else inner_stage(stage)
    if not isinstance(traced, jax.stages.Traced):
        return None
    for inferred, values in recorded:
        if inferred.params is traced._params:
            return _program(inferred, values)
    return read_traced(traced)


def capture_shapes(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JaxProgram | None:
    """Return the program of a wrapper for arguments with shapes in place of arrays.

    A wrapper may take a `jax.ShapeDtypeStruct` for a static value. It gets tracers for them, which
    are arrays to it.
    """
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    chosen = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]
    structs = [leaf for leaf, is_struct in zip(leaves, chosen, strict=True) if is_struct]
    captured: list[JaxProgram | None] = []

    def call(tracers: list[Any]) -> None:
        known = {id(t): struct for t, struct in zip(tracers, structs, strict=True)}
        rest = iter(tracers)
        pairs = zip(leaves, chosen, strict=True)
        inner = tree.unflatten([next(rest) if is_struct else leaf for leaf, is_struct in pairs])
        program = capture(fun, *inner)
        if program is not None:
            values = (
                known.get(id(v), _struct(jax_pjit.convert_to_metaty(v)))
                if isinstance(v, Tracer)
                else v
                for v in program.values
            )
            program = replace(program, values=tuple(values))
        captured.append(program)

    jax.eval_shape(call, structs)
    return captured[0]


@contextmanager
def _recorded() -> Iterator[list[tuple[Any, Sequence[Any]]]]:
    """Record the parameters and arguments of each jitted function that this thread traces."""
    recorded: list[tuple[Any, Sequence[Any]]] = []
    thread = threading.get_ident()
    with INFER_PARAMS_LOCK:
        infer = jax_pjit._infer_params

        def record(*args: Any) -> Any:
            result = infer(*args)
            if threading.get_ident() == thread:
                recorded.append(result)
            return result

        replace_name(jax_pjit, "_infer_params", record)
        try:
            yield recorded
        finally:
            replace_name(jax_pjit, "_infer_params", infer)


@contextmanager
def _stopped() -> Iterator[None]:
    """Raise `_Reached` with a stage of this thread in place of lowering it."""
    lower, thread = jax.stages.Traced.lower, threading.get_ident()

    def stop(stage: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise _Reached(stage)  # no-catalogue: `capture` catches it
        return lower(stage, *args, **kwargs)

    jax.stages.Traced.lower = stop
    try:
        yield
    finally:
        jax.stages.Traced.lower = lower


_RENAMED: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def renamed(
    jaxpr: Jaxpr,
    arg_names: tuple[str, ...],
    result_paths: tuple[str, ...] | None,
    fun: Callable[..., Any] | None = None,
) -> Jaxpr:
    """Return a jaxpr whose debug information has other paths and the place of a function.

    Equal names give the same jaxpr as long as the first one lives, so that programs are cached.

    Args:
        jaxpr: The jaxpr.
        arg_names: Path of each argument.
        result_paths: Path of each result; None for those that it has.
        fun: The function whose place it gets; None for the one that it has.
    """
    debug = jaxpr.debug_info
    source = debug.func_src_info if fun is None else api_util.fun_sourceinfo(fun)
    results = debug.result_paths if result_paths is None else result_paths
    known = _RENAMED.setdefault(jaxpr, {})
    names = arg_names, results, source
    if names not in known:
        debug = debug._replace(arg_names=arg_names, result_paths=results, func_src_info=source)
        known[names] = replace_fields(jaxpr, debug_info=debug)
    return known[names]


@dataclass(frozen=True, eq=False)
class JaxExecutable:
    """Program of a `jax.stages.Compiled`.

    Attributes:
        name: The function's name.
        source: Its name and location; empty if unknown.
        paths: The path of each argument, and of each result.
        trees: The trees of `(args, kwargs)` and of the result.
        in_avals: The abstract values of all arguments of a call.
        donated: For each argument of a call, True if its buffers may be reused.
        kept: For each argument of a call, True if the program takes it.
        taken_avals: The abstract values of the closed-over arrays and arguments that it takes.
        out_avals: The abstract values of the results.
        shardings: JAX's sharding of each closed-over array and argument that it takes, and of each
            result.
        devices: The device assignment.
        ordered_effects: Effects whose tokens come first among arguments and results.
        executable: PJRT's loaded executable.
    """

    name: str
    source: str
    paths: tuple[tuple[str, ...], tuple[str, ...]]
    trees: tuple[TreeDef, TreeDef]
    in_avals: tuple[Any, ...]
    donated: tuple[bool, ...]
    kept: tuple[bool, ...]
    taken_avals: tuple[Any, ...]
    out_avals: tuple[Any, ...]
    shardings: tuple[Sequence[Any], Sequence[Any]]
    devices: tuple[Any, ...]
    ordered_effects: tuple[Any, ...]
    executable: Any


def read_compiled(stage: Any) -> JaxExecutable | None:
    """Return the program of a `jax.stages.Compiled`; None for one of another kind."""
    program = getattr(stage._executable, "_unloaded_executable", None)
    if program is None:
        return None
    first, count = len(stage._params.const_args), stage.in_tree.num_leaves
    infos, debug = jax.tree_util.tree_leaves(stage.args_info), None
    if program.all_args_info is not None:
        debug = program.all_args_info.debug_info
    names = debug.safe_arg_names(first + count)[first:] if debug else (None,) * count
    results = len(program.output_avals)
    out_paths = debug.safe_result_paths(results) if debug else ("",) * results
    return JaxExecutable(
        name=_function_name(program.name),
        source=debug.func_src_info if debug else "",
        paths=(tuple(n or f"argument {i}" for i, n in enumerate(names)), tuple(out_paths)),
        trees=(in_default_registry(stage.in_tree), in_default_registry(stage.out_tree)),
        in_avals=tuple(info._aval for info in infos),
        donated=tuple(info.donated for info in infos),
        kept=tuple(first + i in program.kept_var_idx for i in range(count)),
        taken_avals=tuple(program.input_avals),
        out_avals=tuple(program.output_avals),
        shardings=(program.input_shardings, program.output_shardings),
        devices=tuple(program.device_list),
        ordered_effects=tuple(program.ordered_effects),
        executable=program.xla_executable,
    )


def read_requests(lowered: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the shardings with which a `jax.stages.Lowered` annotates arguments and results."""
    parts = lowered._lowering.compile_args
    return tuple(parts["in_shardings"]), tuple(parts["out_shardings"])


def target_of(lowered: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Return the devices of a `jax.stages.Lowered`, and the platforms it was lowered for."""
    lowering = lowered._lowering
    return tuple(lowering._device_list or ()), tuple(lowering._platforms)


def name_and_devices(stage: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the function's name and the devices of a `jax.stages.Lowered` or `Compiled`."""
    if isinstance(stage, jax.stages.Lowered):
        return _function_name(stage._lowering._name), target_of(stage)[0]
    executable = stage.runtime_executable()
    name = getattr(stage, "fun_name", "") or executable.hlo_modules()[0].name.removeprefix("jit_")
    return name, tuple(executable.local_devices())


def _function_name(module: str) -> str:
    """Return the name of the function inside JAX's name of a module, such as `jit(step)`."""
    return module.partition("(")[2].rpartition(")")[0] or module
