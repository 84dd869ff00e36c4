"""Read what JAX traced of functions of `jax.jit`, and of wrappers whose methods reach it."""

import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from xlashard._jax import originals
from xlashard._jax.private import jax_pjit, replace_name
from xlashard._jax.runtime.shardings import UnspecifiedValue
from xlashard._jax.trace.tracing import (
    Jaxpr,
    TreeDef,
)
from xlashard._jax.tree_definitions import in_default_registry
from xlashard.support.lazily import dataclass


@dataclass(frozen=True, eq=False)
class JitTrace:
    """A call of a function of `jax.jit`, traced.

    Attributes:
        stage: JAX's stage. Types of its high-level values (hijax) are those of the arrays behind.
        values: The dynamic arguments, flat; None if the call is not known.
    """

    stage: jax.stages.Traced
    values: tuple[Any, ...] | None = None

    @property
    def jaxpr(self) -> Jaxpr:
        """Return the closed jaxpr."""
        return self._low.jaxpr

    @property
    def params(self) -> Mapping[str, Any]:
        """Return the parameters of JAX's `jit` primitive, by name."""
        return self._low._params

    @property
    def types(self) -> Sequence[Any]:
        """Return type, sharding and commitment of each argument."""
        return self._low._meta_tys_flat[len(self._low._consts) :]

    @property
    def trees(self) -> tuple[TreeDef, TreeDef]:
        """Return the trees of `(args, kwargs)`, without static arguments, and of the result."""
        low = self._low
        return in_default_registry(low._in_tree), in_default_registry(low.out_tree)

    @property
    def tracers(self) -> tuple[Any, ...]:
        """Return the closed-over tracers of a trace around the call."""
        return tuple(self._low._consts)

    @property
    def paths(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the path of each argument, and of each result."""
        debug, first = self.jaxpr.debug_info, len(self._low._consts)
        names = debug.safe_arg_names(len(self.jaxpr.in_avals))[first:]
        paths = tuple([name or f"argument {i}" for i, name in enumerate(names)])
        return paths, tuple(debug.safe_result_paths(len(self.jaxpr.out_avals)))

    @property
    def _low(self) -> Any:
        stage: Any = self.stage
        return stage.lojax


def is_jitted(fun: Any) -> bool:
    """Return True for a function that `jax.jit` returned."""
    return isinstance(fun, _JITTED) and hasattr(fun, "_jit_info") and hasattr(fun, "_fun")


_JITTED = type(originals.jit(lambda: None))


# Attributes through which wrappers hold a jitted function: nnx.jit, eqx.filter_jit,
# functools.partial, bound methods.
_HELD_BY = ("jitted_fn", "_cached", "func", "__func__")
_DEEPEST = 8


def list_held(fun: Any) -> Iterator[Any]:
    """Yield a callable, the function that it wraps, the one that this wraps, and so on."""
    for _ in range(_DEEPEST):
        yield fun
        fun = next((getattr(fun, name) for name in _HELD_BY if hasattr(fun, name)), None)


def jitted_within(fun: Any) -> Any | None:
    """Return the function of `jax.jit` that a callable is or wraps; None without one."""
    return next(filter(is_jitted, list_held(fun)), None)


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


def trace_jitted(jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JitTrace:
    """Trace a jitted function for a call, in JAX's own cache of traces."""
    traced = JitTrace(jitted.trace(*args, **kwargs))
    _, argnums, argnames = function_of(jitted)
    fixed = {number % len(args) for number in argnums if -len(args) <= number < len(args)}
    passed = [value for i, value in enumerate(args) if i not in fixed]
    named = {name: value for name, value in kwargs.items() if name not in argnames}
    values = jax.tree_util.tree_leaves((passed, named))
    if len(values) != len(traced.types):
        return traced  # of high-level values, JAX traces the arrays behind
    return JitTrace(traced.stage, tuple(values))


def make_trace(jaxpr: Jaxpr, params: Mapping[str, Any], types: Sequence[Any]) -> JitTrace:
    """Return the trace of a program by what JAX lowers it from.

    Args:
        jaxpr: Its closed jaxpr.
        params: The parameters of JAX's `jit` primitive, by name, with or without the jaxpr.
        types: Type, sharding and commitment of each argument.
    """
    in_tree = jax.tree_util.tree_structure(((0,) * len(types), {}))
    out_tree = jax.tree_util.tree_structure([0] * len(jaxpr.out_avals))
    return JitTrace(_stage(types, {**params, "jaxpr": jaxpr}, in_tree, out_tree))


def unplaced_types(program: JitTrace) -> list[Any]:
    """Return the types of the arguments of a program, which are placed nowhere."""
    nowhere = {"sharding": None, "format": None, "committed": False, "is_np_array": False}
    return [own.replace(**nowhere) for own in program.types]


def make_traced(program: JitTrace, **changes: Any) -> jax.stages.Traced:
    """Return the stage of a program with other parameters of JAX's `jit` primitive.

    Args:
        program: The program.
        **changes: Parameters by name; `types` for the types of the arguments.
    """
    types = changes.pop("types", program.types)
    low = program._low
    return _stage(types, {**program.params, **changes}, low._in_tree, low.out_tree)


def _stage(
    types: Sequence[Any], params: dict[str, Any], in_tree: TreeDef, out_tree: TreeDef
) -> jax.stages.Traced:
    # JAX before 0.11 asks for no place of the function.
    names = inspect.signature(jax.stages.Traced).parameters
    place = [""] if "fun_sourceinfo" in names else []
    return jax.stages.Traced(list(types), params, in_tree, out_tree, [], *place)


def inner_stage(stage: Any) -> Any:
    """Return the stage of JAX inside of a stage of flax or equinox; None without one."""
    parts = [stage, *(getattr(stage, name, None) for name in ("traced", "lowered", "compiled"))]
    return next((part for part in parts if isinstance(part, _STAGES)), None)


_STAGES = (jax.stages.Traced, jax.stages.Lowered, jax.stages.Compiled)

INFER_PARAMS_LOCK = threading.RLock()
"""Held while JAX's `_infer_params` is replaced: while a wrapper is read, and to begin a watch."""


class _Reached(BaseException):
    """Ends the method `lower` of a wrapper where JAX would lower what it has traced."""


def capture(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JitTrace | None:
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
            has_trace = callable(getattr(fun, "trace", None))
            stage = fun.trace(*args, **kwargs) if has_trace else None
            if stage is None:
                with _stopped():
                    fun.lower(*args, **kwargs)
        except _Reached as reached:
            (stage,) = reached.args
    traced = None if stage is None else inner_stage(stage)
    if not isinstance(traced, jax.stages.Traced):
        return None
    for inferred, values in recorded:
        if inferred.params is traced._params and not inferred.params["jaxpr"].is_high:
            return JitTrace(traced, tuple(values[len(inferred.consts) :]))
    return JitTrace(traced)


def capture_shapes(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JitTrace | None:
    """Return the program of a wrapper for arguments with shapes in place of arrays."""
    program, structs = call_with_tracers(lambda *call: capture(fun, *call), args, kwargs)
    if program is None or program.values is None:
        return program
    values = tuple([structs.get(id(value), value) for value in program.values])
    types = [
        jax_pjit.convert_to_metaty(value) if isinstance(value, jax.ShapeDtypeStruct) else own
        for value, own in zip(values, program.types, strict=True)
    ]
    return JitTrace(make_traced(program, types=types), values)


def call_with_tracers[R](
    read: Callable[[tuple[Any, ...], dict[str, Any]], R],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[R, dict[int, jax.ShapeDtypeStruct]]:
    """Call a function of the arguments of a wrapper with tracers in place of shapes.

    A wrapper may take a `jax.ShapeDtypeStruct` for a static value; a tracer is an array to it.

    Args:
        read: The function, of positional and keyword arguments. Its result keeps the tracers.
        args: Positional arguments of a call of the wrapper.
        kwargs: Keyword arguments of the call.

    Returns:
        Its result, and the shape of each tracer by id.
    """
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    chosen = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]
    structs = [leaf for leaf, is_struct in zip(leaves, chosen, strict=True) if is_struct]
    results: list[R] = []
    known: dict[int, jax.ShapeDtypeStruct] = {}

    def call(tracers: list[Any]) -> None:
        known.update({id(t): struct for t, struct in zip(tracers, structs, strict=True)})
        rest = iter(tracers)
        pairs = zip(leaves, chosen, strict=True)
        results.append(
            read(*tree.unflatten([next(rest) if is_struct else leaf for leaf, is_struct in pairs]))
        )

    jax.eval_shape(call, structs)
    return results[0], known


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


@dataclass(frozen=True, eq=False)
class StageFacts:
    """Facts that JAX keeps of a `jax.stages.Lowered` or `jax.stages.Compiled`.

    Attributes:
        name: The function's name.
        source: Its name and location; empty if unknown.
        paths: JAX's path of each argument, and of each result.
        devices: The device assignment; empty if all its meshes are abstract.
        avals: The abstract values of the module's parameters and results, tokens left out.
        shardings: JAX's shardings of the same; None for one that is unspecified.
        layouts: The layouts of the same; None for the default one, and of a compiled program.
        donated: For each parameter, True if its buffers may be reused.
        parameters: The position of each argument among the parameters; None if it is dropped.
        ordered_effects: Effects whose tokens come first among parameters and results.
        written: For each result, the position of the parameter that is a reference with this new
            value, or None; empty for a compiled program.
        module: The module of MLIR; None for a compiled program.
        platforms: The platforms that it was lowered for.
        host_callbacks: Callbacks to pass to the compiler.
        options: Compiler options.
        mesh: The first mesh of devices that it names; None without one.
        executable: PJRT's loaded executable; None for a lowered program.
    """

    name: str
    source: str
    paths: tuple[tuple[str, ...], tuple[str, ...]]
    devices: tuple[Any, ...]
    avals: tuple[tuple[Any, ...], tuple[Any, ...]]
    shardings: tuple[Sequence[Any], Sequence[Any]]
    layouts: tuple[Sequence[Any], Sequence[Any]]
    donated: tuple[bool, ...]
    parameters: tuple[int | None, ...]
    ordered_effects: tuple[Any, ...]
    written: tuple[int | None, ...] = ()
    module: Any = None
    platforms: tuple[str, ...] = ()
    host_callbacks: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    mesh: Any = None
    executable: Any = None


def read_compiled(stage: Any) -> StageFacts | None:
    """Return what JAX keeps of a `jax.stages.Compiled`; None for one of another kind."""
    program = getattr(stage._executable, "_unloaded_executable", None)
    if program is None:
        return None
    first, count = len(stage._params.const_args), stage.in_tree.num_leaves
    debug = program.all_args_info and program.all_args_info.debug_info
    names = debug.safe_arg_names(first + count)[first:] if debug else (None,) * count
    operands, results = len(program.input_avals), len(program.output_avals)
    out_paths = debug.safe_result_paths(results) if debug else ("",) * results
    parameters = _number_parameters(program.kept_var_idx, first, count)
    donated = {parameters[i] for i in stage.donate_argnums}
    return StageFacts(
        name=_function_name(program.name),
        source=debug.func_src_info if debug else "",
        paths=(tuple(n or f"argument {i}" for i, n in enumerate(names)), tuple(out_paths)),
        devices=tuple(program.device_list),
        avals=(tuple(program.input_avals), tuple(program.output_avals)),
        shardings=(program.input_shardings, program.output_shardings),
        layouts=((None,) * operands, (None,) * results),
        donated=tuple([i in donated for i in range(operands)]),
        parameters=parameters,
        ordered_effects=tuple(program.ordered_effects),
        executable=program.xla_executable,
    )


def read_lowered(lowered: Any) -> StageFacts:
    """Return what JAX keeps of a `jax.stages.Lowered`."""
    lowering = lowered._lowering
    parts, first = lowering.compile_args, len(lowering.const_args)
    devices = tuple(lowering._device_list or ())
    count, results = lowered.in_tree.num_leaves, len(parts["global_out_avals"])
    debug = parts["all_args_info"].debug_info
    names = debug.safe_arg_names(first + count)[first:]
    # The values of references that the program writes follow its results.
    written = tuple(parts["mut"].out_mut) if parts["mut"] else (None,) * results
    return StageFacts(
        name=_function_name(lowering._name),
        module=lowering.stablehlo(),
        devices=devices,
        platforms=tuple(lowering._platforms),
        avals=(tuple(parts["global_in_avals"]), tuple(parts["global_out_avals"])),
        shardings=(
            tuple([_name_request(sharding, devices) for sharding in parts["in_shardings"]]),
            tuple([_name_request(sharding, devices) for sharding in parts["out_shardings"]]),
        ),
        layouts=(tuple(parts["in_layouts"]), tuple(parts["out_layouts"])),
        donated=tuple(lowering._donated_invars),
        parameters=_number_parameters(parts["kept_var_idx"], first, count),
        written=written,
        ordered_effects=tuple(parts["ordered_effects"]),
        host_callbacks=tuple(parts["host_callbacks"]),
        options=tuple(lowering._compiler_options_kvs),
        paths=(
            tuple([name or f"argument {i}" for i, name in enumerate(names)]),
            tuple(debug.safe_result_paths(written.count(None))),
        ),
        source=debug.func_src_info or "",
        mesh=_find_mesh(parts),
    )


def _find_mesh(parts: Mapping[str, Any]) -> Any:
    sides = parts["in_shardings"], parts["out_shardings"], parts["intermediate_shardings"]
    named = (getattr(sharding, "mesh", None) for side in sides for sharding in side)
    meshes = (parts["context_mesh"], *named)
    return next((m for m in meshes if isinstance(m, jax.sharding.Mesh) and not m.empty), None)


def _number_parameters(kept: Any, first: int, count: int) -> tuple[int | None, ...]:
    """Return the position of each argument among the parameters, after those that are hoisted."""
    numbers = itertools.count(first)
    return tuple([next(numbers) if first + i in kept else None for i in range(count)])


def _name_request(sharding: Any, devices: Sequence[Any]) -> Any:
    # jax.jit(device=...) names its device by the same sharding for all values.
    if isinstance(sharding, UnspecifiedValue) or getattr(sharding, "_device_backend", False):
        return None
    mesh = getattr(sharding, "mesh", None)
    if isinstance(mesh, jax.sharding.AbstractMesh) and mesh.size == len(devices):
        # An abstract mesh has the program's devices, in their order.
        grid = np.array(devices).reshape(mesh.axis_sizes)
        mesh = jax.sharding.Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)
        return jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return sharding


def _function_name(module: str) -> str:
    """Return the name of the function inside JAX's name of a module, such as `jit(step)`."""
    return module.partition("(")[2].rpartition(")")[0] or module
