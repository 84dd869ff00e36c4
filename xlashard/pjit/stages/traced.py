"""The first stages of a pjit-ed function: traced, lowered."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.experimental.layout import Format

from xlashard._jax.runtime import compiler, executables
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.topologies import unassigned_devices
from xlashard._jax.runtime.tracebacks import shortened
from xlashard._jax.runtime.transfer import default_device
from xlashard._jax.trace import tracing
from xlashard.errors import ArgumentError, CompileError, DeviceMismatchError
from xlashard.pjit.arguments import check_values
from xlashard.pjit.function import Function
from xlashard.pjit.lower import LoweredSignature, LoweringRequest, lower_for_platform
from xlashard.pjit.options import compiler_option_items
from xlashard.pjit.shardings.resources import UNSPECIFIED
from xlashard.pjit.shardings.unassigned import names_devices
from xlashard.pjit.stages.compiled import Compiled
from xlashard.pjit.stages.info import Stage, StageInfo, struct
from xlashard.pjit.trace import Call
from xlashard.program import LoweredProgram
from xlashard.sharding import Sharding, XLACompatibleSharding, to_jax


def trace_call(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Traced":
    """Trace a function for arguments, which may be `jax.ShapeDtypeStruct`s."""
    return Traced(function, function.trace(args, kwargs))


def lower_call(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Lowered":
    """Traces and lowers a function for arguments."""
    return trace_call(function, args, kwargs).lower()


class Traced(Stage, jax.stages.Traced):
    """A function after tracing, before any place is chosen.

    It is a `jax.stages.Traced`. Calling it runs what was traced, as the function itself would.
    """

    def __init__(self, function: Function, call: Call) -> None:
        self._function = function
        self._call = call
        function.record(call)
        options = function.options
        moves = options.device is not None or options.backend is not None
        self._info = StageInfo.of(call, moves_arguments=moves)
        self._known_out_shardings = tuple(
            requested if _is_concrete(requested) else tracing.explicit_sharding(aval)
            for aval, requested in zip(self._info.out_avals, call.out_shardings, strict=True)
        )

    @shortened
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs what was traced, at the top level or inside a trace.

        Raises:
            ArgumentError: If the arguments have another structure, shape or dtype.
        """
        values, tree = jax.tree_util.tree_flatten((args, kwargs))
        self._info.check_tree(tree, "traced")
        check_values(values, self._info.paths, static=False)
        text = "was traced for {}, but was called with {}"
        self._info.check_types(values, text, self._info.otherwise("traced"))
        return self._function.run(self._call.on(values))

    @property
    def jaxpr(self) -> Any:
        """The closed jaxpr of the body."""
        return self._call.traced.jaxpr

    @property
    def effects(self) -> Any:
        """What running it does besides giving results."""
        return self._call.traced.jaxpr.effects

    @shortened
    def lower(
        self,
        *,
        lowering_platforms: Sequence[str] | None = None,
        _private_parameters: Any = None,
    ) -> "Lowered":
        """Chooses the place and writes the module.

        Args:
            lowering_platforms: One platform such as `("tpu",)` whose lowering rules to use, where
                that is not the platform of the devices. Such a module can be read, not compiled.
            _private_parameters: What `jax.export` says of its module; it gets a stage of JAX's own.

        Raises:
            ArgumentError: If more than one platform is given.
            DeviceMismatchError: If the arguments live on different devices.
            ResourceError: If a sharding does not fit its argument or result.
        """
        assign = None if lowering_platforms is None else unassigned_devices
        call = replace(self._call, assign=assign)
        order = self._function.lowering_request(call, self._function.arguments(call))
        if _private_parameters is not None:
            options = (lowering_platforms, _private_parameters)
            by_jax: Any = lower_by_jax(self, self._info, order, *options)
            return by_jax
        own = None
        if not order.placement.is_unassigned:
            own = compiler.platform_of(order.placement.devices[0])
        platform = _platform(lowering_platforms, own, self.fun_name)
        if platform == own:
            interface, program = self._function.lower(self._call, order)
        else:
            interface, program = lower_for_platform(self.jaxpr, order, platform)
        return Lowered(self, order, interface, program, platform)


def _is_concrete(sharding: Sharding | None) -> bool:
    return isinstance(sharding, XLACompatibleSharding) and names_devices(sharding)


def _platform(asked: Sequence[str] | None, own: str | None, name: str) -> str:
    if asked is None and own is not None:
        return own
    platforms = (asked,) if isinstance(asked, str) else tuple(asked or ())
    if len(platforms) != 1:
        raise ArgumentError(
            f"lowering_platforms must name one platform such as ('tpu',), not {platforms}; for a "
            f"module that fits several write jax.export.export({name}, platforms=...)"
        )
    return compiler.known_platform(platforms[0])


