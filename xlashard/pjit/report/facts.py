"""What a report says of a compiled program, from its executable, or from its text alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from xlashard._jax.runtime import executables
from xlashard.pjit.compile import CompiledProgram, with_user_shardings
from xlashard.pjit.lower import LoweredSignature
from xlashard.pjit.shardings.resolve import ProgramPlacement
from xlashard.program import LoweredProgram, ProgramParts
from xlashard.program.hlo.module import Frame, read_hlo
from xlashard.program.runtime.propagated_shardings import (
    ChosenInText,
    result_type,
    settled_shardings,
)


@dataclass(frozen=True, eq=False)
class CompiledFacts:
    """A program's values and what became of them.

    Attributes:
        parts: What it takes and gives.
        kept: For each argument, whether the program takes it.
        written: For each of the last results the reference that is to hold it: one that the
            function closes over, or the position of an argument.
        aliases: For each result that takes over an argument's buffers, that argument; with what
            is closed over and the tokens before them counted.
        refusals: Why donated arguments keep their buffers, by path.
        remembers: Whether it knows who decided where its results lie.
        text: The optimised HLO, given which of a stack's lines is looked at.
        executable: The executable; None where there is none.
    """

    parts: ProgramParts
    kept: tuple[bool, ...]
    written: tuple[Any, ...]
    aliases: Mapping[int, int]
    refusals: Mapping[str, str]
    remembers: bool
    text: Callable[[Callable[[Sequence[Frame]], object]], str] = field(repr=False)
    executable: Any = None

    @property
    def tokens(self) -> int:
        """How many ordering tokens come before its arguments and its results."""
        return len(self.parts.body.ordered_effects)

    @property
    def closed_over(self) -> int:
        """How many of its arguments are values that the function closes over."""
        return len(self.parts.in_avals) - sum(self.kept)


def compiled_facts(compiled: CompiledProgram) -> CompiledFacts:
    """The facts of a compiled program."""
    program, lowered = compiled.program, compiled.lowered
    return CompiledFacts(
        parts=program.parts,
        kept=compiled.kept,
        written=compiled.written,
        aliases=executables.aliases(program.executable),
        refusals={} if lowered is None else lowered.refusals(program),
        remembers=lowered is not None,
        text=program.text,
        executable=program.executable,
    )


@dataclass(frozen=True)
class HloTexts:
    """All that there is of a program that the compiler did not finish.

    Attributes:
        optimised: The optimised module.
        dealt_out: The module just before it was cut into the program of one device; empty where
            the partitioner had no say in any sharding.
    """

    optimised: str
    dealt_out: str


def facts_from_hlo(
    lowered: LoweredProgram,
    interface: LoweredSignature,
    placement: ProgramPlacement,
    text: HloTexts,
) -> CompiledFacts:
    """The facts of a program that the compiler did not finish.

    Args:
        lowered: The module that it was given.
        interface: What that takes and gives.
        placement: What was asked for.
        text: What the compiler left.

    Raises:
        CompileError: If the text doesn't say what the partitioner chose.
    """
    header = text.optimised.partition("\n")[0]
    dealt_out = next(iter(read_hlo(text.dealt_out)), None)
    chosen = ChosenInText(dealt_out, result_type(header))
    plan, tokens = lowered.plan, len(lowered.body.ordered_effects)
    ins, outs = settled_shardings(chosen, plan, tokens)
    parts = ProgramParts(
        plan=plan,
        in_shardings=ins,
        out_shardings=outs,
        in_avals=interface.in_avals,
        out_avals=interface.out_avals,
        committed=True,
        body=lowered.body,
    )
    aliases = executables.aliases_in(header)
    return CompiledFacts(
        parts=with_user_shardings(parts, placement, interface.kept_arguments),
        kept=interface.kept_arguments,
        written=interface.references,
        aliases=aliases,
        refusals=lowered.refusals_by(parts, aliases),
        remembers=True,
        text=partial(_same, text.optimised),
    )


def _same(text: str, place: object) -> str:
    return text
