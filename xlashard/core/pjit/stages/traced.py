"""The stages `Traced` and `Lowered` of a pjit-ed function."""

import copy
import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental.layout import Format

from xlashard._jax import originals
from xlashard._jax.runtime import compiler, executables
from xlashard._jax.runtime.shardings import AbstractMesh, Device, is_auto_layout
from xlashard._jax.runtime.topologies import UnassignedDevice, unassigned_devices
from xlashard._jax.runtime.transfer import default_device
from xlashard._jax.trace import tracing
from xlashard._jax.tree_definitions import outline, shortest_prefix, split_leaves
from xlashard.core.pjit.cache_key import LoweringRequest
from xlashard.core.pjit.function import Function
from xlashard.core.pjit.lower import lower_jaxpr
from xlashard.core.pjit.options import compiler_option_items
from xlashard.core.pjit.shardings.automatic import planned_call
from xlashard.core.pjit.shardings.device_assignment import find_spec_mesh
from xlashard.core.pjit.shardings.resources import UNSPECIFIED
from xlashard.core.pjit.stages.compiled import Compiled
from xlashard.core.pjit.stages.info import Stage, StageInfo, checked_dialect, struct
from xlashard.core.pjit.trace import Call
from xlashard.core.program.compile import compiler_input
from xlashard.core.program.lowered import LoweredProgram
from xlashard.core.sharding import NamedSharding, XLACompatibleSharding, to_jax
from xlashard.core.sharding.replicated import names_devices
from xlashard.errors import ArgumentError, CompileError, DeviceMismatchError
from xlashard.support.formatting import format_two_device_lists
from xlashard.support.lazily import copy_with
from xlashard.support.tracebacks import shortened

if TYPE_CHECKING:
    from xlashard._jax.runtime.offline import CompileInput, PhaseInput


class Traced(Stage, jax.stages.Traced):
    """A traced function, before its shardings are resolved; a `jax.stages.Traced`.

    Calling it runs the traced function.

    Example:
        >>> import numpy as np
        >>> from xlashard import pjit
        >>> pjit(lambda x: x * 2).trace(np.ones(2, np.float32)).jaxpr
        { lambda ; a:f32[2]. let b:f32[2] = mul a 2.0:f32[] in (b,) }
    """

    def __init__(self, function: Function, call: Call) -> None:
        self._function = function
        self._call = call
        function.report_stages(call)
        options = function.options
        moves = options.device is not None or options.backend is not None or any(call.moves)
        self._info = StageInfo.of(call, moves_arguments=moves)
        outs = zip(self._info.out_avals, call.out_shardings, call.layouts[1], strict=True)
        self._known_out_shardings = tuple(itertools.starmap(_known_place, outs))

    @shortened
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the traced function, at the top level or inside a trace.

        Raises:
            ArgumentError: If the arguments have another structure, shape or dtype.
        """
        result, _ = self._function.run(self._call.on(self._info.checked(args, kwargs, "traced")))
        return result

    @property
    def jaxpr(self) -> Any:
        """Return the closed jaxpr of the body."""
        return self._call.traced.jaxpr

    @property
    def effects(self) -> Any:
        """Return the side effects of running it."""
        return self._call.traced.jaxpr.effects

    @shortened
    def lower(
        self,
        *,
        lowering_platforms: Sequence[str] | None = None,
        _private_parameters: Any = None,
    ) -> "Lowered":
        """Resolve the shardings, and lower the function to a module.

        Args:
            lowering_platforms: One platform such as `("tpu",)` whose lowering rules to use. If it
                is not the platform of the devices, the module can be read, but not compiled.
            _private_parameters: Parameters of `jax.export`, which gets a stage of JAX's own.

        Raises:
            ArgumentError: If more than one platform is given.
            DeviceMismatchError: If the arguments are on different devices.
            ResourceError: If a sharding does not fit its argument or result.
        """
        planned = planned_call(self._function, self._call)
        if planned is not self._call:
            traced = Traced(self._function, planned)
            return traced.lower(
                lowering_platforms=lowering_platforms, _private_parameters=_private_parameters
            )
        if lowering_platforms is None and self._call.mesh is None:
            lowering_platforms = tracing.platforms_in_force()
        assign = None if lowering_platforms is None else unassigned_devices
        call = copy_with(self._call, assign=assign)
        request = self._function.request_program(call)
        if _private_parameters is not None:
            options = (self._info, request, lowering_platforms, _private_parameters)
            by_jax: Any = lower_by_jax(self._function, call, *options)
            return by_jax
        own = None
        if not request.placement.is_unassigned:
            own = compiler.platform_of(request.placement.devices[0])
        platform = _platform(lowering_platforms, own, self.fun_name)
        if platform == own:
            program = self._function.lower(self._call, request)
        else:
            program = lower_jaxpr(self.jaxpr, request.canonicalize(), platform)
        return Lowered(self, request, program, platform)


def eval_shape(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result's shapes, dtypes and known shardings, as `Traced.out_info` does.

    Args:
        function: The function.
        args: The positional arguments of a call.
        kwargs: Its keyword arguments.
    """
    if type(function) is not Function:  # derived classes trace in their own way
        return Traced(function, function.trace(args, kwargs)).out_info
    seen = function.trace_values(args, kwargs)
    traced = seen.traced
    key = "results", find_spec_mesh(seen.mesh)
    types = traced.shared.get(key)
    if types is None:
        types = Traced(function, function.read_call(seen))._list_results()
        traced.shared[key] = types
    return outline(traced.out_tree, types)


