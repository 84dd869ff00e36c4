"""`pjit` and `with_sharding_constraint` of 2022 and 2023, in the array mode of each call."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax

from xlashard._jax.trace import tracing
from xlashard.core.pjit import constraint
from xlashard.core.pjit.callables import make_callable
from xlashard.core.pjit.options import (
    DonationMode,
    PjitOptions,
    Selected,
    either,
    made_or_decorator,
    read_options,
)
from xlashard.core.pjit.shardings.resources import UNSPECIFIED, ResourceTree
from xlashard.core.pjit.stages import traced as stages
from xlashard.core.sharding import Mesh
from xlashard.errors import RefusedError, ResourceError
from xlashard.legacy.modes.config_flags import (
    POSITIONAL,
    ArrayMode,
    CallFlags,
    PositionalSemantics,
    as_jax_arrays,
    current_array_mode,
    current_call_flags,
)
from xlashard.legacy.modes.host_local import HostLocal, ModeTraced
from xlashard.legacy.modes.mode_function import ModeFunction, check_specified
from xlashard.legacy.shardings.parsed_specs import ParsedPartitionSpec, prepare_axis_resources
from xlashard.support.tracebacks import short_tracebacks, shortened


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
    keep_unused: bool = True,
    device: Any = None,
    backend: str | None = None,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
    donation: DonationMode = "warn",
    share_binary: bool = False,
) -> Any:
    """Compile a function into one SPMD program over the mesh in force at each call.

    The flags select the array mode of each call. With `jax_array` on, `legacy.pjit` is
    `xlashard.pjit` with results of JAX's own array class. With `jax_array` off, a mesh and both
    resources are required, arguments are positional, and NumPy arrays, `DeviceArray`s and
    `ShardedDeviceArray`s are host-local: they are concatenated along the mesh axes that cross
    processes. Results are then host-local too, or GlobalDeviceArrays with
    `jax_parallel_functions_output_gda`.

    Args:
        fun: A function of pytrees of arrays. Without it, `pjit` returns a decorator.
        in_axis_resources: A prefix of the tuple of arguments. Each leaf is None (replicated), a
            PartitionSpec on the mesh in force at the call, or `FROM_GDA` (the sharding of the
            GlobalDeviceArray). Static arguments have no entry.
        out_axis_resources: A prefix of the result, with the same leaves except `FROM_GDA`.
        static_argnums: Positions of static arguments, which must be hashable.
        donate_argnums: Positions of donated arguments.
        in_shardings: A later name of `in_axis_resources`.
        out_shardings: A later name of `out_axis_resources`.
        static_argnames: As in `xlashard.pjit`.
        donate_argnames: As in `xlashard.pjit`.
        keep_unused: As in `xlashard.pjit`. True by default, as in 2022: specs of a compiled
            program have one entry for each argument.
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
        ArgumentError: An option has the wrong type.
        ResourceError: A resource is invalid, or is missing while `jax_array` is off.

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
        options = replace(
            options,
            in_resources=_as_then(options.in_resources),
            out_resources=_as_then(options.out_resources),
        )
        static = Selected.of(static_argnums, static_argnames, "static")
        return made_or_decorator(fun, lambda f: _make_callable(LegacyFunction(f, options, static)))


def _as_then(resources: ResourceTree) -> ResourceTree:
    """Return resources that fit only trees of the same containers, as in 2022.

    Raises:
        DuplicateAxisError: A spec uses a mesh axis twice.
    """
    prepare_axis_resources([leaf.value for leaf in resources.leaves], resources.what)
    return replace(resources, matches_lists=False)


