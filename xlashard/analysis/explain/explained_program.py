"""Programs to explain: the facts about a compiled program, with its values and source lines."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, repeat
from typing import Any

from xlashard._jax.runtime import executables
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.trace.jaxprs import callback_results
from xlashard._jax.trace.tracing import is_extended, physical_aval, shaped
from xlashard.analysis.explain.source_lines import SourceLocator
from xlashard.core.pjit.arguments import Argument, describe_arguments
from xlashard.core.pjit.compile import CompiledProgram, with_user_shardings
from xlashard.core.pjit.lower import LoweredSignature
from xlashard.core.pjit.shardings.resolve import ProgramPlacement
from xlashard.core.pjit.stages.info import StageInfo
from xlashard.core.pjit.trace import Call
from xlashard.core.program.compile import LoweredProgram
from xlashard.core.program.donation import UnusedDonation
from xlashard.core.program.executables import HloShardings, resolve_shardings
from xlashard.core.program.execute import ProgramParts
from xlashard.core.program.plan import ProgramPlan
from xlashard.core.sharding import Mesh, NamedSharding, Sharding, XLACompatibleSharding
from xlashard.hlo.collectives import Collective
from xlashard.hlo.hlo_program import HloProgram, read_modules
from xlashard.hlo.module import Frame


@dataclass(frozen=True, eq=False)
class CompiledFacts:
    """Inputs, outputs and donations of a compiled program.

    Attributes:
        parts: Its inputs and outputs.
        kept: For each argument, True if the program has a parameter for it.
        written: For each of the last results the reference that it is written to: a closed-over
            one, or the position of an argument.
        aliases: For each result that reuses an argument's buffers, the position of that argument,
            counted with the tokens and closed-over arrays before it.
        refusals: Reason of each unused donation, by path.
        has_requests: True if the requested shardings of its results are known.
        modules: Returns the compiled modules, given the function that picks a line of a stack.
        executable: The executable, if there is one.
        log: What the compiler wrote to its log; empty if unknown, as for a cached program.
    """

    parts: ProgramParts
    kept: tuple[bool, ...]
    written: tuple[Any, ...]
    aliases: Mapping[int, int]
    refusals: Mapping[str, UnusedDonation]
    has_requests: bool
    modules: Callable[[Callable[[Sequence[Frame]], object]], tuple[HloProgram, ...]] = field(
        repr=False
    )
    executable: Any = None
    log: str = ""

    @property
    def tokens(self) -> int:
        """Return the number of ordering tokens before its arguments, and before its results."""
        return len(self.parts.body.ordered_effects)

    @property
    def closed_over(self) -> int:
        """Return the number of closed-over arrays among its arguments."""
        return len(self.parts.in_avals) - sum(self.kept)


def compiled_facts(compiled: CompiledProgram) -> CompiledFacts:
    """Return the facts of a compiled program."""
    program, lowered = compiled.program, compiled.lowered
    return CompiledFacts(
        parts=program.parts,
        kept=compiled.kept,
        written=compiled.written,
        aliases=executables.aliases(program.executable),
        refusals={} if lowered is None else lowered.refusals(program),
        has_requests=lowered is not None,
        modules=lambda place: read_modules(program.executable_with_lines(place)),
        executable=program.executable,
        log=getattr(program.executable, "log", ""),
    )


def facts_from_hlo(
    lowered: LoweredProgram,
    signature: LoweredSignature,
    placement: ProgramPlacement,
    module: HloProgram,
) -> CompiledFacts:
    """Return the facts of a program that the compiler rejected.

    Args:
        lowered: The lowered module.
        signature: Its inputs and outputs.
        placement: The requested shardings.
        module: The compiled module, as the compiler dumped it.

    Raises:
        CompileError: If the module does not contain the propagated shardings.
    """
    chosen = HloShardings(module)
    plan, tokens = lowered.plan, len(lowered.body.ordered_effects)
    ins, outs = resolve_shardings(chosen, plan, tokens)
    parts = ProgramParts(
        plan=plan,
        in_shardings=ins,
        out_shardings=outs,
        in_avals=signature.in_avals,
        out_avals=signature.out_avals,
        committed=True,
        body=lowered.body,
    )
    return CompiledFacts(
        parts=with_user_shardings(parts, placement, signature.kept_arguments),
        kept=signature.kept_arguments,
        written=signature.references,
        aliases=module.aliases,
        refusals=lowered.refusals_by(parts, dict(module.aliases)),
        has_requests=True,
        modules=lambda _: (module,),
    )


@dataclass(frozen=True, eq=False)
class CallArgument:
    """Argument of a call.

    Attributes:
        value: The argument itself.
        placement: Its sharding, layout and commitment.
        requested: The sharding that the caller requested for it, or None.
    """

    value: Any
    placement: Argument
    requested: Sharding | None


@dataclass(frozen=True, eq=False)
class ProgramValue:
    """Argument or result of a program.

    Attributes:
        path: Its path.
        aval: Its abstract value.
        sharding: Its sharding; None for an argument that the program drops.
        lowered_sharding: Its sharding in the lowered module; None leaves it to the partitioner.
        argument: The argument of the call; None for results, and if the call is unknown.
        is_chosen: True if its sharding was chosen under `AUTO`.
    """

    path: str
    aval: Any
    sharding: XLACompatibleSharding | None
    lowered_sharding: XLACompatibleSharding | None
    argument: CallArgument | None = None
    is_chosen: bool = False

    @property
    def requested(self) -> Sharding | None:
        """Return the sharding that the caller requested, or that of the lowered module."""
        return self.lowered_sharding if self.argument is None else self.argument.requested

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element; of a PRNG key, those of its integers."""
        if not is_extended(self.aval):
            return self.aval.dtype.itemsize
        physical = physical_aval(self.aval)
        return math.prod(physical.shape[self.aval.ndim :]) * physical.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole value."""
        return math.prod(self.aval.shape) * self.itemsize

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the shard on one device."""
        if self.sharding is None:
            return 0
        tiling = self.sharding.rank_tiling(self.aval.ndim)
        return math.prod(tiling.shard_shape(self.aval.shape, uneven=True)) * self.itemsize


