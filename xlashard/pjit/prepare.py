"""From a jaxpr and a placement to a compiled program, each made once."""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

from xlashard._jax import compiling
from xlashard._jax.caches import cleared_with_jax
from xlashard._jax.context import trace_context
from xlashard._jax.jaxprs import drop_unused, hoist
from xlashard._jax.lowering import LoweringTarget, lower_body, memory_kind_of, uses_shardy
from xlashard._jax.refs import is_ref, is_reference, without_references
from xlashard._jax.shardings import default_memory_kind, layout_text
from xlashard._jax.tracing import is_extended, physical_aval, source_of
from xlashard.errors import CompileError
from xlashard.pjit.arguments import bare
from xlashard.pjit.closed import ClosedValues, check_closed_over, closed_over_sharding, is_hoisted
from xlashard.pjit.recompile.making import Making
from xlashard.pjit.resolve import Placement
from xlashard.program import (
    LoweredProgram,
    Partitioner,
    Program,
    ProgramParts,
    ProgramPlan,
    ValuePlan,
    compile_program,
    is_open,
    lower_program,
)
from xlashard.program.executables import EXECUTABLES
from xlashard.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
    XLACompatibleSharding,
)


@dataclass(frozen=True, eq=False)
class Interface:
    """What a lowered jaxpr takes and gives.

    It must not hold the jaxpr: the programs of a function are dropped with the function's jaxpr.

    Attributes:
        in_avals: The abstract values of the hoisted values and arguments that are in use.
        out_avals: The abstract values of the results.
        consts: The hoisted values.
        kept: For each hoisted value and each argument, whether it is in use.
        written: Positions among hoisted values and arguments of the references whose new values
            are the last results.
        stateful: Whether there are references among hoisted values and arguments.
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


@dataclass(frozen=True)
class Order:
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
    placement: Placement
    layouts: tuple[tuple[Any, ...], tuple[Any, ...]]
    donated: tuple[bool, ...]
    keep_unused: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    context: Any = field(default_factory=trace_context)
    share_binary: bool = False

    def normal(self) -> "Order":
        """The order of the program that serves this one."""
        return replace(self, placement=self.placement.normal())


@dataclass(frozen=True, eq=False)
class Prepared:
    """A program together with how arguments reach it.

    Attributes:
        program: The compiled program.
        lowered: Its module; None for a program that was loaded from a file.
        consts: Handles of the hoisted values, placed; references as they are.
        kept: For each argument, whether the program takes it.
        written: For each of the last results the reference that is to hold it: one that the
            function closes over, or the position of an argument.
        stateful: Whether it takes references, which jaxlib's dispatcher does not know.
    """

    program: Program
    lowered: LoweredProgram | None
    consts: tuple[Any, ...]
    kept: tuple[bool, ...]
    written: tuple[Any, ...] = ()
    stateful: bool = False

    @property
    def bitvec(self) -> list[bool]:
        """`kept` as jaxlib's dispatcher reads it: the placed values come first."""
        return [True] * len(self.consts) + list(self.kept)

    def said_as(self, placement: Placement) -> "Prepared":
        """The same program, whose values bear the shardings in a placement's own writing."""
        before = self.program
        parts = said_as(before.parts, placement, self.kept)
        return replace(self, program=Program(before.loaded, parts, before.source, before.terms))


def said_as(parts: ProgramParts, placement: Placement, kept: Sequence[bool]) -> ProgramParts:
    """A program's parts with the shardings in a placement's own writing.

    Args:
        parts: What is known of the program.
        placement: Whose shardings those of the program are equal to.
        kept: For each argument, whether the program takes it.
    """
    mine = list(compress(placement.in_shardings, kept))
    taken = [*(None,) * (len(parts.in_shardings) - len(mine)), *mine]
    written = len(parts.out_shardings) - len(placement.out_shardings)
    given = [*placement.out_shardings, *(None,) * written]
    mesh = placement.mesh
    return replace(
        parts,
        in_shardings=tuple(
            _said_as(*pair, mesh) for pair in zip(taken, parts.in_shardings, strict=True)
        ),
        out_shardings=tuple(
            _said_as(*pair, mesh) for pair in zip(given, parts.out_shardings, strict=True)
        ),
        committed=placement.committed,
    )


