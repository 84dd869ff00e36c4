"""The arguments and results of a compilation, also of one that was refused for its memory."""

from dataclasses import dataclass

from xlashard.pjit.face import Face
from xlashard.pjit.report.facts import ProgramText, facts_of, facts_of_text
from xlashard.pjit.report.parts import DonationReport, ReplicationReport, ValueReport
from xlashard.pjit.report.replication import could_be_cut, describe_replications
from xlashard.pjit.report.values import (
    Program,
    describe_donations,
    describe_inputs,
    describe_outputs,
)
from xlashard.program import read_collectives
from xlashard.tpu.preflight.compilation import Compilation

REPLICATED_ABOVE = 2**20
"""Bytes from which on a report names what every device holds whole: less is not worth a line."""


@dataclass(frozen=True)
class Values:
    """What a program takes and gives.

    Attributes:
        inputs: The arguments, and the arrays that the function closes over.
        outputs: The results.
        donations: Arguments that were donated, and those that could be.
        replications: Values that are held more often than anyone said.
        replicated: Arguments and results that every device holds whole though mesh axes could cut
            them, the largest first.
    """

    inputs: tuple[ValueReport, ...]
    outputs: tuple[ValueReport, ...]
    donations: tuple[DonationReport, ...]
    replications: tuple[ReplicationReport, ...]
    replicated: tuple[ValueReport, ...]


def describe_values(compilation: Compilation, replicated_above: int = REPLICATED_ABOVE) -> Values:
    """Says how the arguments and results of a program lie.

    Args:
        compilation: The program, which need not have been finished.
        replicated_above: From how many bytes on what every device holds whole is named.

    Raises:
        CompileError: If the compiler doesn't say how it dealt them out.
    """
    program = program_of(compilation)
    inputs, outputs = describe_inputs(program), describe_outputs(program)
    values = (*program.arguments, *program.closed_over, *program.results)
    whole = [
        report
        for value, report in zip(values, (*inputs, *outputs), strict=True)
        if report.used and report.device_bytes >= replicated_above and could_be_cut(program, value)
    ]
    collectives = read_collectives(compilation.dump.hlo)
    return Values(
        inputs=inputs,
        outputs=outputs,
        donations=describe_donations(program),
        replications=describe_replications(program, collectives, program.sources),
        replicated=tuple(sorted(whole, key=lambda r: -r.device_bytes)),
    )


def program_of(compilation: Compilation) -> Program:
    """What reports of programs are made of, with or without an executable."""
    lowered, compiled = compilation.lowered, compilation.compiled
    call = lowered._traced._call
    if compiled is not None:
        return Program(Face.of(call), facts_of(compiled._prepared), call)
    text = ProgramText(compilation.dump.hlo, compilation.dump.dealt_out)
    placement = lowered._order.placement
    facts = facts_of_text(lowered._program, lowered._interface, placement, text)
    return Program(Face.of(call), facts, call)
