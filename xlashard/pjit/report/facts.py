"""Facts about a compiled program, from its executable or from its HLO alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xlashard._jax.runtime import executables
from xlashard.pjit.compile import CompiledProgram, with_user_shardings
from xlashard.pjit.lower import LoweredSignature
from xlashard.pjit.shardings.resolve import ProgramPlacement
from xlashard.program.compile import LoweredProgram
from xlashard.program.executables import (
    HloShardings,
    resolve_shardings,
    result_type,
)
from xlashard.program.execute import ProgramParts
from xlashard.program.hlo.collectives import read_hlo
from xlashard.program.hlo.module import Frame


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
        text: Returns the optimised HLO, given the function that picks a line of a stack.
        executable: The executable, if there is one.
    """

    parts: ProgramParts
    kept: tuple[bool, ...]
    written: tuple[Any, ...]
    aliases: Mapping[int, int]
    refusals: Mapping[str, str]
    has_requests: bool
    text: Callable[[Callable[[Sequence[Frame]], object]], str] = field(repr=False)
    executable: Any = None

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
        text=program.text,
        executable=program.executable,
    )


def facts_from_hlo(
    lowered: LoweredProgram,
    signature: LoweredSignature,
    placement: ProgramPlacement,
    hlo: str,
    partitioned: str,
) -> CompiledFacts:
    """Return the facts of a program that the compiler rejected.

    Args:
        lowered: The lowered module.
        signature: Its inputs and outputs.
        placement: The requested shardings.
        hlo: The optimised HLO.
        partitioned: The HLO with propagated shardings, before it became the program of one device;
            empty if nothing was left to the partitioner.

    Raises:
        CompileError: If the HLO does not contain the propagated shardings.
    """
    header = hlo.partition("\n")[0]
    chosen = HloShardings(next(iter(read_hlo(partitioned)), None), result_type(header))
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
    aliases = executables.aliases_in(header)
    return CompiledFacts(
        parts=with_user_shardings(parts, placement, signature.kept_arguments),
        kept=signature.kept_arguments,
        written=signature.references,
        aliases=aliases,
        refusals=lowered.refusals_by(parts, aliases),
        has_requests=True,
        text=lambda _: hlo,
    )
