"""Facts about a compiled program, from its executable or from its HLO alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xlashard._jax.runtime import executables
from xlashard.hlo.hlo_program import HloProgram, read_modules
from xlashard.hlo.module import Frame
from xlashard.pjit.compile import CompiledProgram, with_user_shardings
from xlashard.pjit.lower import LoweredSignature
from xlashard.pjit.shardings.resolve import ProgramPlacement
from xlashard.program.compile import LoweredProgram
from xlashard.program.executables import (
    HloShardings,
    resolve_shardings,
)
from xlashard.program.execute import ProgramParts


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
    """

    parts: ProgramParts
    kept: tuple[bool, ...]
    written: tuple[Any, ...]
    aliases: Mapping[int, int]
    refusals: Mapping[str, str]
    has_requests: bool
    modules: Callable[[Callable[[Sequence[Frame]], object]], tuple[HloProgram, ...]] = field(
        repr=False
    )
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
        modules=lambda place: read_modules(program.executable_with_lines(place)),
        executable=program.executable,
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
