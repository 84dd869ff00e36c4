"""Programs of functions of `jax.jit`, of wrappers of them, and of JAX's stages.

JAX traces and lowers; the module is the one that `jax.jit` runs, with closed-over arrays as
constants. For devices of a topology JAX lowers the same trace again, through `lower_for`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax

from xlashard._jax import originals
from xlashard._jax.lowering import LoweredBody
from xlashard._jax.runtime import compiler, executables
from xlashard._jax.runtime.shardings import (
    Device,
    UnspecifiedValue,
    is_compile_only,
    layout_text,
)
from xlashard._jax.runtime.tracebacks import with_errors_as
from xlashard._jax.stablehlo_modules import list_unportable_calls
from xlashard._jax.trace import jitted
from xlashard._jax.trace.closure_names import find_variable_name
from xlashard._jax.trace.jaxprs import closed_over_arrays
from xlashard._jax.trace.lower_for import (
    DevicesByPosition,
    lower_for,
    move_lowered,
    move_mesh,
    rule_errors,
)
from xlashard._jax.trace.target_chip import trace_for_chip
from xlashard._jax.trace.tracing import inner_shardings, is_token, physical_aval, shaped
from xlashard._jax.tree_definitions import in_default_registry
from xlashard.analysis.programs.program import (
    Compilation,
    CompiledOnly,
    LoweredModule,
    Program,
    ProgramValue,
    find_mesh,
    forgotten_by,
    pick_shardings,
    put_on_mesh,
)
from xlashard.core.program.compile import compile_request, compiler_errors, compiler_input
from xlashard.core.program.executables import (
    HloShardings,
    LoadedExecutable,
    PropagatedShardings,
    resolve_shardings,
)
from xlashard.core.program.plan import Partitioner, ProgramPlan, ValuePlan, option_items
from xlashard.core.program.remote_compile import compile_module
from xlashard.core.program.signature import Signature, function_name
from xlashard.core.program.wrapper_paths import (
    NnxPaths,
    cached_arguments,
    equinox_paths,
    find_users_paths,
    is_equinox,
)
from xlashard.core.sharding import (
    GSPMDSharding,
    Mesh,
    XLACompatibleSharding,
    as_tiles,
    from_jax,
    on_mesh,
)
from xlashard.errors import ArgumentError
from xlashard.hlo.hlo_program import HloProgram, read_modules
from xlashard.support.lazily import deferred

if TYPE_CHECKING:
    from xlashard._jax.runtime.offline import CompileInput, PhaseInput
    from xlashard.core.program import explicit_errors
else:
    # For errors of JAX about explicit mesh axes.
    explicit_errors = deferred("xlashard.core.program.explicit_errors")


type _Shardings = tuple[XLACompatibleSharding, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class JitProgram(Program):
    """A call that `jax.jit` traced.

    Attributes:
        trace: What JAX traced.
    """

    trace: jitted.JitTrace

    def lower(self, devices: DevicesByPosition | None = None) -> "JitModule":
        """Lower the program; see `Program.lower`."""
        stage = self.trace.stage
        own = () if self.mesh is None else tuple(self.mesh.devices.flat)
        target = next(iter(own if devices is None else devices.values()), None)
        if devices is None and target is not None and is_compile_only(target):
            # JAX's rules of kernels and callbacks ask for a device at hand.
            devices = dict(zip(own, own, strict=True)) if target.platform == "gpu" else None
        with rule_errors(self.name, self.jaxpr, target):
            lowered = stage.lower() if devices is None else lower_for(stage, devices)
        mesh = self.mesh if devices is None or self.mesh is None else move_mesh(self.mesh, devices)
        return read_lowered(lowered, self, mesh)

    def with_layout(
        self, jaxpr: Any, ins: Sequence[Any], outs: Sequence[Any], mesh: Mesh | None = None
    ) -> "JitProgram":
        """Return the program under other shardings; see `Program.with_layout`."""
        params, nowhere = self.trace.params, jitted.unplaced_types(self.trace)
        types = zip(self.trace.types, nowhere, ins, strict=True)
        stage = jitted.make_traced(
            self.trace,
            types=[own if new is None else unplaced for own, unplaced, new in types],
            jaxpr=jaxpr,
            in_shardings=pick_shardings(ins, params["in_shardings"]),
            out_shardings=pick_shardings(outs, params["out_shardings"]),
            ctx_mesh=mesh or params["ctx_mesh"],
        )
        return replace(self, trace=jitted.JitTrace(stage), jaxpr=jaxpr, mesh=mesh or self.mesh)

    def onto(self, mesh: Mesh) -> "JitProgram":
        """Return the program on another mesh; see `Program.onto`."""
        params = self.trace.params
        changes = {
            side: tuple([put_on_mesh(sharding, mesh) for sharding in params[side]])
            for side in ("in_shardings", "out_shardings")
        }
        stage = jitted.make_traced(self.trace, ctx_mesh=mesh, **changes)
        return replace(self, trace=jitted.JitTrace(stage, self.trace.values), mesh=mesh)


def read_function(
    fun: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    device: Device | None = None,
) -> JitProgram:
    """Trace a call of anything that JAX can lower.

    Args:
        fun: A function made by `jax.jit`; a wrapper of such a function with a method `trace` or
            `lower`, such as those of `nnx.jit` and `eqx.filter_jit`; or a plain function, as
            `jax.jit` would trace it. See `unwrap` for partials and bound methods.
        args: Positional arguments; a `jax.ShapeDtypeStruct` stands in for an array.
        kwargs: Keyword arguments.
        device: A device of the topology that the program is for; None for those at hand.

    Raises:
        ArgumentError: If `fun` does not reach `jax.jit`, or closes over tracers.
    """
    args, kwargs = tuple(args), dict(kwargs or {})
    if not jitted.is_jitted(fun) and not is_wrapper(fun):
        fun = originals.jit(_make_hashable(fun))
    if jitted.is_jitted(fun):
        user = jitted.function_of(fun)[0]
        trace = _trace(jitted.trace_jitted, (fun, args, kwargs), device)
        return read_trace(trace, user)
    trace = _trace(_capture, (fun, args, kwargs), device)
    user = getattr(fun, "__wrapped__", fun)
    if trace is None:
        raise ArgumentError(
            f"{function_name(user)} ({type(fun).__name__}) has a method trace or lower that does "
            "not reach jax.jit: pass the function inside it"
        )
    paths = find_wrapper_paths((fun, args, kwargs), trace.trees, trace.paths, trace.values)
    return replace(read_trace(trace, user, paths), name=function_name(user))


def find_wrapper_paths(
    call: tuple[Any, tuple[Any, ...], dict[str, Any]],
    trees: tuple[Any, Any],
    own: tuple[tuple[str, ...], tuple[str, ...]],
    values: Sequence[Any] | None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the user's paths of the arguments and results of a call of a wrapper.

    Args:
        call: The wrapper, and the positional and keyword arguments of the call.
        trees: Trees of the arguments and of the result of the function inside.
        own: Their paths.
        values: The arguments of the function inside; None if unknown.
    """
    fun, args, kwargs = call
    results: Sequence[str] | None = None
    if is_equinox(fun):
        names, results = equinox_paths(call, *own)
    else:
        nnx = NnxPaths.of(*trees, own[0], fun)
        module_names = nnx.arguments if nnx else own[0]
        results = nnx.results if nnx else None
        names = module_names
        # The arguments that `nnx.jit_partial` was given precede those of the call.
        if values is not None and not getattr(fun, "partial_args", None):
            leaves = jax.tree_util.tree_leaves((args, kwargs))
            users_paths = Signature.of(getattr(fun, "__wrapped__", fun)).paths(args, kwargs)
            names = find_users_paths(values, module_names, zip(users_paths, leaves, strict=True))
        if results is not None:
            users = dict(zip(module_names, names, strict=True))
            results = [users.get(path, path) for path in results]
    return tuple(names), tuple(own[1] if results is None else results)


