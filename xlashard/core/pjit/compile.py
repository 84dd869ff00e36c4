"""Compiled programs, cached by jaxpr and lowering request."""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

from xlashard._jax.runtime.global_state import cleared_with_jax
from xlashard._jax.trace.jaxprs import is_ref
from xlashard._jax.trace.tracing import all_shaped, mesh_of_type
from xlashard.core.pjit.arguments import bare_values
from xlashard.core.pjit.cache_key import LoweringRequest
from xlashard.core.pjit.cache_miss import CacheMiss
from xlashard.core.pjit.lower import lower_jaxpr
from xlashard.core.pjit.shardings.device_assignment import mesh_of, mesh_over
from xlashard.core.pjit.shardings.resolve import ProgramPlacement
from xlashard.core.program.annotate import is_open
from xlashard.core.program.compile import compile_program
from xlashard.core.program.executables import EXECUTABLES
from xlashard.core.program.execute import CompiledProgram
from xlashard.core.program.lowered import LoweredProgram
from xlashard.core.sharding import (
    Mesh,
    NamedSharding,
    SingleDeviceSharding,
    XLACompatibleSharding,
    on_mesh,
)


def with_user_shardings(program: CompiledProgram, placement: ProgramPlacement) -> CompiledProgram:
    """Return a program, with the shardings of a placement as the user wrote them.

    Args:
        program: The program.
        placement: A placement with the program's canonical form.
    """
    mesh, requested = placement.mesh, list(compress(placement.in_shardings, program.kept))
    reported_ins, reported_outs = program.in_shardings, program.out_shardings
    consts = len(reported_ins) - len(requested)
    in_avals, out_avals = all_shaped(program.in_avals), all_shaped(program.out_avals)
    in_requests = [*(None,) * consts, *requested]
    ins = _named_after(_model(in_requests, in_avals), in_requests, reported_ins, in_avals, mesh)
    written = len(reported_outs) - len(placement.out_shardings)
    returned = [*placement.out_shardings, *(None,) * written]
    model = _model(ins[consts:], in_avals[consts:])
    outs = _named_after(model, returned, reported_outs, out_avals, mesh)
    pairs = zip((*ins, *outs), (*reported_ins, *reported_outs), strict=True)
    if placement.committed == program.committed and all([own is other for own, other in pairs]):
        return program
    return replace(program, in_shardings=ins, out_shardings=outs, committed=placement.committed)


type _Model = tuple[NamedSharding | SingleDeviceSharding, Any]
"""A sharding whose writing the others of a program follow, and the aval of its value."""


def _model(
    shardings: Sequence[XLACompatibleSharding | None], avals: Sequence[Any]
) -> _Model | None:
    """Return the first sharding that others can follow, as JAX does."""
    for sharding, aval in zip(shardings, avals, strict=True):
        if isinstance(sharding, NamedSharding | SingleDeviceSharding):
            return sharding, aval
    return None


def _named_after(
    model: _Model | None,
    requested: Sequence[XLACompatibleSharding | None],
    reported: Sequence[XLACompatibleSharding],
    avals: Sequence[Any],
    mesh: Mesh | None,
) -> tuple[XLACompatibleSharding, ...]:
    """Return the requested shardings, and those that the partitioner chose as a model is written.

    Args:
        model: See `_Model`; None where no argument has one.
        requested: For each value its sharding, or None.
        reported: For each value the sharding that the compiler reports.
        avals: The types of the values.
        mesh: The mesh of the program, by which values are named without a model.
    """
    named, known = [], {}
    for sharding, chosen, aval in zip(requested, reported, avals, strict=True):
        if sharding is None:
            sharding = known.get((id(chosen), aval))
            if sharding is None:
                sharding = known[id(chosen), aval] = _named(chosen, aval, model, mesh)
        elif sharding is not chosen and is_open(sharding):
            sharding = _settle_open_sharding(sharding, chosen, aval)
        named.append(sharding)
    return tuple(named)


def _settle_open_sharding(
    requested: XLACompatibleSharding, chosen: XLACompatibleSharding, aval: Any
) -> XLACompatibleSharding:
    """Return the sharding that the partitioner chose for one with unconstrained dimensions."""
    typed = mesh_of_type(aval)
    if typed is not None and typed.size == chosen.num_devices:
        spec = aval.sharding.spec
        written = NamedSharding(
            mesh_over(chosen.devices, typed), spec, memory_kind=chosen.memory_kind
        )
        if chosen.is_equivalent_to(written, aval.ndim):
            return written
    return _named(chosen, aval, None, mesh_of(requested))


def _named(
    chosen: XLACompatibleSharding, aval: Any, model: _Model | None, mesh: Mesh | None
) -> XLACompatibleSharding:
    """Return a sharding that the partitioner chose, with the spec of a model or on a mesh."""
    typed = mesh_of_type(aval)
    if model is not None:
        sharding, of = model
        if isinstance(sharding, SingleDeviceSharding):
            return chosen
        mesh = mesh_of(sharding)
        alike = aval.ndim == of.ndim and typed == sharding.mesh.abstract_mesh
        if alike and chosen.is_equivalent_to(sharding, aval.ndim):
            return sharding
    if typed is not None and typed.size == chosen.num_devices:
        mesh = mesh_over(chosen.devices, typed)
    return chosen if mesh is None else on_mesh(chosen, mesh, aval.ndim)


