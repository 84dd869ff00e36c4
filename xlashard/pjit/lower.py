"""From a jaxpr and an order to a module, ready to be compiled."""

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

from xlashard._jax.lower.lowering import (
    LoweringTarget,
    dtype_name,
    lower_body,
    memory_kind_of,
    uses_shardy,
)
from xlashard._jax.runtime import compiler
from xlashard._jax.runtime.global_state import trace_context
from xlashard._jax.runtime.shardings import default_memory_kind, layout_text
from xlashard._jax.trace.jaxprs import (
    drop_unused,
    hoist,
    is_reference,
    short_index,
    without_references,
)
from xlashard._jax.trace.tracing import is_extended, is_token, physical_aval, shaped, source_of
from xlashard.errors import ArgumentError, CompileError
from xlashard.lazily import dataclass
from xlashard.pjit.closed_over import check_closed_over, closed_over_sharding, is_hoisted
from xlashard.pjit.shardings.resolve import ProgramPlacement
from xlashard.pjit.shardings.unreduced import check_reductions, unreduced_axes
from xlashard.program import LoweredProgram, Partitioner, ProgramPlan, ValuePlan, lower_program
from xlashard.sharding import XLACompatibleSharding


@dataclass(frozen=True)
class LoweringRequest:
    """All that a program depends on besides its jaxpr; the explicit key of the cache.

    Attributes:
        name: The function's name.
        placement: Devices and shardings.
        layouts: Layouts of arguments and of results; None for the default one.
        donated: For each argument, whether its buffers may be reused.
        keep_unused: Whether arguments without use stay.
        options: Options of the compiler.
        context: Settings of JAX that its rules read: those in force.
        share_binary: Whether one process compiles it for all.
    """

    name: str
    placement: ProgramPlacement
    layouts: tuple[tuple[Any, ...], tuple[Any, ...]]
    donated: tuple[bool, ...]
    keep_unused: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    context: Any = field(default_factory=trace_context)
    share_binary: bool = False

    def canonicalize(self) -> "LoweringRequest":
        """The order of the program that serves this one."""
        return replace(self, placement=self.placement.canonicalize())


@dataclass(frozen=True, eq=False)
class LoweredSignature:
    """What a lowered jaxpr takes and gives.

    It must not hold the jaxpr: the programs of a function are dropped with the function's jaxpr.

    Attributes:
        in_avals: The abstract values of the hoisted values and arguments that are in use.
        out_avals: The abstract values of the results.
        consts: The hoisted values.
        kept: For each hoisted value and each argument, whether it is in use.
        written: Positions among hoisted values and arguments of the references whose new values
            are the last results.
        stateful: True if it takes references, or takes or returns tokens.
        closed: All values that the function closes over.
    """

    in_avals: tuple[Any, ...]
    out_avals: tuple[Any, ...]
    consts: tuple[Any, ...]
    kept: tuple[bool, ...]
    written: tuple[int, ...]
    stateful: bool
    closed: tuple[Any, ...] = ()

    @property
    def kept_arguments(self) -> tuple[bool, ...]:
        """For each argument, whether it is in use."""
        return self.kept[len(self.consts) :]

    @property
    def references(self) -> tuple[Any, ...]:
        """Those of `written`: what the function closes over, or the position of an argument."""
        count = len(self.consts)
        return tuple(self.consts[i] if i < count else i - count for i in self.written)


def _ready(jaxpr: Any, *, keep_unused: bool) -> tuple[Any, LoweredSignature]:
    """Hoists closed-over arrays out of a jaxpr, frees it of state, and drops what is not used."""
    hoisted, consts = hoist(jaxpr, [is_hoisted(c) for c in jaxpr.consts])
    tokens = any(map(is_token, (*hoisted.in_avals, *hoisted.out_avals)))
    stateful = tokens or any(map(is_reference, hoisted.in_avals))
    ready, written = without_references(hoisted)
    kept = (True,) * len(ready.in_avals)
    if not keep_unused:
        ready, kept = drop_unused(ready)
    ins, outs = tuple(ready.in_avals), tuple(ready.out_avals)
    interface = LoweredSignature(
        ins, outs, tuple(consts), kept, written, stateful, tuple(jaxpr.consts)
    )
    return ready, interface