def _trace[R: jitted.JitTrace | None](
    trace: Callable[..., R], call: tuple[Any, ...], device: Device | None
) -> R:
    """Trace a call.

    Raises:
        ShardingTypeError: For an error of JAX about explicit mesh axes, with its traceback.
    """
    return with_errors_as(
        lambda error: explicit_errors.explained(error),
        lambda: trace_for_chip(lambda: trace(*call), device)[0],
    )


def read_trace(
    trace: jitted.JitTrace,
    user: Callable[..., Any] | None = None,
    paths: tuple[Sequence[str], Sequence[str]] | None = None,
    unknown: str = "",
) -> JitProgram:
    """Return the program of what `jax.jit` traced.

    Args:
        trace: The trace.
        user: The user's function, whose variables name closed-over arrays.
        paths: The user's path of each argument and result; None for those of JAX.
        unknown: What is not known of the call, as one clause.

    Raises:
        ArgumentError: If the function closes over tracers.
    """
    params, jaxpr, own = trace.params, trace.jaxpr, trace.paths
    name = params["name"]
    if trace.tracers:
        raise ArgumentError(
            f"{name} closes over tracers of a transformation or of jax.jit around it: pass a "
            "function that is defined outside of it"
        )
    if paths is None:
        nnx = NnxPaths.of(*trace.trees, own[0])
        paths = own if nnx is None else (nnx.arguments, nnx.results)
    values = (None,) * len(trace.types) if trace.values is None else trace.values
    arguments = tuple(
        _read_argument(path, meta, value, requested, donated)
        for path, meta, value, requested, donated in zip(
            paths[0],
            trace.types,
            values,
            params["in_shardings"],
            params["donated_invars"],
            strict=True,
        )
    )
    avals = map(shaped, jaxpr.out_avals)
    results = zip(paths[1], avals, params["out_shardings"], strict=True)
    in_tree, out_tree = trace.trees
    return JitProgram(
        name=name,
        in_tree=in_tree,
        out_tree=out_tree,
        arguments=arguments,
        results=tuple(
            ProgramValue(path or "", aval, _read_sharding(sharding, aval))
            for path, aval, sharding in results
        ),
        mesh=_find_mesh(trace),
        jaxpr=jaxpr,
        source=jaxpr.debug_info.func_src_info or "",
        constants=tuple(_read_constants(jaxpr, user)),
        module_paths=_differing(own[0], paths[0]),
        unknown=unknown or ("" if trace.values is not None else WITHOUT_ARRAYS),
        trace=trace,
    )