def _said_as(
    said: XLACompatibleSharding | None, found: XLACompatibleSharding, mesh: Mesh | None
) -> XLACompatibleSharding:
    if said is not None and not is_open(said):
        return said
    if mesh is not None and isinstance(found, SingleDeviceSharding):
        return NamedSharding(mesh, PartitionSpec(), memory_kind=found.memory_kind)
    return found


class ProgramCache:
    """Programs by jaxpr and order; a program is dropped when its jaxpr is.

    The jaxpr of a function lives as long as the function, so functions made in a loop do not pile
    up programs here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_jaxpr: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

    def cache_clear(self) -> None:
        """Forgets every program."""
        with self._lock:
            self._by_jaxpr = weakref.WeakKeyDictionary()

    def drop(self, jaxpr: Any) -> None:
        """Forgets the programs of one jaxpr, also for other jaxprs that would compile to them."""
        with self._lock:
            slots = self._by_jaxpr.pop(jaxpr, {})
        for (kind, _), slot in slots.items():
            if kind == "compiled" and slot.value is not None:
                EXECUTABLES.forget(slot.value.program.loaded)

    def _slot(self, jaxpr: Any, key: Any) -> "_Slot":
        with self._lock:
            slots = self._by_jaxpr.setdefault(jaxpr, {})
            slot = slots.get(key)
            if slot is None:
                slot = slots[key] = _Slot()
            return slot

    def kept(self, jaxpr: Any, key: Any, make: Callable[[], Any]) -> Any:
        """What is made of a jaxpr once for a key, and dropped with its programs."""
        slot = self._slot(jaxpr, ("kept", key))
        with slot.lock:
            if slot.value is None:
                slot.value = make()
            return slot.value

    def lowered(
        self, jaxpr: Any, order: Order, making: Making
    ) -> "tuple[Interface, LoweredProgram]":
        """The module for a jaxpr and an order; made by the first of several threads.

        Args:
            jaxpr: The closed jaxpr.
            order: What else it depends on.
            making: Is told if it had to be made.
        """
        order = replace(order.normal(), share_binary=False)
        slot = self._slot(jaxpr, ("lowered", order))
        with slot.lock:
            if slot.value is None:
                with making.timed("lower"):
                    slot.value = _lower(jaxpr, order)
            return slot.value

    def prepared(self, jaxpr: Any, order: Order, making: Making) -> Prepared:
        """The program for a jaxpr and an order; compiled by the first of several threads.

        Args:
            jaxpr: The closed jaxpr.
            order: What else it depends on.
            making: Is told if it had to be made.
        """
        slot = self._slot(jaxpr, ("said", order))
        with slot.lock:
            if slot.value is None:
                compiled = self._compiled(jaxpr, order.normal(), making)
                slot.value = compiled.said_as(order.placement)
            return slot.value

    def _compiled(self, jaxpr: Any, order: Order, making: Making) -> Prepared:
        slot = self._slot(jaxpr, ("compiled", order))
        with slot.lock:
            if slot.value is None:
                lowered = self.lowered(jaxpr, order, making)
                with making.timed("compile"):
                    slot.value = compile_prepared(*lowered, share=order.share_binary)
                making.source = slot.value.program.source
            return slot.value

    def sizes(self) -> tuple[int, int]:
        """For how many jaxprs it has programs, and how many programs."""
        with self._lock:
            kinds = [{kind for kind, _ in slots} - {"kept"} for slots in self._by_jaxpr.values()]
            slots = [s for table in self._by_jaxpr.values() for s in table]
            return sum(map(bool, kinds)), sum(kind == "compiled" for kind, _ in slots)


class _Slot:
    __slots__ = ("lock", "value")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.value: Any = None


PROGRAMS = cleared_with_jax(ProgramCache())
"""The programs of this process."""


def _ready(jaxpr: Any, *, keep_unused: bool) -> tuple[Any, Interface]:
    """Hoists closed-over arrays out of a jaxpr, frees it of state, and drops what is not used."""
    hoisted, consts = hoist(jaxpr, [is_hoisted(c) for c in jaxpr.consts])
    stateful = any(map(is_reference, hoisted.in_avals))
    ready, written = without_references(hoisted)
    kept = (True,) * len(ready.in_avals)
    if not keep_unused:
        ready, kept = drop_unused(ready)
    ins, outs = tuple(ready.in_avals), tuple(ready.out_avals)
    interface = Interface(ins, outs, tuple(consts), kept, written, stateful, tuple(jaxpr.consts))
    return ready, interface


def lower_for_platform(jaxpr: Any, order: Order, platform: str) -> tuple[Interface, LoweredProgram]:
    """The module that an order would get on another platform, to be read and not to be compiled."""
    return _lower(jaxpr, order.normal(), platform)


def _lower(
    jaxpr: Any, order: Order, platform: str | None = None
) -> tuple[Interface, LoweredProgram]:
    check_closed_over(jaxpr, order.name)
    ready, interface = _ready(jaxpr, keep_unused=order.keep_unused)
    placement = order.placement
    multi = len(placement.devices) > 1
    const_shardings = [closed_over_sharding(c) if multi else None for c in interface.consts]
    all_ins = [*const_shardings, *placement.in_shardings]
    all_layouts = [*(None,) * len(interface.consts), *order.layouts[0]]
    all_donated = [*(False,) * len(interface.consts), *order.donated]
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
        platform=platform or compiling.platform_of(device),
        client=compiling.client_of(device) if platform is None else None,
        devices=placement.devices,
        shardings=tuple(known),
    )
    try:
        lowered_body = lower_body(ready, order.name, arg_names, target)
    except CompileError as error:
        raise CompileError(f"{order.name} can't be lowered: {error}") from None
    unused = _unused_donations(jaxpr, order, interface)
    return interface, lower_program(plan, lowered_body, source_of(ready), unused)


def _unused_donations(jaxpr: Any, order: Order, interface: Interface) -> list[ValuePlan]:
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
    trailing = 0
    if is_extended(aval):
        trailing = physical_aval(aval).ndim - aval.ndim
    return ValuePlan(
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        sharding=sharding,
        layout=layout_text(layout, aval.dtype),
        memory_kind=_special_memory(sharding) if sharding is not None else memory_kind_of(aval),
        trailing=trailing,
        name=name or "",
    )


def _special_memory(sharding: XLACompatibleSharding | None) -> str | None:
    if sharding is None or sharding.memory_kind is None:
        return None
    kind = sharding.memory_kind
    return None if kind == default_memory_kind(sharding.devices[0]) else kind


def compile_prepared(
    interface: Interface,
    lowered: LoweredProgram,
    options: Sequence[tuple[str, Any]] = (),
    *,
    share: bool = False,
) -> Prepared:
    """Compiles a module and places the values that its function closes over."""
    count = len(interface.consts)
    used = _keep(interface.consts, interface.kept[:count])
    program = compile_program(
        lowered,
        (interface.in_avals, interface.out_avals),
        committed=True,
        options=options,
        closed=ClosedValues(tuple(used), interface.closed),
        share=share,
    )
    placed = program.keep([bare(value) for value in used])
    return Prepared(
        program=program,
        lowered=lowered,
        consts=tuple(c if is_ref(c) else p for c, p in zip(used, placed, strict=True)),
        kept=interface.kept_arguments,
        written=interface.references,
        stateful=interface.stateful,
    )
