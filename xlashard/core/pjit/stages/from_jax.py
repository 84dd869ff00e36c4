"""Convert functions and programs of `jax.jit` to traced calls of this package."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from xlashard._jax.runtime.shardings import UnspecifiedValue
from xlashard._jax.trace import jitted, module_calls
from xlashard._jax.trace.jaxprs import as_function
from xlashard._jax.trace.target_chip import assume_chip
from xlashard._jax.trace.tracing import TracedFunction, Tracer, mesh_in_force
from xlashard.core.pjit.arguments import check_values
from xlashard.core.pjit.cache_key import LoweringRequest
from xlashard.core.pjit.function import Function
from xlashard.core.pjit.options import PjitOptions, Selected, check_callable
from xlashard.core.pjit.shardings.resources import UNSPECIFIED, read_resources
from xlashard.core.pjit.signature import Parameters, function_name
from xlashard.core.pjit.stages.traced import Lowered, Traced
from xlashard.core.pjit.stages.wrapper_paths import (
    NnxPaths,
    cached_arguments,
    equinox_paths,
    is_equinox,
)
from xlashard.core.pjit.trace import Call, find_target_device, with_explained_axes
from xlashard.core.program.plan import option_items
from xlashard.core.sharding import Mesh, Sharding, from_jax
from xlashard.errors import ArgumentError

_NONE = Selected((), ())


class ConvertedFunction(Function):
    """Function of `jax.jit`, with the options under which JAX traced a call of it."""

    def record(self, call: Call, request: LoweringRequest | None = None) -> None:
        """Record nothing: the calls are JAX's."""