WITHOUT_ARRAYS = "moves of arguments (a Traced of JAX keeps only their types)"
"""Facts that a `jax.stages.Traced` does not keep."""


def _differing(own: Sequence[str], users: Sequence[str]) -> dict[str, str]:
    pairs = zip(own, users, strict=True)
    return {path: users_path for path, users_path in pairs if path != users_path}


def _read_argument(path: str, meta: Any, value: Any, requested: Any, donated: bool) -> ProgramValue:
    aval = shaped(meta.aval)
    current = None
    if meta.sharding is not None:
        current = _read_sharding(meta.sharding, aval)
    origin = "shape"
    if value is not None:
        is_array = isinstance(value, jax.Array)
        is_shape = isinstance(value, jax.ShapeDtypeStruct)
        origin = "shape" if is_shape else "array" if is_array else "host"
    return ProgramValue(
        path=path,
        aval=aval,
        requested=_read(requested),
        current=current if origin != "host" else None,
        committed=bool(meta.committed and current is not None),
        origin=origin,
        donated=donated,
    )


def _read(sharding: Any) -> Any:
    if sharding is None or isinstance(sharding, UnspecifiedValue):
        return None
    # jax.jit(device=...) names its device by the same sharding for all values.
    return None if getattr(sharding, "_device_backend", False) else from_jax(sharding)


def _read_sharding(sharding: Any, aval: Any) -> XLACompatibleSharding | None:
    own = _read(sharding)
    return None if own is None else as_tiles(own, aval.shape)


def _find_mesh(trace: jitted.JitTrace) -> Mesh | None:
    """Return the mesh of devices that a traced program names first; None without one."""
    params = trace.params
    named = [
        *params["in_shardings"],
        *(meta.sharding for meta in trace.types if meta.committed),
        *params["out_shardings"],
        *inner_shardings(trace.jaxpr),
    ]
    return find_mesh(params["ctx_mesh"], named)