def _known_place(aval: Any, requested: Any, layout: Any) -> Any:
    """Return the sharding of a result that is known before compilation, with a known layout."""
    sharding: Any = tracing.explicit_sharding(aval)
    if isinstance(requested, XLACompatibleSharding) and names_devices(requested):
        sharding = requested
    known = sharding is not None and layout is not None and not is_auto_layout(layout)
    return Format(layout, sharding) if known else sharding


def _platform(requested: Sequence[str] | None, own: str | None, name: str) -> str:
    if requested is None and own is not None:
        return own
    platforms = (requested,) if isinstance(requested, str) else tuple(requested or ())
    if len(platforms) != 1:
        raise ArgumentError(
            f"lowering_platforms must name one platform such as ('tpu',), not {platforms}; for a "
            f"module that fits several write jax.export.export({name}, platforms=...)"
        )
    return compiler.known_platform(platforms[0])


class Lowered(Stage, jax.stages.Lowered):
    """A module with its annotations, not compiled yet. It is a `jax.stages.Lowered`.

    Example:
        >>> import numpy as np
        >>> from xlashard import pjit
        >>> lowered = pjit(lambda x: x * 2).lower(np.ones(2, np.float32))
        >>> "stablehlo.multiply" in lowered.as_text()
        True
    """

    def __init__(
        self,
        traced: Traced,
        request: LoweringRequest,
        program: LoweredProgram,
        platform: str,
    ) -> None:
        self._traced = traced
        self._request = request
        self._program = program
        self._platform = platform
        requested = traced._call.in_shardings
        in_avals = tuple(map(tracing.with_sharding_in_type, traced._info.in_avals, requested))
        self._info = copy_with(traced._info, in_avals=in_avals)
        self._known_out_shardings = request.placement.out_shardings
        if request.placement.is_unassigned:
            self._known_out_shardings = traced._call.out_shardings

    @shortened
    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """Return the module as text.

        Args:
            dialect: `"stablehlo"`, which is meant by None, or `"hlo"`.
            debug_info: Include the source locations.
        """
        if dialect is None or checked_dialect(dialect) == "stablehlo":
            return self._program.as_text(debug_info=debug_info)
        return executables.hlo_text(self._program.body.module, debug_info=debug_info)

    @shortened
    def compiler_ir(self, dialect: str | None = None) -> Any:
        """Return the module as an object: of MLIR, or XLA's computation.

        Args:
            dialect: `"stablehlo"`, which is meant by None, or `"hlo"`.
        """
        if dialect is None or checked_dialect(dialect) == "stablehlo":
            return self._program.body.module
        return executables.hlo_computation(self._program.body.module)

    def cost_analysis(self) -> dict[str, float]:
        """Return XLA's estimates before optimisation: FLOP, bytes accessed."""
        unassigned = self._request.placement.is_unassigned
        device = default_device() if unassigned else self._request.placement.devices[0]
        client = compiler.client_of(device)
        return executables.lowered_cost(client, self._program.body.module)

    @shortened
    def compile(
        self,
        compiler_options: Mapping[str, Any] | None = None,
        *,
        share_binary: bool | None = None,
        device_assignment: Sequence[Device] | None = None,
    ) -> "Compiled":
        """Compile the module.

        Args:
            compiler_options: Options of XLA for this compilation only.
            device_assignment: The devices of a program whose shardings stand on abstract meshes.
            share_binary: Let one process of several compile, and the others load its machine code;
                all must then call this. Without it the option of `pjit` applies.

        Raises:
            ArgumentError: If it was lowered for another platform than that of its devices.
            CompileError: If XLA refuses the module or an option, or it has no devices.
            DeviceMismatchError: If its shardings name other devices than `device_assignment`.
            DonationError: If a donated argument can't be reused, under `donation="strict"`.
        """
        call, request = self._traced._call, self._request
        if device_assignment is not None or request.placement.is_unassigned:
            devices = None if device_assignment is None else tuple(device_assignment)
            request = self._assigned(devices)
        self._check_platform(request)
        if share_binary is not None:
            request = replace(request, share_binary=share_binary)
        options = compiler_option_items(compiler_options)
        function = self._traced._function
        compiled = function.compile(call, request, options, reports_donation=True)
        return Compiled(self._info, compiled, call.traced.jaxpr)

    def _compiler_input(
        self, compiler_options: Mapping[str, Any]
    ) -> "AbstractContextManager[PhaseInput | CompileInput]":
        """Return the input of a compilation for a topology; see `compiler_input`."""
        self._check_platform(self._request)
        function = self._traced._function
        self._program.report_donation(function.options.donation, function.name)
        program = self._program
        return compiler_input(program.plan, program.body, compiler_option_items(compiler_options))

    def _check_platform(self, request: LoweringRequest) -> None:
        own = compiler.platform_of(request.placement.devices[0])
        if self._platform != own:
            raise ArgumentError(
                f"{self.fun_name} was lowered for {self._platform}, but its devices are of {own}: "
                "leave lowering_platforms out to compile it here"
            )

    def _assigned(self, devices: tuple[Device, ...] | None) -> LoweringRequest:
        """Return the request over the devices of a call of `compile`."""
        lowered = self._request.placement.devices
        if not self._request.placement.is_unassigned:
            if devices != lowered:
                texts = format_two_device_lists(devices or (), lowered)
                raise DeviceMismatchError(
                    f"device_assignment of {self.fun_name} is {texts[0]}, but "
                    f"its shardings name {texts[1]}: leave device_assignment out"
                )
            return self._request
        if devices is None or len(devices) != len(lowered):
            actual = "missing" if devices is None else f"of {len(devices)} devices"
            raise CompileError(
                f"device_assignment of {self.fun_name} is {actual}, but its abstract mesh stands "
                f"for {len(lowered)} devices: write "
                f"lowered.compile(device_assignment=jax.devices()[:{len(lowered)}])"
            )
        function = self._traced._function
        call = replace(self._traced._call, assign=lambda _: devices)
        return function.request_program(call)