def traced_call(
    fun: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> tuple[Function, Call]:
    """Trace a call of anything that JAX can lower.

    Args:
        fun: A function made by `xlashard.pjit`; one made by `jax.jit`; a wrapper of such a function
            with a method `trace` or `lower`, such as those of `nnx.jit` and `eqx.filter_jit`; a
            partial or bound method of one; or a plain function, as `jax.jit` would trace it.
        args: Positional arguments; a `jax.ShapeDtypeStruct` stands in for an array.
        kwargs: Keyword arguments.

    Raises:
        ArgumentError: If `fun` is not callable, does not reach `jax.jit`, or closes over tracers,
            or if an argument is a tracer.
    """
    fun, args, kwargs = unwrapped(fun, tuple(args), dict(kwargs or {}))
    _check_tracers(fun, args, kwargs)
    leaves = jax.tree_util.tree_leaves((args, kwargs))
    with assume_chip(find_target_device(mesh_in_force(), leaves, _requested(fun))):
        return _traced_call(fun, args, kwargs)


def _requested(fun: Any) -> Sequence[Any]:
    inner = jitted.jitted_within(fun)
    return () if inner is None else jitted.requested_shardings(inner)


def _traced_call(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Function, Call]:
    own = getattr(fun, "_function", None)
    if isinstance(own, Function):
        return own, own.trace(args, kwargs)
    if not jitted.is_jitted(fun) and not _is_wrapper(fun):
        check_callable(fun)
        fun = jax.jit(_hashable(fun))
    if jitted.is_jitted(fun):
        return _of_jitted(fun, args, kwargs)
    program = with_explained_axes(_captured, fun, args, kwargs)
    if program is None:
        raise ArgumentError(
            f"{function_name(fun)} ({type(fun).__name__}) has a method trace or lower that does "
            "not reach jax.jit: pass the function inside it"
        )
    user = getattr(fun, "__wrapped__", fun)
    own = program.jaxpr.debug_info.safe_arg_names(len(program.jaxpr.in_avals))
    own = own[len(program.consts) :]
    if is_equinox(fun):
        results = program.jaxpr.debug_info.safe_result_paths(len(program.jaxpr.out_avals))
        names, results = equinox_paths((fun, args, kwargs), own, results)
    else:
        nnx = NnxPaths.of(program.in_tree, program.out_tree, own, fun)
        results = nnx.results if nnx else None
        own = nnx.arguments if nnx else own
        names = own
        # The arguments that `nnx.jit_partial` was given precede those of the call.
        if not hasattr(fun, "partial_args") or not fun.partial_args:
            names = _users_paths(program, own, argument_leaves(fun, args, kwargs))
        if results is not None:
            users = dict(zip(own, names, strict=True))
            results = tuple(users.get(path, path) for path in results)
    jaxpr = jitted.renamed(program.jaxpr, names, results, user)
    params = {**program.params, "name": function_name(user)}
    return _converted(replace(program, jaxpr=jaxpr, params=params), user, _NONE)


def _captured(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jitted.JaxProgram | None:
    """Return the program of a wrapper, also of one to which a shape is no array."""
    leaves = jax.tree_util.tree_leaves((args, kwargs))
    structs = {id(leaf) for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)}
    try:
        program = jitted.capture(fun, args, kwargs)
        if program is None or structs <= set(map(id, program.values)):
            return program
    except Exception:
        if not structs:
            raise
    return jitted.capture_shapes(fun, args, kwargs)


def call_of_jax(
    jaxpr: Any, params: Mapping[str, Any], values: Sequence[Any]
) -> tuple[Function, Call]:
    """Convert a program that JAX traced for `jax.jit`.

    Args:
        jaxpr: Its closed jaxpr.
        params: The parameters of JAX's `jit` primitive: `in_shardings`, `out_shardings`,
            `in_layouts`, `out_layouts`, `donated_invars`, `ctx_mesh`, `name`, `keep_unused` and
            `compiler_options_kvs`.
        values: The arguments, flat: arrays, or their shapes with shardings.

    Example:
        >>> import numpy as np
        >>> traced = jax.jit(lambda x: x * 2).trace(np.ones(2, np.float32))
        >>> _, call = call_of_jax(traced.jaxpr, traced._params, [np.ones(2, np.float32)])
        >>> call.traced.arg_names
        ('x',)
    """
    in_tree = jax.tree_util.tree_structure(((0,) * len(values), {}))
    out_tree = jax.tree_util.tree_structure([0] * len(jaxpr.out_avals))
    program = jitted.JaxProgram(jaxpr, params, tuple(values), in_tree, out_tree)
    return _converted(program, as_function(jaxpr), _NONE)


def call_of_stage(stage: jax.stages.Traced | jax.stages.Lowered) -> tuple[Function, Call]:
    """Return the call of a traced or lowered stage.

    That of JAX's stages has shapes and shardings for its arguments. A Lowered of JAX calls its
    StableHLO module.

    Raises:
        ArgumentError: If nothing else can call the module of a Lowered.
    """
    if isinstance(stage, Lowered):
        stage = stage._traced
    if isinstance(stage, Traced):
        return stage._function, stage._call
    if not isinstance(stage, jax.stages.Lowered):
        return _of_program(jitted.read_traced(stage))
    name = jitted.name_and_devices(stage)[0]
    why_not = module_calls.why_not_callable(stage)
    if why_not:
        raise ArgumentError(
            f"{name} is a Lowered that {why_not}, so its module fits no other program: pass the "
            "function and its arguments, or what its method trace returns"
        )
    return _of_program(module_calls.read_lowered(stage))


def _of_program(program: jitted.JaxProgram) -> tuple[Function, Call]:
    """Return the call of a stage's program, with the paths of modules if it is of `nnx.jit`."""
    own = program.jaxpr.debug_info.safe_arg_names(len(program.jaxpr.in_avals))
    own = own[len(program.consts) :]
    nnx = NnxPaths.of(program.in_tree, program.out_tree, own)
    if nnx is not None and not program.consts:
        jaxpr = jitted.renamed(program.jaxpr, nnx.arguments, nnx.results)
        program = replace(program, jaxpr=jaxpr)
    return _converted(program, as_function(program.jaxpr), _NONE)


def unwrapped(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the compiled function inside partials (`nnx.cached_partial` too) and bound methods.

    A function that holds no compiled one is returned unchanged.
    """
    inner, before, named = fun, args, kwargs
    while True:
        if _is_compiled(inner):
            return inner, before, named
        if hasattr(inner, "__func__") and hasattr(inner, "__self__"):
            inner, before = inner.__func__, (inner.__self__, *before)
        elif all(hasattr(inner, name) for name in ("func", "args", "keywords")):
            before, named = (*inner.args, *before), {**inner.keywords, **named}
            inner = inner.func
        elif (cached := cached_arguments(inner)) is not None:
            inner, before = cached[0], (*cached[1], *before)
        else:
            return fun, args, kwargs


def _is_compiled(fun: Any) -> bool:
    """Return True for a function of ours or of `jax.jit`, or a wrapper of one."""
    if isinstance(fun, functools.partial) or hasattr(fun, "__func__"):
        return False
    return isinstance(getattr(fun, "_function", None), Function) or _is_wrapper(fun)


def _is_wrapper(fun: Any) -> bool:
    return callable(fun) and (hasattr(fun, "trace") or hasattr(fun, "lower"))


def _hashable(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as `jax.jit` takes it: modules that hold arrays have no hash."""
    try:
        hash(fun)
    except TypeError:
        return _delegate(fun)
    return fun


def _delegate(fun: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    functools.update_wrapper(call, fun, updated=())
    call.__name__ = function_name(fun)
    return call


def _check_tracers(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for leaf in jax.tree_util.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tracer):
            raise ArgumentError(
                f"{function_name(fun)} got a tracer: inside jax.jit, grad or vmap the call is part "
                "of another program; call explain or preflight outside of it, with arrays or "
                "jax.ShapeDtypeStructs"
            )


def argument_leaves(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the dynamic leaves of the arguments of a call, by path.

    Args:
        fun: A function as `unwrapped` returns it.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    own = getattr(fun, "_function", None)
    parameters = own.parameters if isinstance(own, Function) else _parameters(fun)
    paths, leaves = parameters.paths(args, kwargs), parameters.leaves(args, kwargs)
    return dict(zip(paths, leaves, strict=True))


def _parameters(fun: Any) -> Parameters:
    """Return the parameters of a function of `jax.jit`, of a wrapper of one, or of another one."""
    if not jitted.is_jitted(fun):
        return Parameters.of(getattr(fun, "__wrapped__", fun), _NONE, _NONE)
    user, argnums, argnames = jitted.function_of(fun)
    return Parameters.of(user, Selected(argnums, argnames), _NONE)


def _of_jitted(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Function, Call]:
    user, argnums, argnames = jitted.function_of(fun)
    leaves = argument_leaves(fun, args, kwargs)
    check_values(list(leaves.values()), list(leaves))
    program = with_explained_axes(jitted.trace_jitted, fun, args, kwargs)
    return _converted(program, user, Selected(argnums, argnames))


def _users_paths(
    program: jitted.JaxProgram, own: Sequence[str], leaves: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return a path of each argument, in the caller's tree where an array is found in it.

    A wrapper passes the arrays of its arguments on in a tree of its own.
    """
    paths: dict[int, str | None] = {}
    for path, value in leaves.items():
        if isinstance(value, _ARRAYS):
            # An array that was passed twice has two paths.
            paths[id(value)] = None if id(value) in paths else path
    return tuple(
        paths.get(id(value)) or name for value, name in zip(program.values, own, strict=True)
    )


_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


type _Shardings = tuple[Sharding | None, ...]


def _converted(
    program: jitted.JaxProgram, user: Callable[..., Any], static: Selected
) -> tuple[Function, Call]:
    params, jaxpr = program.params, program.jaxpr
    name = params["name"]
    if program.consts:
        raise ArgumentError(
            f"{name} closes over tracers of a transformation or of jax.jit around it: pass a "
            "function that is defined outside of it"
        )
    ins, outs, device = _requests(params)
    function = ConvertedFunction(user, _options(params, device), static)
    function.name = name
    names = jaxpr.debug_info.safe_arg_names(len(jaxpr.in_avals))
    traced = TracedFunction(
        name=name,
        jaxpr=jaxpr,
        in_avals=tuple(jaxpr.in_avals),
        in_tree=program.in_tree,
        out_tree=program.out_tree,
        arg_names=tuple(n or f"argument {i}" for i, n in enumerate(names)),
        result_paths=tuple(jaxpr.debug_info.safe_result_paths(len(jaxpr.out_avals))),
        consts=(),
        is_new=False,
    )
    mesh = params["ctx_mesh"]
    call = Call(
        traced=traced,
        values=program.values,
        mesh=mesh if isinstance(mesh, Mesh) and not mesh.empty else None,
        in_shardings=ins,
        out_shardings=outs,
        layouts=(tuple(params["in_layouts"]), tuple(params["out_layouts"])),
        donated=tuple(params["donated_invars"]),
    )
    return function, call


def _requests(params: Mapping[str, Any]) -> tuple[_Shardings, _Shardings, Any]:
    """Return the shardings requested of arguments and of results, or one device for all."""
    ins, outs = params["in_shardings"], params["out_shardings"]
    for sharding in (*ins, *outs):
        if getattr(sharding, "_device_backend", False):
            # jax.jit(device=...) requests its device by the same sharding for all values.
            (device,) = sharding.device_set
            return (None,) * len(ins), (None,) * len(outs), device
    return tuple(map(_own, ins)), tuple(map(_own, outs)), None


def _own(sharding: Any) -> Sharding | None:
    return None if isinstance(sharding, UnspecifiedValue) else from_jax(sharding)


def _options(params: Mapping[str, Any], device: Any) -> PjitOptions:
    return PjitOptions(
        in_resources=read_resources(UNSPECIFIED, "in_shardings"),
        out_resources=read_resources(UNSPECIFIED, "out_shardings"),
        donate=_NONE,
        keep_unused=params["keep_unused"],
        device=device,
        backend=None,
        inline=False,
        compiler_options=option_items(dict(params["compiler_options_kvs"])),
        donation="warn",
    )