def _read_constants(jaxpr: Any, user: Callable[..., Any] | None) -> Sequence[ProgramValue]:
    """Return the closed-over arrays that `jax.jit` puts into the program, the largest first."""
    constants = []
    for value in closed_over_arrays(jaxpr):
        name = None if user is None else find_variable_name(user, value)
        aval = jax.typeof(value)
        sharding = value.sharding if isinstance(value, jax.Array) else None
        current = None if sharding is None else _read_sharding(sharding, aval)
        path = name or f"closed over [{len(constants)}]"
        origin = "host" if current is None else "array"
        constants.append(ProgramValue(path, aval, current=current, origin=origin))
    return sorted(constants, key=lambda value: -value.nbytes)


@dataclass(frozen=True, eq=False, kw_only=True)
class JitModule(LoweredModule):
    """A module that JAX lowered; its stage is JAX's."""

    def move(self, devices: DevicesByPosition) -> "JitModule":
        """Return the module for other devices; see `LoweredModule.move`."""
        return read_user_lowered(self.stage, devices)

    def compile(self, options: Mapping[str, Any] | None = None) -> Compilation:
        """Compile the module; see `LoweredModule.compile`.

        For devices at hand, JAX compiles it as for a call, unless the compiler is to write dumps. A
        worker process compiles for others.
        """
        request = compile_request(self.plan, self.body, option_items(options))
        with compiler_errors(self.plan, request, self.module):
            if is_compile_only(self.plan.devices[0]) or request.leaves_dumps:
                executable = compile_module(self.module, request)[0]
            else:
                _check_platform(jitted.read_lowered(self.stage))
                executable = self.stage.compile(dict(options) if options else None)
                executable = executable.runtime_executable()
        loaded = LoadedExecutable()
        loaded.executable = executable
        return self._read(
            loaded,
            executables.aliases(executable),
            read_modules=lambda _: read_modules(executable),
            executable=executable,
            log=getattr(executable, "log", ""),
        )

    def compiler_input(
        self, options: Mapping[str, Any]
    ) -> "AbstractContextManager[PhaseInput | CompileInput]":
        """Return the input of a compilation; see `LoweredModule.compiler_input`."""
        return compiler_input(self.plan, self.body, option_items(options))

    def read_dump(self, module: HloProgram) -> Compilation:
        """Return the compiled form of a dumped module; see `LoweredModule.read_dump`."""
        return self._read(HloShardings(module), module.aliases, read_modules=lambda _: (module,))

    def _read(
        self, chosen: PropagatedShardings, aliases: Mapping[int, int], **others: Any
    ) -> Compilation:
        plan, tokens = self.plan, self.tokens
        shardings = _hold_whole_values(plan, resolve_shardings(chosen, plan, tokens))
        return self.as_compiled(
            shardings,
            aliases=aliases,
            **others,
        )


def _hold_whole_values(plan: ProgramPlan, sides: tuple[_Shardings, _Shardings]) -> Any:
    """Return shardings with those of one device replaced: JAX gives each device a whole value.

    The results of callbacks have such a sharding.
    """
    return tuple(
        tuple(
            plan.replicated(s.memory_kind)
            if isinstance(s, GSPMDSharding) and s.tile_assignment.kind == "maximal"
            else s
            for s in side
        )
        for side in sides
    )


def read_lowered(
    stage: jax.stages.Lowered, program: Program | None = None, mesh: Mesh | None = None
) -> JitModule:
    """Return the module of a stage that JAX lowered.

    Args:
        stage: The stage.
        program: Its program; None for a stage without its trace.
        mesh: The mesh of its devices; None for the one that its shardings name.
    """
    return _read_module(stage, jitted.read_lowered(stage), program, mesh)