class LegacyFunction:
    """Function of `legacy.pjit`, with one `ModeFunction` for each set of call flags.

    Args:
        fun: The Python function.
        options: The checked options.
        static: Positions and names of static arguments.
    """

    def __init__(self, fun: Callable[..., Any], options: PjitOptions, static: Selected) -> None:
        self.fun = fun
        self._options = options
        self._static = static
        self._lock = threading.Lock()
        call_flags = CallFlags(ArrayMode())
        self.today = ModeFunction(fun, options, static, call_flags)
        self._by_flags = {call_flags: self.today}
        self._host_local: dict[tuple[CallFlags, Mesh], HostLocal] = {}
        self.parameters = self.today.parameters
        self.tracer = self.today.tracer
        self.calls = self.today.calls

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.fun, self._options, self._static)

    @property
    def name(self) -> str:
        """The function's name."""
        return self.today.name

    def in_force(self) -> ModeFunction:
        """Return the function for the call flags of this thread."""
        call_flags = current_call_flags()
        function = self._by_flags.get(call_flags)
        return self._mode_function(call_flags) if function is None else function

    def _mode_function(self, call_flags: CallFlags) -> ModeFunction:
        with self._lock:
            if call_flags not in self._by_flags:
                function = ModeFunction(self.fun, self._options, self._static, call_flags)
                function.compile_log = self.today.compile_log
                function.calls = self.calls
                self._by_flags[call_flags] = function
            return self._by_flags[call_flags]

    @shortened
    def cache_miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """Run a call that missed the dispatcher's cache, in its array mode."""
        function = self.in_force()
        mesh = function.admit(args, kwargs)
        host_local = self.host_local(function, mesh)
        if host_local is not None and host_local.changes(args):
            return host_local(args), None, False
        return function.cache_miss(*args, **kwargs)

    def host_local(self, function: ModeFunction, mesh: Mesh | None) -> HostLocal | None:
        """Return the host-local form of a call; None if all its shapes are global."""
        if function.mode.jax_array or mesh is None or _is_here(mesh):
            return None
        if POSITIONAL.val is PositionalSemantics.GLOBAL or not tracing.is_top_level():
            return None
        key = function.call_flags, mesh
        with self._lock:
            if key not in self._host_local:
                self._host_local[key] = HostLocal(function, mesh)
            return self._host_local[key]

    def clear_cache(self) -> None:
        """Drop the traced and compiled programs of all array modes."""
        with self._lock:
            functions = list(self._by_flags.values())
            self._host_local.clear()
        for function in functions:
            function.clear_cache()


@lru_cache(maxsize=64)
def _is_here(mesh: Mesh) -> bool:
    me = jax.process_index()
    return jax.process_count() == 1 or all(d.process_index == me for d in mesh.devices.flat)


def _make_callable(function: LegacyFunction) -> Any:
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
    return make_callable(function, {**methods, "_function": function.today}, _make_callable)


def _traced(
    function: LegacyFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    global_avals: bool = False,
) -> stages.Traced:
    """Return the traced function in its array mode, for host-local or global shapes."""
    chosen = function.in_force()
    mesh = chosen.admit(args, kwargs, global_avals=global_avals)
    host_local = None if global_avals else function.host_local(chosen, mesh)
    if host_local is not None:
        args = host_local.lift_types(args)
    return ModeTraced(chosen, chosen.trace(args, kwargs), host_local)


def with_sharding_constraint(
    x: Any, axis_resources: Any = UNSPECIFIED, shardings: Any = UNSPECIFIED
) -> Any:
    """Constrain the sharding of a value inside a program.

    With `jax_array` on it is `xlashard.with_sharding_constraint`, which reshards concrete arrays
    outside of programs. With `jax_array` off it must be called while a program is traced, and
    named axes require a mesh in force.

    Args:
        x: A pytree of arrays.
        axis_resources: A prefix of `x`. Each leaf is None (replicated), a PartitionSpec on the
            mesh in force (the partitioner chooses `UNCONSTRAINED` dimensions), or a Sharding.
        shardings: A later name of `axis_resources`.

    Returns:
        The same values.

    Raises:
        ResourceError: A resource does not fit, with the leaf's path; both names or neither are
            given; with `jax_array` off, an axis is named and no mesh is in force.
        MeshError: With `jax_array` on, a PartitionSpec and no mesh in force.
        RefusedError: With `jax_array` off, a call outside of any program.

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
                "with_sharding_constraint requires exactly one of axis_resources and shardings: "
                "write with_sharding_constraint(x, P('data'))"
            )
        if not current_array_mode().jax_array and not _is_to_do(resources):
            return x
        return as_jax_arrays(constraint.with_sharding_constraint(x, resources))


def _is_to_do(resources: Any) -> bool:
    """Return True if resources constrain a value while `jax_array` is off.

    Raises:
        RefusedError: The call is outside of any program.
        ResourceError: A spec names an axis, and no mesh is in force.
    """
    if tracing.is_top_level():
        raise RefusedError(
            "with_sharding_constraint was called outside of a program, which is invalid while "
            "jax_array is off: place arrays with pjit(lambda x: x, None, P('data'))(x), or write "
            "jax.config.update('jax_array', True)",
            name="jax.experimental.pjit.with_sharding_constraint",
        )
    if tracing.mesh_in_force() is not None:
        return True
    leaves = prepare_axis_resources(resources, "axis_resources", allow_unconstrained_dims=True)[1]
    for leaf in leaves:
        axes = [a for axes in leaf for a in axes or ()] if _is_spec(leaf) else []
        if axes:
            raise ResourceError(
                f"axis_resources of with_sharding_constraint contains {leaf.get_partition_spec()}, "
                f"but no mesh is in force, so the axis {axes[0]!r} is undefined: call the "
                "enclosing function inside `with mesh:`"
            )
    return not all(map(_is_spec, leaves))


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, ParsedPartitionSpec)
