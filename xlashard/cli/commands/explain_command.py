"""``xlashard explain``: reports of a function, or of the programs that a script compiles."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import xlashard
from xlashard.cli.commands.result_files import (
    RESULTS,
    check_outputs,
    make_absolute,
    output_to_stderr,
    print_reports,
    prints_results,
    read_stored,
    refuse,
    skipped_files,
    write_results,
)
from xlashard.cli.commands.script_run import (
    StopRule,
    check_script_options,
    matches,
    run_script,
    select,
)
from xlashard.cli.commands.status_line import status_line
from xlashard.config import read_flags
from xlashard.errors import ArgumentError, XlashardError, XlashardWarning
from xlashard.support.consoles import print_json
from xlashard.support.formatting import print_error
from xlashard.support.lazily import deferred
from xlashard.support.program_runner import parse_script

if TYPE_CHECKING:
    from xlashard._jax.runtime import stand_in_values
    from xlashard._jax.trace.observed_programs import ObservedCall
    from xlashard.analysis.explain import comparison, script_report
    from xlashard.analysis.explain.program_report import ProgramReport
    from xlashard.analysis.programs import from_script
    from xlashard.analysis.programs.from_script import RecordedProgram
    from xlashard.cli.commands import targets
else:
    # A script imports JAX itself, after it has set the variables that JAX reads.
    targets = deferred("xlashard.cli.commands.targets")
    from_script = deferred("xlashard.analysis.programs.from_script")
    stand_in_values = deferred("xlashard._jax.runtime.stand_in_values")
    comparison = deferred("xlashard.analysis.explain.comparison")
    script_report = deferred("xlashard.analysis.explain.script_report")


def run(arguments: argparse.Namespace) -> int:
    """Run ``xlashard explain``.

    Args:
        arguments: The words, parsed; `script` has those after `--`.

    Returns:
        The exit code: 0; 1 if the script failed, or a program can't be explained, misses its budget
        or became worse; 2 for wrong use.
    """
    if arguments.schema:
        print_json(script_report.ScriptReport.json_schema())
        return 0
    try:
        _check(arguments)
        make_absolute(arguments, *RESULTS, "compare")
        with skipped_files(arguments.skip):
            return _run_script(arguments) if arguments.script else _run_target(arguments)
    except XlashardError as error:
        print_error(error)
        return 2


def _check(arguments: argparse.Namespace) -> None:
    """Check the words as far as that is possible without JAX, before a script runs."""
    read_flags(os.environ)
    if arguments.budget:  # NumPy, which the script may want to set up before it is imported
        comparison.read_program_budget(arguments.budget)
    target = arguments.target or ""
    if not (target or arguments.script):
        raise ArgumentError("which program? Write package.module:function, or -- python train.py")
    if target and arguments.script:
        raise ArgumentError(f"{target} and the script after -- are two programs: write one")
    if target.endswith(".py"):
        raise ArgumentError(f"{target} is a script: write xlashard explain -- python {target}")
    if target.endswith(".toml"):
        raise ArgumentError(
            f"{target} is a settings file: write xlashard preflight --topology v5p-128 {target}"
        )
    if target and ":" not in target and not target.endswith(".json"):
        raise ArgumentError(
            f"{target!r} is not a program: write package.module:function, the REPORT.json of an "
            "earlier explain, or -- python SCRIPT.py"
        )
    if arguments.script or target.endswith(".json"):
        what = "a stored report has its mesh" if target else "a script makes its own mesh"
        refuse(arguments, ["mesh"], f"is for package.module:function: {what}")
    if target.endswith(".json"):
        reason = f"is for a program, and {target} is a stored report: write package.module:function"
        refuse(arguments, ["values"], f"{reason}, or -- python SCRIPT.py")
    check_script_options(arguments)
    check_outputs(arguments)
    if arguments.compare:
        read_stored(arguments.compare, *_STORED)


def _run_script(arguments: argparse.Namespace) -> int:
    program = parse_script(arguments.script).program
    with output_to_stderr(prints_results(arguments)):
        rule = StopRule(*(arguments.stop_after or ()))
        counts = _counter(arguments.programs)
        result = run_script(program, rule, counts, _run_or_stand_in)
    if not result.programs:
        print_error(f"{result.title} {result.described} and compiled no program")
        return 1
    selected = select(result, arguments.programs, arguments.min_bytes)
    explained = []
    with warnings.catch_warnings():
        # The script has warned, and the reports have what the compilation here would warn of.
        warnings.simplefilter("ignore", XlashardWarning)
        for each in selected:
            with status_line(f"compiling {each.name} for its report"):
                explained.append(script_report.explain_recorded(each, arguments.values))
    report = script_report.ScriptReport(
        script=result.title,
        outcome=result.outcome,
        why=result.why,
        programs=tuple(explained),
        omitted=script_report.summarize_omitted([p for p in result.programs if p not in selected]),
    )
    is_kept = _finish(arguments, report)
    failed = any(p.error for p in explained) or result.outcome == "failed"
    return 1 if failed or not is_kept else 0


def _run_or_stand_in(recorded: "RecordedProgram", call: "ObservedCall") -> list[Any]:
    """Run a program; zeros stand in for results of kernels of other devices."""
    return from_script.run_or_stand_in(stand_in_values.StandInValues(), recorded, call)


def _counter(patterns: Sequence[str]) -> "Callable[[RecordedProgram], bool]":
    """Return which programs count for `--stop-after`."""
    return lambda p: matches(p.name, patterns) if patterns else not p.is_operation


def _run_target(arguments: argparse.Namespace) -> int:
    if arguments.target.endswith(".json"):
        report = _read(arguments.target)
    else:
        _ = xlashard.Array  # Runs the body of the package, which waits in a command line.
        report = targets.explain_target(arguments.target, arguments.mesh, arguments.values)
    return 0 if _finish(arguments, report) else 1


def _finish(arguments: argparse.Namespace, report: Any) -> bool:
    """Show a report, write its files, and check it.

    Args:
        arguments: The words, parsed.
        report: A `ScriptReport` or `ProgramReport`.

    Returns:
        Whether every program meets its budget, and none became worse.

    Raises:
        ArgumentError: If the report to compare with is invalid, or a file can't be written. The
            report is shown before.
    """
    named = script_report.named_programs(report)
    changes, shown = None, report
    try:
        if arguments.compare:
            old = _selected(_read(arguments.compare), arguments.programs)
            changes = shown = script_report.compare_scripts(old, report)
        broken = _breaches(arguments.budget, dict(named))
    finally:
        # A script may have run for an hour.
        _write(arguments, report, changes)
        print_reports(arguments, [shown])
    worse = [] if changes is None else [f"worse: {line}" for line in changes.regressions]
    for line in (*worse, *broken):
        print(line, file=sys.stderr)
    return not (worse or broken)


def _selected(report: Any, patterns: Sequence[str]) -> Any:
    """Return a stored report with the programs that `--programs` selects."""
    if not patterns or not hasattr(report, "programs"):
        return report
    kept = tuple(p for p in report.programs if matches(p.name, patterns))
    return replace(report, programs=kept)


def _breaches(budget: Sequence[str], named: "Mapping[str, ProgramReport]") -> list[str]:
    """Return a text for each limit that a program exceeds."""
    limits = comparison.read_program_budget(budget)
    return [
        f"{name}: {breach}"
        for name, report in named.items()
        for breach in comparison.find_breaches(report, limits, comparison.PROGRAM_KEYS)
    ]


def _write(arguments: argparse.Namespace, report: Any, changes: Any) -> None:
    """Write the requested files."""
    is_explained = bool(script_report.named_programs(report))
    write_results(
        arguments,
        json=report.to_json,
        markdown=None if changes is None else changes.to_markdown,
        html=partial(report.make_page, changes) if is_explained else None,
    )


def _read(path: str) -> Any:
    """Return a stored report: a `ScriptReport` or `ProgramReport`."""
    text, content = read_stored(path, *_STORED)
    is_script = "programs" in content
    kind = script_report.ScriptReport if is_script else script_report.ProgramReport
    try:
        return kind.from_json(text)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None


_STORED = ("explain", "programs", "collectives")
"""The command, and the fields of its reports of a script and of a program."""
