"""A pjit-ed function in one array mode: checks of its calls, and the class of its results."""

import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import jax

from xlashard._jax.lowering import aval_text
from xlashard._jax.runtime.executables import fingerprint
from xlashard._jax.runtime.shardings import UnspecifiedValue
from xlashard._jax.trace import tracing
from xlashard._jax.trace.tracing import Tracer
from xlashard.core.array import Array
from xlashard.core.array.array_class.handles import KindOf, unwrapped
from xlashard.core.pjit.arguments import Argument
from xlashard.core.pjit.function import Function
from xlashard.core.pjit.options import PjitOptions, Selected
from xlashard.core.pjit.shardings.resources import Auto, FromGda
from xlashard.core.pjit.trace import Call
from xlashard.core.program.execute import CompiledProgram
from xlashard.core.sharding import Mesh, NamedSharding, XLACompatibleSharding
from xlashard.core.sharding.sharding_texts import described
from xlashard.errors import ArgumentError, MeshError, ResourceError
from xlashard.legacy.arrays.device_arrays import ShardedDeviceArray
from xlashard.legacy.arrays.gda import GlobalDeviceArray, check_gda_mesh, gda_class
from xlashard.legacy.historic_errors import KeywordArgumentError
from xlashard.legacy.modes.config_flags import ArrayMode, CallFlags
from xlashard.support.tracebacks import shortened

LOGGER = logging.getLogger("xlashard.legacy.distributed_debug")
"""Logger of each run of a program under `jax_distributed_debug`, at level warning."""

_MESH_AROUND: ContextVar[Mesh | None] = ContextVar("mesh_around", default=None)
"""The mesh of the outermost pjit-ed function that this thread is tracing."""

_ON = "write jax.config.update('jax_array', True)"


class ModeFunction(Function):
    """Function of `legacy.pjit` for one set of call flags.

    Args:
        fun: The Python function.
        options: The checked options.
        static: Positions and names of static arguments.
        call_flags: The flags of its calls.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        options: PjitOptions,
        static: Selected,
        call_flags: CallFlags,
    ) -> None:
        super().__init__(fun, replace(options, kind_of=kind_of(call_flags.mode)), static)
        self.call_flags = call_flags
        self.mode = call_flags.mode

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.fun, self.options, self.static, self.call_flags)

    def admit(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, global_avals: bool = False
    ) -> Mesh | None:
        """Check the requirements of a call with `jax_array` off.

        Args:
            args: The arguments by position.
            kwargs: The arguments by name.
            global_avals: True if the caller passed `_global_avals=True`.

        Returns:
            The mesh in force.

        Raises:
            ArgumentError: A static or donated argument was left to its default.
            KeywordArgumentError: Arguments were passed by name; a `NotImplementedError` too.
            MeshError: No mesh is in force.
            ResourceError: A resource is unspecified, or `AUTO`.
        """
        mesh = tracing.mesh_in_force()
        if self.mode.jax_array:
            return mesh
        if kwargs:
            raise KeywordArgumentError(
                f"{self.name} was called with {', '.join(kwargs)} by name, but pjit takes "
                "positional arguments only while jax_array is off: write "
                f"{self.name}({', '.join(self.parameters.signature.names)}), or {_ON}"
            )
        self._check_passed(len(args))
        check_specified(self.options)
        if mesh is None:
            raise MeshError(
                f"{self.name} was called with no mesh in force, and pjit requires one while "
                f"jax_array is off: call it inside `with mesh:`, or {_ON}"
            )
        if not global_avals:
            _check_not_auto(self.options)
        return mesh

    def _check_passed(self, number: int) -> None:
        """Reject a call without one of its static or donated arguments, as in 2022."""
        parameters = self.parameters
        last = max((*parameters.static_argnums, *parameters.donate_argnums), default=-1)
        if last >= number:
            kind = "static" if last in parameters.static_argnums else "donated"
            raise ArgumentError(
                f"{self.name} was called without the {kind} argument "
                f"{parameters.signature.name(last)}, which has no default while jax_array is off: "
                f"pass it, or {_ON}"
            )

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Trace for a call's arguments, inside the functions that are being traced.

        Raises:
            MeshError: The function around it runs on another mesh.
        """
        mesh, outer = tracing.mesh_in_force(), _MESH_AROUND.get()
        if mesh is not None and outer is not None and mesh != outer:
            raise MeshError(
                f"{self.name} was called under {mesh}, inside a pjit-ed function that runs on "
                f"{outer}: remove the inner `with mesh:`, or call {self.name} outside that function"
            )
        before = _MESH_AROUND.set(mesh or outer)
        try:
            return super().trace(args, kwargs)
        finally:
            _MESH_AROUND.reset(before)

    @shortened
    def cache_miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """Run a call that missed the dispatcher's cache, and return its entry for that cache."""
        out, path, again = super().cache_miss(*args, **kwargs)
        # Checks and logs are in Python, which the C++ dispatcher bypasses.
        enters_python = self.call_flags.checks_meshes or self.call_flags.logs_runs
        return out, None if enters_python else path, again

    def describe_arguments(self, call: Call, *, runs: bool = False) -> tuple[Argument, ...]:
        """Return the arguments of a call with their current placements.

        With `jax_array` off, host-local arguments are resharded as their resource specifies, and
        global ones must already be placed so.
        """
        arguments = super().describe_arguments(call, runs=runs)
        if self.call_flags.checks_meshes and call.mesh is not None:
            check_gda_mesh(call.values, call.traced.arg_names, call.mesh)
        out = []
        tree, what = self.options.in_resources, self.options.in_resources.what
        resources = self.parameters.expand_in(tree, call.traced.in_tree)
        every = zip(call.values, arguments, resources, call.in_shardings, strict=True)
        for value, argument, resource, request in every:
            if not is_global(value) and not self.mode.jax_array:
                if not isinstance(resource.value, FromGda):
                    argument = argument.unbound()
                elif not isinstance(value, jax.ShapeDtypeStruct):
                    path = argument.path
                    raise ResourceError(
                        f"{what} of {path} is FROM_GDA, but {path} is a {type(value).__name__}, "
                        "which is host-local while jax_array is off: write P(...) for it, or pass "
                        "a GlobalDeviceArray",
                        path=path,
                    )
            elif isinstance(value, GlobalDeviceArray) and request is not None:
                stays = not self.mode.jax_array and request.devices != value.sharding.devices
                if stays and call.mesh is not None:
                    # jax.jit would move the array to the devices of the resource.
                    check_gda_mesh((value,), (argument.path,), call.mesh)
                _check_partitioning(argument, request, what)
            out.append(argument)
        return tuple(out)

    def check_host_values(self, call: Call) -> None:
        """Refuse NumPy arrays that would be split; with `jax_array` off they are host-local."""
        if self.mode.jax_array:
            super().check_host_values(call)

    def compile_to_run(self, call: Call) -> CompiledProgram:
        """Return the compiled program of a call that is about to run."""
        compiled = super().compile_to_run(call)
        if self.call_flags.logs_runs:
            _log(call, compiled)
        return compiled