class Lowered(Stage, jax.stages.Lowered):
    """A module with its annotations, not compiled yet. It is a `jax.stages.Lowered`."""

    def __init__(
        self,
        traced: Traced,
        order: LoweringRequest,
        interface: LoweredSignature,
        program: LoweredProgram,
        platform: str,
    ) -> None:
        self._traced = traced
        self._request = order
        self._signature = interface
        self._program = program
        self._platform = platform
        self._info = traced._info
        self._known_out_shardings = order.placement.out_shardings
        if order.placement.is_unassigned:
            self._known_out_shardings = traced._call.out_shardings

    @shortened
    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The module as text.

        Args:
            dialect: `"stablehlo"`, which is meant by None, or `"hlo"`.
            debug_info: Include the source locations.
        """
        if _checked_dialect(dialect) == "stablehlo":
            return self._program.as_text(debug_info=debug_info)
        return executables.hlo_text(self._program.body.module, debug_info=debug_info)

    @shortened
    def compiler_ir(self, dialect: str | None = None) -> Any:
        """The module as an object: of MLIR, or XLA's computation.

        Args:
            dialect: `"stablehlo"`, which is meant by None, or `"hlo"`.
        """
        if _checked_dialect(dialect) == "stablehlo":
            return self._program.body.module
        return executables.hlo_computation(self._program.body.module)

    def cost_analysis(self) -> dict[str, float]:
        """XLA's estimates before optimisation: FLOP, bytes accessed."""
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
        """Compiles the module.

        Args:
            compiler_options: Options of XLA for this compilation only.
            device_assignment: The devices of a program whose shardings stand on abstract meshes.
            share_binary: Whether one process of several compiles, and the others load its machine
                code; all must then call this. As `pjit` was told if not given.

        Raises:
            ArgumentError: If it was lowered for another platform than that of its devices.
            CompileError: If XLA refuses the module or an option, or it has no devices.
            DeviceMismatchError: If its shardings name other devices than `device_assignment`.
            DonationError: If a donated argument can't be reused, under `donation="strict"`.
        """
        function, call = self._traced._function, self._traced._call
        order, module = self._request, (self._signature, self._program)
        if device_assignment is not None or order.placement.is_unassigned:
            devices = None if device_assignment is None else tuple(device_assignment)
            order = self._assigned(devices)
            module = function.lower(call, order)
        own = compiler.platform_of(order.placement.devices[0])
        if self._platform != own:
            raise ArgumentError(
                f"{self.fun_name} was lowered for {self._platform}, but its devices are of {own}: "
                "leave lowering_platforms out to compile it here"
            )
        function.report_donation(self._program)
        if share_binary is not None:
            order = replace(order, share_binary=share_binary)
        options = compiler_option_items(compiler_options)
        if options:
            compiled = function.compile_uncached(call, order, module, options)
        else:
            compiled = function.compile(call, order)
        function.report_donation(self._program, compiled)
        return Compiled(self._info, compiled, call.traced.jaxpr)

    def _assigned(self, devices: tuple[Device, ...] | None) -> LoweringRequest:
        """Return the request over the devices that a call of `compile` gives."""
        lowered = self._request.placement.devices
        if not self._request.placement.is_unassigned:
            if devices != lowered:
                raise DeviceMismatchError(
                    f"device_assignment of {self.fun_name} is {_ids(devices)}, but its shardings "
                    f"name {_ids(lowered)}: leave device_assignment out"
                )
            return self._request
        if devices is None or len(devices) != len(lowered):
            given = "missing" if devices is None else f"of {len(devices)} devices"
            raise CompileError(
                f"device_assignment of {self.fun_name} is {given}, but its abstract mesh stands "
                f"for {len(lowered)} devices: write "
                f"lowered.compile(device_assignment=jax.devices()[:{len(lowered)}])"
            )
        function = self._traced._function
        call = replace(self._traced._call, assign=lambda _: devices)
        return function.lowering_request(call, function.arguments(call))


def _ids(devices: Sequence[Device] | None) -> list[int]:
    return [device.id for device in devices or ()]


def _checked_dialect(dialect: object) -> str:
    if dialect is None:
        return "stablehlo"
    if isinstance(dialect, str) and dialect in ("stablehlo", "hlo"):
        return dialect
    raise ArgumentError(f"dialect must be 'stablehlo' or 'hlo', not {dialect!r}")


def lower_by_jax(
    fun: Any, info: StageInfo, order: LoweringRequest, platforms: Sequence[str] | None, private: Any
) -> Any:
    """Lowers a traced function as `jax.jit` would, arguments and results placed as here.

    An exported module follows JAX's calling convention, with symbolic dimensions and several
    platforms, so JAX writes it. What the function says of shardings is said to it.

    Args:
        fun: Runs what was traced, in the trace of JAX.
        info: The outside of the function.
        order: The program that the traced call needs here.
        platforms: Those that the module shall run on.
        private: What `jax.export` hands to JAX's own stage.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    call.__name__ = call.__qualname__ = info.name
    placement = order.placement
    ins, outs = (
        [
            _place(sharding, layout, aval, alone=len(placement.devices) == 1)
            for sharding, layout, aval in zip(shardings, layouts, avals, strict=True)
        ]
        for shardings, layouts, avals in (
            (placement.in_shardings, order.layouts[0], info.in_avals),
            (placement.out_shardings, order.layouts[1], info.out_avals),
        )
    )
    args, kwargs = info.in_tree.unflatten(map(struct, info.in_avals, ins))
    places = [UNSPECIFIED if place is None else place for place in outs]
    outer = jax.jit(call, out_shardings=info.out_tree.unflatten(places))
    traced: Any = outer.trace(*args, **kwargs)
    return traced.lower(lowering_platforms=platforms, _private_parameters=private)


def _place(sharding: Any, layout: Any, aval: Any, *, alone: bool) -> Any:
    """The place of an argument or result as JAX takes it; None leaves it open."""
    if sharding is None or (alone and layout is None and sharding.memory_kind is None):
        return None
    twin: Any = to_jax(sharding, aval.shape)
    return twin if layout is None else Format(layout, twin)