class CacheEntry:
    """Module and programs of one jaxpr under one canonical request.

    The first of several threads lowers and compiles; the others wait for it.
    """

    def __init__(self, request: LoweringRequest) -> None:
        self._lock = threading.RLock()
        self._request = request
        self._lowered: LoweredProgram | None = None
        # By `share_binary`.
        self._compiled: dict[bool, CompiledProgram] = {}
        # By `share_binary` and the placement as the user wrote it.
        self._with_user_shardings: dict[tuple[bool, ProgramPlacement], CompiledProgram] = {}

    def lower(self, jaxpr: Any, miss: CacheMiss) -> LoweredProgram:
        """Return the module.

        Args:
            jaxpr: The closed jaxpr, which the entry must not keep alive.
            miss: Records the stage if it has to run.
        """
        with self._lock:
            if self._lowered is None:
                began = time.perf_counter()
                self._lowered = lower_jaxpr(jaxpr, self._request)
                miss.record_stage("lower", began)
            return self._lowered

    def compile(
        self,
        jaxpr: Any,
        request: LoweringRequest,
        miss: CacheMiss,
        options: Sequence[tuple[str, Any]] = (),
    ) -> CompiledProgram:
        """Return the compiled program.

        Args:
            jaxpr: The closed jaxpr.
            request: The request as the user made it, with the entry's canonical form.
            miss: Records the stages that have to run.
            options: Compiler options past those of the request. The entry does not keep the
                program then.
        """
        share, key = request.share_binary, (request.share_binary, request.placement)
        if options:
            compiled = self._compile(jaxpr, share, miss, options)
            return with_user_shardings(compiled, request.placement)
        with self._lock:
            compiled = self._with_user_shardings.get(key)
            if compiled is None:
                if share not in self._compiled:
                    self._compiled[share] = self._compile(jaxpr, share, miss)
                compiled = with_user_shardings(self._compiled[share], request.placement)
                self._with_user_shardings[key] = compiled
            return compiled

    def _compile(
        self, jaxpr: Any, share: bool, miss: CacheMiss, options: Sequence[tuple[str, Any]] = ()
    ) -> CompiledProgram:
        lowered, began = self.lower(jaxpr, miss), time.perf_counter()
        compiled = compile_lowered(lowered, options, share=share)
        miss.record_stage("compile", began)
        miss.executable_source = compiled.source
        return compiled

    @property
    def programs(self) -> list[CompiledProgram]:
        """Return the compiled programs, each once."""
        return list(self._compiled.values())


class ProgramCache:
    """Modules and programs by jaxpr and lowering request; they are dropped with their jaxpr.

    The jaxpr of a function lives as long as the function, so functions made in a loop do not pile
    up programs here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_jaxpr: weakref.WeakKeyDictionary[Any, _JaxprEntries] = weakref.WeakKeyDictionary()

    def cache_clear(self) -> None:
        """Drop every program."""
        with self._lock:
            self._by_jaxpr = weakref.WeakKeyDictionary()

    def drop(self, jaxpr: Any) -> None:
        """Drop the programs of one jaxpr, also for other jaxprs that would compile to them."""
        with self._lock:
            entries = self._by_jaxpr.pop(jaxpr, None)
        for entry in () if entries is None else entries.programs.values():
            for compiled in entry.programs:
                EXECUTABLES.forget(compiled.loaded)

    def entry(self, jaxpr: Any, request: LoweringRequest) -> CacheEntry:
        """Return the entry of a jaxpr and a request, which is canonicalized."""
        key = request.canonicalize()
        with self._lock:
            programs = self._entries(jaxpr).programs
            entry = programs.get(key)
            if entry is None:
                entry = programs[key] = CacheEntry(key)
            return entry

    def cached(self, jaxpr: Any, key: Any, make: Callable[[], Any]) -> Any:
        """Return a value that is made once for a jaxpr and a key, and dropped with its programs."""
        with self._lock:
            entries = self._entries(jaxpr)
            slot = entries.values.setdefault(key, [])
        if not slot:
            with entries.lock:
                if not slot:
                    slot.append(make())
        return slot[0]

    def _entries(self, jaxpr: Any) -> "_JaxprEntries":
        """Return the entries of a jaxpr; the caller holds the lock."""
        entries = self._by_jaxpr.get(jaxpr)
        return self._by_jaxpr.setdefault(jaxpr, _JaxprEntries()) if entries is None else entries

    def sizes(self) -> tuple[int, int]:
        """Return the number of jaxprs with programs, and the number of programs."""
        with self._lock:
            tables = [entries.programs for entries in self._by_jaxpr.values()]
            entries = [entry for table in tables for entry in table.values()]
            return sum(map(bool, tables)), sum(len(entry.programs) for entry in entries)


class _JaxprEntries:
    """Cache entries of one jaxpr, and other values that are made of it."""

    __slots__ = ("lock", "programs", "values")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.programs: dict[LoweringRequest, CacheEntry] = {}
        self.values: dict[Any, list[Any]] = {}


PROGRAMS = cleared_with_jax(ProgramCache())
"""The programs of this process."""


def compile_lowered(
    lowered: LoweredProgram, options: Sequence[tuple[str, Any]] = (), *, share: bool = False
) -> CompiledProgram:
    """Compile a module, and place the values that its function closes over.

    Args:
        lowered: The module.
        options: Compiler options past those of the module.
        share: Let one process compile, and the others load its machine code.
    """
    program, consts = compile_program(lowered, options, share=share), lowered.consts
    placed = program.keep(bare_values(consts))
    program.consts = tuple([c if is_ref(c) else p for c, p in zip(consts, placed, strict=True)])
    return program
