"""The era's `pjit`, in whichever of the three worlds a call comes."""

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax

import xlashard
from xlashard._jax import dispatch, tracing
from xlashard._jax.tracebacks import short_tracebacks, shortened
from xlashard.errors import RefusedError, ResourceError
from xlashard.legacy.modes.array_mode import (
    ArrayMode,
    CallFlags,
    PositionalSemantics,
    as_jax_arrays,
    current_array_mode,
    current_call_flags,
    semantics_in_force,
)
from xlashard.legacy.modes.host_local import HostLocal
from xlashard.legacy.modes.mode_function import ModeFunction, check_specified
from xlashard.legacy.modes.mode_stages import ModeTraced
from xlashard.legacy.shardings.parsed_specs import prepare_axis_resources
from xlashard.pjit import stages
from xlashard.pjit.dispatched import dispatched
from xlashard.pjit.options import (
    DonationMode,
    PjitOptions,
    Selected,
    either,
    made_or_decorator,
    read_options,
)
from xlashard.pjit.resources import UNSPECIFIED
from xlashard.sharding import Mesh
from xlashard.sharding.parse import ParsedPartitionSpec


def pjit(
    fun: Any = UNSPECIFIED,
    in_axis_resources: Any = UNSPECIFIED,
    out_axis_resources: Any = UNSPECIFIED,
    static_argnums: int | Sequence[int] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    *,
    in_shardings: Any = UNSPECIFIED,
    out_shardings: Any = UNSPECIFIED,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    backend: str | None = None,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
    donation: DonationMode = "warn",
    share_binary: bool = False,
) -> Any:
    """Compiles a function into one program over the devices of the mesh in force at each call.

    Each call is in the world that the flags say then. With `jax_array` it is `xlashard.pjit`, whose
    results are arrays of JAX's own class. Without, a mesh and both resources are needed, arguments
    go by position, and arrays of NumPy, `DeviceArray`s and `ShardedDeviceArray`s are this process's
    part of global ones, put side by side along the mesh axes that cross processes; results are such
    parts too, or with `jax_parallel_functions_output_gda` GlobalDeviceArrays.

    Args:
        fun: A function of pytrees of arrays. Without it comes a decorator with these options.
        in_axis_resources: A prefix of the tuple of arguments whose leaves are None (replicated), a
            PartitionSpec on the mesh in force at the call, or `FROM_GDA` (as the GlobalDeviceArray
            lies); static arguments have no entry.
        out_axis_resources: The same of the result, without `FROM_GDA`.
        static_argnums: Positions of arguments that are part of the program; hashable.
        donate_argnums: Positions of arguments whose buffers the results may take over.
        in_shardings: A later name of `in_axis_resources`.
        out_shardings: A later name of `out_axis_resources`.
        static_argnames: As in `xlashard.pjit`.
        donate_argnames: As in `xlashard.pjit`.
        keep_unused: As in `xlashard.pjit`.
        device: As in `xlashard.pjit`.
        backend: As in `xlashard.pjit`.
        inline: As in `xlashard.pjit`.
        compiler_options: As in `xlashard.pjit`.
        donation: As in `xlashard.pjit`.
        share_binary: As in `xlashard.pjit`.

    Returns:
        A function of the same arguments, with `lower(*args, _global_avals=False)`, `trace`,
        `eval_shape` and `clear_cache`.

    Raises:
        ArgumentError: If an option is of the wrong kind.
        ResourceError: If a resource is none, or is missing while `jax_array` is off.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import P, legacy
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> double = legacy.pjit(lambda x: x * 2, P("data"), None)
        >>> with mesh, legacy.jax_array(False):
        ...     print(double(np.arange(4)))
        [0 2 4 6]
    """
    with short_tracebacks:
        rest = {
            "keep_unused": keep_unused,
            "inline": inline,
            "compiler_options": compiler_options,
            "donation": donation,
            "share_binary": share_binary,
        }
        options = read_options(
            either(("in_axis_resources", in_axis_resources), ("in_shardings", in_shardings)),
            either(("out_axis_resources", out_axis_resources), ("out_shardings", out_shardings)),
            (donate_argnums, donate_argnames),
            (device, backend),
            rest,
        )
        if not current_array_mode().jax_array:
            check_specified(options)
        static = Selected.of(static_argnums, static_argnames, "static")
        return made_or_decorator(fun, lambda f: _dispatched(LegacyFunction(f, options, static)))


