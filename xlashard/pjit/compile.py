"""From a jaxpr and an order to a compiled program, each made once."""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

from xlashard._jax.runtime.global_state import cleared_with_jax
from xlashard._jax.trace.jaxprs import is_ref
from xlashard._jax.trace.tracing import mesh_of_type, shaped
from xlashard.lazily import dataclass
from xlashard.pjit.arguments import bare
from xlashard.pjit.closed_over import ClosedValues
from xlashard.pjit.lower import LoweredSignature, LoweringRequest, lower_jaxpr
from xlashard.pjit.recompile.history import CacheMiss
from xlashard.pjit.shardings.resolve import ProgramPlacement
from xlashard.pjit.shardings.unassigned import mesh_of, mesh_over
from xlashard.program import LoweredProgram, Program, ProgramParts, compile_program, is_open
from xlashard.program.runtime.executables import EXECUTABLES
from xlashard.sharding import (
    Mesh,
    NamedSharding,
    SingleDeviceSharding,
    XLACompatibleSharding,
    on_mesh,
)


@dataclass(frozen=True, eq=False)
class CompiledProgram:
    """A program together with how arguments reach it.

    Attributes:
        program: The compiled program.
        lowered: Its module; None for a program that was loaded from a file.
        consts: Handles of the hoisted values, placed; references as they are.
        kept: For each argument, whether the program takes it.
        written: For each of the last results the reference that is to hold it: one that the
            function closes over, or the position of an argument.
        stateful: True if it takes references, or takes or returns tokens: jaxlib's dispatcher
            knows neither.
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

    def argument_paths(self, paths: Sequence[str], name: str) -> list[str]:
        """Return the path of each argument of the program.

        Args:
            paths: The path of each argument of the call.
            name: The function.
        """
        closed_over = [f"an array that {name} closes over"] * len(self.consts)
        return [*closed_over, *compress(paths, self.kept)]

    def with_user_shardings(self, placement: ProgramPlacement) -> "CompiledProgram":
        """The same program, whose values bear the shardings in a placement's own writing."""
        before = self.program
        parts = with_user_shardings(before.parts, placement, self.kept)
        return replace(self, program=Program(before.loaded, parts, before.source, before.terms))


def with_user_shardings(
    parts: ProgramParts, placement: ProgramPlacement, kept: Sequence[bool]
) -> ProgramParts:
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
    in_avals, out_avals = (tuple(map(shaped, a)) for a in (parts.in_avals, parts.out_avals))
    model = _model(taken, in_avals)
    ins = _named_after(model, taken, parts.in_shardings, in_avals, placement.mesh)
    consts = len(taken) - len(mine)
    model = _model(ins[consts:], in_avals[consts:])
    outs = _named_after(model, given, parts.out_shardings, out_avals, placement.mesh)
    return replace(parts, in_shardings=ins, out_shardings=outs, committed=placement.committed)


type _Model = tuple[NamedSharding | SingleDeviceSharding, Any]
"""A sharding by which the others of a program are named, and the aval of its value."""


def _model(
    shardings: Sequence[XLACompatibleSharding | None], avals: Sequence[Any]
) -> _Model | None:
    """Return the first sharding that can name others: JAX takes that one, and so do we."""
    for sharding, aval in zip(shardings, avals, strict=True):
        if isinstance(sharding, NamedSharding | SingleDeviceSharding):
            return sharding, aval
    return None


def _named_after(
    model: _Model | None,
    requested: Sequence[XLACompatibleSharding | None],
    found: Sequence[XLACompatibleSharding],
    avals: Sequence[Any],
    mesh: Mesh | None,
) -> tuple[XLACompatibleSharding, ...]:
    """Return what was requested of values, and what the partitioner chose in a model's writing.

    Args:
        model: See `_Model`; None where no argument has one.
        requested: For each value its sharding; None for the one that was found.
        found: For each value the sharding that the compiler reports.
        avals: The types of the values.
        mesh: The mesh of the program, by which values are named without a model.
    """
    named = []
    for asked, sharding, aval in zip(requested, found, avals, strict=True):
        if asked is None:
            named.append(_named(sharding, aval, model, mesh))
        else:
            named.append(_closed(asked, sharding, aval) if is_open(asked) else asked)
    return tuple(named)