def lower_by_jax(
    function: Function,
    traced_call: Call,
    info: StageInfo,
    request: LoweringRequest,
    platforms: Sequence[str] | None,
    private: Any,
) -> Any:
    """Lower a traced function as `jax.jit` would, with the shardings of this package.

    An exported module follows JAX's calling convention, with symbolic dimensions and several
    platforms, so JAX lowers it, with the shardings of the function.

    Args:
        function: The function.
        traced_call: The call with which it was traced.
        info: Names, trees and types of the function.
        request: The request for the program of the traced call.
        platforms: The platforms of the module.
        private: Parameters of `jax.export` for JAX's own stage.
    """
    # JAX's function has its compiler options, and no other one in its module.
    body = copy.copy(function)
    body.options = replace(function.options, compiler_options=(), inline=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        return body.run(traced_call.on(info.checked(args, kwargs, "traced")))[0]

    call.__name__ = call.__qualname__ = info.name
    placement = request.placement
    ins, outs = (
        [
            _place(sharding, layout, aval, alone=len(placement.devices) == 1)
            for sharding, layout, aval in zip(shardings, layouts, avals, strict=True)
        ]
        for shardings, layouts, avals in (
            (placement.in_shardings, request.layouts[0], info.in_avals),
            (placement.out_shardings, request.layouts[1], info.out_avals),
        )
    )
    args, kwargs = info.in_tree.unflatten(map(struct, info.in_avals, ins))
    donated_args, donated_kwargs = split_leaves(info.in_tree, info.donated)
    positional = [flags for _, flags in split_leaves(*donated_args)]
    named = {
        name: flags for name, (_, flags) in zip(kwargs, split_leaves(*donated_kwargs), strict=True)
    }
    places = [UNSPECIFIED if place is None else place for place in outs]
    outer = originals.jit(
        call,
        out_shardings=shortest_prefix(info.out_tree, places),
        donate_argnums=[i for i, donated in enumerate(map(any, positional)) if donated],
        donate_argnames=[name for name, flags in named.items() if any(flags)],
        keep_unused=request.keep_unused,
        compiler_options=dict(request.options),
    )
    traced: Any = outer.trace(*args, **kwargs)
    return traced.lower(lowering_platforms=platforms, _private_parameters=private)


def _place(sharding: Any, layout: Any, aval: Any, *, alone: bool) -> Any:
    """Return the sharding of an argument or result as JAX takes it; None if unspecified."""
    if sharding is None or (alone and layout is None and sharding.memory_kind is None):
        return None
    if isinstance(sharding, NamedSharding) and isinstance(sharding.devices[0], UnassignedDevice):
        mesh = sharding.mesh
        abstract = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types)
        sharding = NamedSharding(abstract, sharding.spec, memory_kind=sharding.memory_kind)
    jax_sharding: Any = to_jax(sharding, aval.shape)
    return jax_sharding if layout is None else Format(layout, jax_sharding)