class LegacyFunction:
    """What stands behind a function of the era: its worlds, one of which takes each call.

    Args:
        fun: The Python function.
        options: The checked options.
        static: Positions and names of static arguments.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        options: PjitOptions,
        static: Selected,
    ) -> None:
        self.fun = fun
        self._options = options
        self._static = static
        self._lock = threading.Lock()
        call_flags = CallFlags(ArrayMode())
        self.today = ModeFunction(fun, options, static, call_flags)
        self._by_flags = {call_flags: self.today}
        self._host_local_calls: dict[tuple[CallFlags, Mesh], _HostLocalCall] = {}
        self.parameters = self.today.parameters
        self.tracer = self.today.tracer

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.fun, self._options, self._static)

    @property
    def name(self) -> str:
        """The function's name."""
        return self.today.name

    def in_force(self) -> ModeFunction:
        """The function as the flags of this thread will have it."""
        call_flags = current_call_flags()
        found = self._by_flags.get(call_flags)
        return self._made(call_flags) if found is None else found

    def _made(self, call_flags: CallFlags) -> ModeFunction:
        with self._lock:
            if call_flags not in self._by_flags:
                made = ModeFunction(self.fun, self._options, self._static, call_flags)
                made.ledger = self.today.ledger
                self._by_flags[call_flags] = made
            return self._by_flags[call_flags]

    @shortened
    def miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """A call that the dispatcher has not seen: runs it in its world."""
        function = self.in_force()
        mesh = function.admit(kwargs)
        host_local_call = self.host_local_call(function, mesh)
        if host_local_call is not None and host_local_call.host_local.changes(args):
            return host_local_call(args), None, False
        return function.miss(*args, **kwargs)

    def host_local_call(self, function: ModeFunction, mesh: Mesh | None) -> "_HostLocalCall | None":
        """What stands between this process and the program; None where all shapes are global."""
        if function.mode.jax_array or mesh is None or _is_here(mesh):
            return None
        if semantics_in_force() is PositionalSemantics.GLOBAL or not tracing.is_top_level():
            return None
        key = function.call_flags, mesh
        with self._lock:
            if key not in self._host_local_calls:
                self._host_local_calls[key] = _HostLocalCall(function, mesh)
            return self._host_local_calls[key]

    @property
    def is_spread(self) -> bool:
        """True once a program of the function runs on several devices."""
        return any(function.is_spread for function in tuple(self._by_flags.values()))

    def may_share(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if a donated argument of a call may share its buffers with another one."""
        return self.in_force().may_share(args, kwargs)

    def clear_cache(self) -> None:
        """Forgets what was traced and compiled, in all worlds."""
        with self._lock:
            functions = list(self._by_flags.values())
            self._host_local_calls.clear()
        for function in functions:
            function.clear_cache()


class _HostLocalCall:
    """Calls of a function by one process of several, with its part of each array."""

    def __init__(self, function: ModeFunction, mesh: Mesh) -> None:
        self.host_local = HostLocal(function, mesh)
        tracer = function.tracer
        static = tracer.static_argnums, tracer.static_argnames
        self._call = dispatch.new_dispatcher(
            function.name, function.fun, function.miss, static, function.name
        )

    def __call__(self, args: tuple[Any, ...]) -> Any:
        return self.host_local.lower(self._call(*self.host_local.lift(args)))


@lru_cache(maxsize=64)
def _is_here(mesh: Mesh) -> bool:
    me = jax.process_index()
    return jax.process_count() == 1 or all(d.process_index == me for d in mesh.devices.flat)


def _dispatched(function: LegacyFunction) -> Any:
    def trace(*args: Any, **kwargs: Any) -> stages.Traced:
        with short_tracebacks:
            return _traced(function, args, kwargs)

    def lower(*args: Any, _global_avals: bool = False, **kwargs: Any) -> stages.Lowered:
        with short_tracebacks:
            return _traced(function, args, kwargs, global_avals=_global_avals).lower()

    def eval_shape(*args: Any, **kwargs: Any) -> Any:
        with short_tracebacks:
            return _traced(function, args, kwargs).out_info

    methods = {"lower": lower, "trace": trace, "eval_shape": eval_shape}
    return dispatched(function, {**methods, "_function": function.today}, _dispatched)


def _traced(
    function: LegacyFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    global_avals: bool = False,
) -> stages.Traced:
    """The function traced in its world, for this process's parts or for global shapes."""
    chosen = function.in_force()
    mesh = chosen.admit(kwargs, global_avals=global_avals)
    host_local_call = None if global_avals else function.host_local_call(chosen, mesh)
    if host_local_call is None:
        return ModeTraced(chosen, chosen.trace(args, kwargs), None)
    args = host_local_call.host_local.lift_types(args)
    return ModeTraced(chosen, chosen.trace(args, kwargs), host_local_call.host_local)


def with_sharding_constraint(
    x: Any, axis_resources: Any = UNSPECIFIED, shardings: Any = UNSPECIFIED
) -> Any:
    """Tells the partitioner how a value inside a program is dealt out.

    With `jax_array` it is `xlashard.with_sharding_constraint`, and moves concrete arrays outside of
    any program. Without, it needs a program around it, and a mesh in force for named axes.

    Args:
        x: A pytree of arrays.
        axis_resources: A prefix of it: at each leaf None for replicated, a PartitionSpec on the
            mesh in force (`UNCONSTRAINED` dimensions stay with the partitioner), or a Sharding.
        shardings: A later name of `axis_resources`.

    Returns:
        The same values.

    Raises:
        ResourceError: With the leaf's path, if a resource does not fit; both names or none given;
            without `jax_array`, for a named axis and no mesh in force.
        MeshError: With `jax_array`, for a PartitionSpec without a mesh in force.
        RefusedError: Without `jax_array`, outside of any program.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import legacy
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> def pinned(x):
        ...     return legacy.with_sharding_constraint(x, jax.sharding.PartitionSpec("data"))
        >>> with mesh, legacy.jax_array(False):
        ...     print(legacy.pjit(pinned, None, None)(np.arange(4)))
        [0 1 2 3]
    """
    with short_tracebacks:
        resources = shardings if axis_resources is UNSPECIFIED else axis_resources
        both = axis_resources is not UNSPECIFIED and shardings is not UNSPECIFIED
        if both or resources is UNSPECIFIED:
            raise ResourceError(
                "with_sharding_constraint takes axis_resources, or shardings, which means the "
                "same: write with_sharding_constraint(x, P('data'))"
            )
        if not current_array_mode().jax_array and not _is_to_do(resources):
            return x
        return as_jax_arrays(xlashard.with_sharding_constraint(x, resources))


def _is_to_do(resources: Any) -> bool:
    """Return whether resources constrain anything while `jax_array` is off.

    Raises:
        RefusedError: There is no program around the call.
        ResourceError: A spec names an axis, and no mesh is in force.
    """
    if tracing.is_top_level():
        raise RefusedError(
            "with_sharding_constraint constrains values inside a program while jax_array is off, "
            "and was called outside of any: place arrays with pjit(lambda x: x, None, P('data'))(x)"
            ", or write jax.config.update('jax_array', True)",
            name="jax.experimental.pjit.with_sharding_constraint",
        )
    if tracing.mesh_in_force() is not None:
        return True
    leaves = prepare_axis_resources(resources, "axis_resources", allow_unconstrained_dims=True)[1]
    for leaf in leaves:
        axes = [a for axes in leaf for a in axes or ()] if _is_spec(leaf) else []
        if axes:
            raise ResourceError(
                f"axis_resources of with_sharding_constraint has {leaf.get_partition_spec()}, and "
                f"no mesh is in force that has the axis {axes[0]!r}: call the function around it "
                "inside `with mesh:`"
            )
    return not all(map(_is_spec, leaves))


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, ParsedPartitionSpec)