def check_specified(options: PjitOptions) -> None:
    """Reject unspecified resources, which require `jax_array`.

    Raises:
        ResourceError: A resource is unspecified.
    """
    name = _holding(options, UnspecifiedValue)
    if name is not None:
        raise ResourceError(
            f"{name} is missing, and it is required while jax_array is off: write "
            f"{name}=P('data'), or None for replicated, or {_ON}"
        )


def _check_not_auto(options: PjitOptions) -> None:
    name = _holding(options, Auto)
    if name is not None:
        raise ResourceError(
            f"{name} contains AUTO, which requires global shapes while jax_array is off: write "
            "compiled = pjit(f, ...).lower(*args, _global_avals=True).compile(), and call that, "
            f"or {_ON}"
        )


def _holding(options: PjitOptions, kind: type) -> str | None:
    """Return the name of the resources that contain an instance of a class."""
    for tree in (options.in_resources, options.out_resources):
        if any(isinstance(leaf.value, kind) for leaf in tree.leaves):
            return tree.what
    return None


def _check_partitioning(argument: Argument, request: Any, what: str) -> None:
    """Reject a GlobalDeviceArray whose sharding differs from its resource on the same devices."""
    sharding, ndim = argument.sharding, argument.aval.ndim
    if sharding is None or not isinstance(request, XLACompatibleSharding):
        return
    if request.devices != sharding.devices or request.is_equivalent_to(sharding, ndim):
        return
    raise ResourceError(
        f"{what} of {argument.describe()} is {described(request)}, but the "
        f"GlobalDeviceArray has {described(sharding)}: write FROM_GDA to keep that, or "
        f"{_spec_of(sharding)} in {what}",
        path=argument.path,
    )


def _spec_of(sharding: XLACompatibleSharding) -> str:
    if not isinstance(sharding, NamedSharding):
        return "its spec"
    return sharding.normal_spec.describe()


def _log(call: Call, compiled: CompiledProgram) -> None:
    first = len(compiled.consts)
    LOGGER.warning(
        "running %s\n  in_shardings: %s\n  out_shardings: %s\n  abstract args: %s\n"
        "  fingerprint: %s",
        call.traced.name,
        [*map(described, compiled.in_shardings[first:])],
        [*map(described, compiled.out_shardings)],
        [*map(aval_text, call.traced.in_avals)],
        fingerprint(compiled.executable),
    )


def kind_of(mode: ArrayMode) -> KindOf | None:
    """Return the function that maps a result's handle to its array class in a mode."""
    if mode.jax_array:
        return unwrapped
    return gda_class if mode.output_gda else host_local_class


def host_local_class(handle: Any) -> type[Array]:
    """Return `ShardedDeviceArray`, whatever the number of devices, or `Array` across processes.

    Args:
        handle: The result's buffers.
    """
    return ShardedDeviceArray if handle.is_fully_addressable else Array


def is_global(value: Any) -> bool:
    """Return True if a value is global in every array mode.

    GlobalDeviceArrays, arrays that span processes, and tracers are global.
    """
    if isinstance(value, GlobalDeviceArray | Tracer):
        return True
    return isinstance(value, jax.Array) and not value.is_fully_addressable