def _read_module(
    stage: jax.stages.Lowered | jax.stages.Compiled,
    facts: jitted.StageFacts,
    program: Program | None = None,
    mesh: Mesh | None = None,
) -> JitModule:
    if program is None:
        program = _read_stage(stage, facts)
    shardings = [
        tuple(map(_read_sharding, side, map(shaped, avals)))
        for side, avals in zip(facts.shardings, facts.avals, strict=True)
    ]
    mesh = facts.mesh if mesh is None else mesh
    if mesh is not None and set(mesh.devices.flat) != set(facts.devices):
        mesh = None  # only arguments that JAX drops name it
    if mesh is not None:
        # JAX replicates scalars that nothing places.
        shardings = [
            tuple([_on_mesh(s, mesh, shaped(a)) for s, a in zip(*side, strict=True)])
            for side in zip(shardings, facts.avals, strict=True)
        ]
    names = _name_parameters(program.arguments, facts.parameters, len(facts.avals[0]))
    result_names = [value.path for value in program.results]
    written = [
        f"{names[position] or 'closed over'} as written"
        for position in facts.written
        if position is not None
    ]
    plan = ProgramPlan(
        name=f"jit_{facts.name}",
        devices=facts.devices,
        args=_plan_values(facts.avals[0], shardings[0], facts.layouts[0], names),
        results=_plan_values(
            facts.avals[1], shardings[1], facts.layouts[1], [*result_names, *written]
        ),
        donated=facts.donated,
        partitioner=Partitioner.in_force(),
        options=facts.options,
        mesh=mesh,
    )
    body = LoweredBody(
        module=facts.module,
        ordered_effects=facts.ordered_effects,
        host_callbacks=facts.host_callbacks,
    )
    return JitModule(
        program=program,
        plan=plan,
        avals=(tuple(map(shaped, facts.avals[0])), tuple(map(shaped, facts.avals[1]))),
        parameters=facts.parameters,
        written=tuple(written),
        tokens=len(facts.ordered_effects),
        stage=stage,
        body=body,
    )


def _on_mesh(sharding: Any, mesh: Mesh, aval: Any) -> Any:
    is_listed = isinstance(sharding, GSPMDSharding)
    return on_mesh(sharding, mesh, aval.ndim) if is_listed else sharding


def _name_parameters(
    arguments: Sequence[ProgramValue], parameters: Sequence[int | None], count: int
) -> list[str]:
    """Return the path of each parameter; empty for a closed-over array."""
    names = [""] * count
    for value, position in zip(arguments, parameters, strict=True):
        if position is not None:
            names[position] = value.path
    return names


def _plan_values(
    avals: Sequence[Any], shardings: Sequence[Any], layouts: Sequence[Any], names: Sequence[str]
) -> tuple[ValuePlan, ...]:
    return tuple(
        ValuePlan(
            shape=tuple(shaped(aval).shape),
            dtype=str(shaped(aval).dtype),
            sharding=None if is_token(aval) else sharding,
            layout=layout_text(layout, shaped(aval).dtype),
            trailing=physical_aval(shaped(aval)).ndim - shaped(aval).ndim,
            name=name,
            is_token=is_token(aval),
        )
        for aval, sharding, layout, name in zip(avals, shardings, layouts, names, strict=True)
    )


def read_user_lowered(
    stage: jax.stages.Lowered, devices: DevicesByPosition | None = None
) -> JitModule:
    """Return the module of a stage that the user has lowered, which keeps no jaxpr.

    Args:
        stage: The stage.
        devices: The new device of each of its devices; None for its own.

    Raises:
        ArgumentError: If it was lowered for several platforms, or for another one than that of the
            devices and calls what is unknown on theirs.
    """
    facts = jitted.read_lowered(stage)
    if len(facts.platforms) != 1:
        raise ArgumentError(
            f"{facts.name} is a Lowered that was lowered for several platforms, "
            f"{', '.join(facts.platforms)}: pass the function and its arguments, or what its "
            "method trace returns"
        )
    if devices is None:
        return read_lowered(stage)
    own = compiler.platform_of(next(iter(devices.values())))
    unknown = [] if own in facts.platforms else list_unportable_calls(facts.module)
    if unknown or facts.host_callbacks:
        calls = ", ".join(unknown) or "a function of Python"
        raise ArgumentError(
            f"{facts.name} is a Lowered for {facts.platforms[0]} that calls {calls}, which {own} "
            "lacks: pass the function and its arguments, or what its method trace returns"
        )
    moved = read_lowered(move_lowered(stage, devices))
    if own in facts.platforms:
        return moved
    unknown = f"{moved.program.unknown}; operations as lowered for {facts.platforms[0]}"
    return replace(moved, program=replace(moved.program, unknown=unknown))