def lower_jaxpr(
    jaxpr: Any, order: LoweringRequest, platform: str | None = None
) -> tuple[LoweredSignature, LoweredProgram]:
    """The module for a jaxpr and an order, and what it takes and gives.

    Args:
        jaxpr: The closed jaxpr.
        order: What else it depends on, in its normal form.
        platform: Another platform than that of the order's devices, to be read only.
    """
    check_closed_over(jaxpr, order.name)
    check_reductions(jaxpr, order.name)
    ready, interface = _ready(jaxpr, keep_unused=order.keep_unused)
    _check_indices(ready, order.name)
    placement = order.placement
    multi = len(placement.devices) > 1
    const_shardings = [closed_over_sharding(c) if multi else None for c in interface.consts]
    all_ins = [*const_shardings, *placement.in_shardings]
    all_layouts = [*(None,) * len(interface.consts), *order.layouts[0]]
    given_away = [d and not is_token(a) for d, a in zip(order.donated, jaxpr.in_avals, strict=True)]
    all_donated = [*(False,) * len(interface.consts), *given_away]
    for i in interface.written:
        # A reference is written in place, where it is known to stay in its place.
        all_donated[i] = not multi or all_ins[i] is not None
    ins, in_layouts = _keep(all_ins, interface.kept), _keep(all_layouts, interface.kept)
    outs = [*placement.out_shardings, *(all_ins[i] for i in interface.written)]
    out_layouts = [*order.layouts[1], *(all_layouts[i] for i in interface.written)]
    debug = ready.debug_info
    arg_names = debug.safe_arg_names(len(interface.in_avals))
    result_names = debug.safe_result_paths(len(interface.out_avals))
    device = placement.devices[0]
    plan = ProgramPlan(
        name=f"pjit_{order.name}",
        devices=placement.devices,
        args=tuple(map(_value, interface.in_avals, ins, in_layouts, arg_names)),
        results=tuple(map(_value, interface.out_avals, outs, out_layouts, result_names)),
        donated=tuple(_keep(all_donated, interface.kept)),
        partitioner=Partitioner.SHARDY if uses_shardy() else Partitioner.GSPMD,
        options=order.options,
        mesh=placement.mesh,
        context=order.context,
    )
    known = [s for s in (*ins, *outs) if s is not None]
    target = LoweringTarget(
        platform=platform or compiler.platform_of(device),
        client=compiler.client_of(device) if platform is None else None,
        devices=placement.devices,
        shardings=tuple(known),
    )
    try:
        lowered_body = lower_body(ready, order.name, arg_names, target)
    except CompileError as error:
        raise CompileError(f"{order.name} can't be lowered: {error}") from None
    unused = _unused_donations(jaxpr, order, interface)
    return interface, lower_program(plan, lowered_body, source_of(ready), unused)


def _check_indices(jaxpr: Any, name: str) -> None:
    """Refuse a program that indexes a dimension with integers that are too short for it.

    Raises:
        ArgumentError: With the type of the array.
    """
    indexed = short_index(jaxpr)
    if indexed is not None:
        aval, integers = indexed
        raise ArgumentError(
            f"{name} indexes an array {dtype_name(aval)} with {integers}, which ends at "
            f"{2**31 - 1:,}: call jax.config.update('jax_enable_x64', True) and index with int64, "
            "or reshape the array to shorter dimensions"
        )


def lower_for_platform(
    jaxpr: Any, order: LoweringRequest, platform: str
) -> tuple[LoweredSignature, LoweredProgram]:
    """The module that an order would get on another platform, to be read and not to be compiled."""
    return lower_jaxpr(jaxpr, order.canonicalize(), platform)


def _unused_donations(
    jaxpr: Any, order: LoweringRequest, interface: LoweredSignature
) -> list[ValuePlan]:
    """The donated arguments that nothing needs."""
    names = jaxpr.debug_info.safe_arg_names(len(jaxpr.in_avals))
    return [
        _value(aval, sharding, None, name)
        for aval, sharding, name, donated, stays in zip(
            jaxpr.in_avals,
            order.placement.in_shardings,
            names,
            order.donated,
            interface.kept_arguments,
            strict=True,
        )
        if donated and not stays
    ]


def _keep(values: Sequence[Any], kept: Sequence[bool]) -> list[Any]:
    return [v for v, k in zip(values, kept, strict=True) if k]


def _value(aval: Any, sharding: XLACompatibleSharding | None, layout: Any, name: str) -> ValuePlan:
    trailing, token = 0, is_token(aval)
    if token:
        sharding, aval = None, shaped(aval)
    elif is_extended(aval):
        trailing = physical_aval(aval).ndim - aval.ndim
    return ValuePlan(
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        sharding=sharding,
        layout=layout_text(layout, aval.dtype),
        memory_kind=_special_memory(sharding) if sharding is not None else memory_kind_of(aval),
        trailing=trailing,
        name=name or "",
        is_token=token,
        is_whole=sharding is not None and sharding.is_unreduced and not unreduced_axes(aval),
    )


def _special_memory(sharding: XLACompatibleSharding | None) -> str | None:
    if sharding is None or sharding.memory_kind is None:
        return None
    kind = sharding.memory_kind
    return None if kind == default_memory_kind(sharding.devices[0]) else kind