def _closed(
    requested: XLACompatibleSharding, found: XLACompatibleSharding, aval: Any
) -> XLACompatibleSharding:
    """Return what the partitioner made of a sharding that leaves dimensions to it."""
    typed = mesh_of_type(aval)
    if typed is not None and typed.size == found.num_devices:
        spec = aval.sharding.spec
        written = NamedSharding(
            mesh_over(found.devices, typed), spec, memory_kind=found.memory_kind
        )
        if found.is_equivalent_to(written, aval.ndim):
            return written
    return _named(found, aval, None, mesh_of(requested))


def _named(
    found: XLACompatibleSharding, aval: Any, model: _Model | None, mesh: Mesh | None
) -> XLACompatibleSharding:
    """Return a sharding that the partitioner chose, by the spec of a model or on a mesh."""
    typed = mesh_of_type(aval)
    if model is not None:
        sharding, of = model
        if isinstance(sharding, SingleDeviceSharding):
            return found
        mesh = mesh_of(sharding)
        alike = aval.ndim == of.ndim and typed == sharding.mesh.abstract_mesh
        if alike and found.is_equivalent_to(sharding, aval.ndim):
            return sharding
    if typed is not None and typed.size == found.num_devices:
        mesh = mesh_over(found.devices, typed)
    return found if mesh is None else on_mesh(found, mesh, aval.ndim)


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
        self, jaxpr: Any, order: LoweringRequest, miss: CacheMiss
    ) -> "tuple[LoweredSignature, LoweredProgram]":
        """The module for a jaxpr and an order; made by the first of several threads.

        Args:
            jaxpr: The closed jaxpr.
            order: What else it depends on.
            miss: Records the stage if it had to run.
        """
        order = replace(order.canonicalize(), share_binary=False)
        slot = self._slot(jaxpr, ("lowered", order))
        with slot.lock:
            if slot.value is None:
                with miss.timed("lower"):
                    slot.value = lower_jaxpr(jaxpr, order)
            return slot.value

    def compiled(self, jaxpr: Any, order: LoweringRequest, miss: CacheMiss) -> CompiledProgram:
        """The program for a jaxpr and an order; compiled by the first of several threads.

        Args:
            jaxpr: The closed jaxpr.
            order: What else it depends on.
            miss: Records the stage if it had to run.
        """
        slot = self._slot(jaxpr, ("said", order))
        with slot.lock:
            if slot.value is None:
                compiled = self._compiled(jaxpr, order.canonicalize(), miss)
                slot.value = compiled.with_user_shardings(order.placement)
            return slot.value

    def _compiled(self, jaxpr: Any, order: LoweringRequest, miss: CacheMiss) -> CompiledProgram:
        slot = self._slot(jaxpr, ("compiled", order))
        with slot.lock:
            if slot.value is None:
                lowered = self.lowered(jaxpr, order, miss)
                with miss.timed("compile"):
                    slot.value = compile_lowered(*lowered, share=order.share_binary)
                miss.executable_source = slot.value.program.source
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


def compile_lowered(
    interface: LoweredSignature,
    lowered: LoweredProgram,
    options: Sequence[tuple[str, Any]] = (),
    *,
    share: bool = False,
) -> CompiledProgram:
    """Compiles a module and places the values that its function closes over."""
    count = len(interface.consts)
    used = list(compress(interface.consts, interface.kept[:count]))
    program = compile_program(
        lowered,
        (interface.in_avals, interface.out_avals),
        committed=True,
        options=options,
        closed=ClosedValues(tuple(used), interface.closed),
        share=share,
    )
    placed = program.keep([bare(value) for value in used])
    return CompiledProgram(
        program=program,
        lowered=lowered,
        consts=tuple(c if is_ref(c) else p for c, p in zip(used, placed, strict=True)),
        kept=interface.kept_arguments,
        written=interface.references,
        stateful=interface.stateful,
    )