def _check_platform(facts: jitted.StageFacts) -> None:
    """Raise if a stage was lowered for another platform, which JAX compiles without a word."""
    own = compiler.platform_of(facts.devices[0]) if facts.devices else "no platform"
    if own not in facts.platforms:
        raise ArgumentError(
            f"{facts.name} was lowered for {', '.join(facts.platforms)}, but its devices are of "
            f"{own}: omit lowering_platforms to explain its program"
        )


def _read_stage(
    stage: jax.stages.Lowered | jax.stages.Compiled, facts: jitted.StageFacts
) -> CompiledOnly:
    """Return the program of a stage without its trace."""
    trees = in_default_registry(stage.in_tree), in_default_registry(stage.out_tree)
    nnx = NnxPaths.of(*trees, facts.paths[0])
    paths = facts.paths if nnx is None else (nnx.arguments, nnx.results)
    infos = jax.tree_util.tree_leaves(stage.args_info)
    return CompiledOnly(
        name=facts.name,
        in_tree=trees[0],
        out_tree=trees[1],
        arguments=tuple(
            ProgramValue(path, shaped(info._aval), donated=info.donated)
            for path, info in zip(paths[0], infos, strict=True)
        ),
        results=tuple(
            ProgramValue(path or "", shaped(aval))
            for path, aval in zip(paths[1], facts.avals[1], strict=False)
        ),
        source=facts.source,
        module_paths=_differing(facts.paths[0], paths[0]),
        unknown=forgotten_by(
            type(stage).__name__, has_requests=isinstance(stage, jax.stages.Lowered)
        ),
    )


def read_compiled(stage: jax.stages.Compiled) -> Compilation:
    """Return the program of a compiled stage of JAX, which keeps no jaxpr.

    Raises:
        ArgumentError: If it does not run as one program.
    """
    facts = jitted.read_compiled(stage)
    if facts is None:
        raise ArgumentError(  # no-catalogue: JAX makes no such stage in the supported versions
            f"{type(stage).__name__} does not run as one program: pass the function and its "
            "arguments"
        )
    module, executable = _read_module(stage, facts), facts.executable
    plan, aliases = module.plan, executables.aliases(executable)
    chosen: Any = [[value.sharding for value in side] for side in (plan.args, plan.results)]
    return module.as_compiled(
        chosen,
        aliases=aliases,
        read_modules=lambda _: read_modules(executable),
        has_requests=False,
        executable=executable,
    )


def unwrap(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the compiled function inside partials (`nnx.cached_partial` too) and bound methods.

    A function that holds no compiled one is returned unchanged.
    """
    inner: Any = fun
    before, named = args, kwargs
    while True:
        is_method = hasattr(inner, "__func__") and hasattr(inner, "__self__")
        is_partial = isinstance(inner, functools.partial)
        if is_wrapper(inner) and not is_method and not is_partial:
            return inner, before, named
        if is_method and not is_partial:
            inner, before = inner.__func__, (inner.__self__, *before)
        elif all(hasattr(inner, name) for name in ("func", "args", "keywords")):
            before, named = (*inner.args, *before), {**inner.keywords, **named}
            inner = inner.func
        elif (cached := cached_arguments(inner)) is not None:
            inner, before = cached[0], (*cached[1], *before)
        else:
            return fun, args, kwargs


def is_wrapper(fun: Any) -> bool:
    """Return True for a function of `jax.jit`, or one with its methods."""
    methods = getattr(fun, "trace", None), getattr(fun, "lower", None)
    return callable(fun) and not isinstance(fun, type) and any(map(callable, methods))


def _capture(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jitted.JitTrace | None:
    """Return the trace of a wrapper, also of one to which a shape is no array."""
    leaves = jax.tree_util.tree_leaves((args, kwargs))
    structs = {id(leaf) for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)}
    try:
        trace = jitted.capture(fun, args, kwargs)
        if trace is None or structs <= set(map(id, trace.values or ())):
            return trace
    except Exception:
        if not structs:
            raise
    return jitted.capture_shapes(fun, args, kwargs)


def _make_hashable(fun: Callable[..., Any]) -> Callable[..., Any]:
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