@dataclass(frozen=True, eq=False)
class ExplainedProgram:
    """Compiled program with the call that it was compiled for.

    Attributes:
        info: Names, paths and types.
        facts: Facts about the program.
        call: The call; None for a compiled stage, which does not keep it.
        source: Name and location of the function of a program without its call, if known.
        forgotten: Facts that the explained stage does not keep, as one clause; empty for a call.
    """

    info: StageInfo
    facts: CompiledFacts
    call: Call | None = None
    source: str | None = None
    forgotten: str = ""

    @property
    def plan(self) -> ProgramPlan:
        """Plan of the compiled program."""
        return self.facts.parts.plan

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the device assignment."""
        return self.plan.devices

    @property
    def jaxpr(self) -> Any:
        """Return the closed jaxpr of the traced function; None for a program without its trace."""
        return None if self.call is None else self.call.traced.jaxpr

    @cached_property
    def mesh(self) -> Mesh | None:
        """Return the mesh of the program; of a loaded program, that of its shardings."""
        parts = self.facts.parts
        named = (
            s.mesh
            for s in (*parts.in_shardings, *parts.out_shardings)
            if isinstance(s, NamedSharding)
        )
        meshes = (mesh for mesh in named if isinstance(mesh, Mesh))
        return self.plan.mesh or next(meshes, None)

    @cached_property
    def sources(self) -> SourceLocator:
        """Return the locator of the source lines that a report shows."""
        call = self.call
        return SourceLocator.of(
            self.source if call is None else call.traced.jaxpr.debug_info.func_src_info
        )

    @cached_property
    def modules(self) -> tuple[HloProgram, ...]:
        """Return the compiled modules, with the lines of this function."""
        return self.facts.modules(self.sources.own_line)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Return the collectives of the compiled modules."""
        collectives = (module.collectives_on(self.mesh) for module in self.modules)
        return tuple(chain.from_iterable(collectives))

    @cached_property
    def arguments(self) -> tuple[ProgramValue, ...]:
        """Return the arguments of the call, in order."""
        info, facts, call, first = self.info, self.facts, self.call, self.facts.closed_over
        called: Sequence[CallArgument | None] = [None] * len(info.paths)
        if call is not None:
            placements = describe_arguments(call.values, info.paths, info.in_avals, runs=False)
            called = list(map(CallArgument, call.values, placements, call.in_shardings))
        shardings = iter(facts.parts.in_shardings[first:])
        lowered = iter(self.plan.args[first:])
        moves = (call.moves if call else ()) or (False,) * len(info.paths)
        arguments = zip(info.paths, info.in_avals, called, facts.kept, moves, strict=True)
        return tuple(
            ProgramValue(
                path=path,
                aval=shaped(aval),
                sharding=next(shardings) if is_kept else None,
                lowered_sharding=next(lowered).sharding if is_kept else None,
                argument=argument,
                is_chosen=is_chosen,
            )
            for path, aval, argument, is_kept, is_chosen in arguments
        )

    @cached_property
    def closed_over(self) -> tuple[ProgramValue, ...]:
        """Return the closed-over arrays that are arguments of the program."""
        parts, count = self.facts.parts, self.facts.closed_over
        pairs = zip(parts.in_avals[:count], parts.in_shardings[:count], strict=True)
        return tuple(ProgramValue(f"closed over [{i}]", a, s, s) for i, (a, s) in enumerate(pairs))

    @cached_property
    def results(self) -> tuple[ProgramValue, ...]:
        """Return the results, in order, then the new values of references."""
        parts, written = self.facts.parts, self.facts.written
        count = len(parts.out_avals) - len(written)
        paths = [plan.name or f"result {i}" for i, plan in enumerate(self.plan.results[:count])]
        for reference in written:
            at = self.info.paths[reference] if isinstance(reference, int) else "closed over"
            paths.append(f"{at} as written")
        # The module pins the results of callbacks.
        pinned = frozenset() if self.jaxpr is None else callback_results(self.jaxpr)
        requests = (*(self.call.out_shardings if self.call else ()), *repeat(True, count))
        lowered = [
            None if i in pinned and requests[i] is None else plan.sharding
            for i, plan in enumerate(self.plan.results)
        ]
        avals = map(shaped, parts.out_avals)
        values = map(ProgramValue, paths, avals, parts.out_shardings, lowered)
        chosen = self.call.chosen_results if self.call else ()
        flags = chain(chosen, repeat(False))
        return tuple(
            replace(value, is_chosen=flag) if flag else value
            for value, flag in zip(values, flags, strict=False)
        )
