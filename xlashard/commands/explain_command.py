"""``xlashard explain``: reports of a function, or of the programs that a script compiles."""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xlashard
from xlashard.commands.script_run import StopRule, matches, output_to_stderr, run_script, select
from xlashard.commands.script_words import change_interpreter, parse_script
from xlashard.errors import ArgumentError, XlashardError
from xlashard.wording import print_error

if TYPE_CHECKING:
    from xlashard.pjit import RecordedProgram


def run(arguments: argparse.Namespace) -> int:
    """Run ``xlashard explain``.

    Args:
        arguments: The words, parsed; `script` has those after `--`.

    Returns:
        The exit code: 0; 1 if the script failed, or a program can't be explained or exceeds the
        budget; 2 for wrong use.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        if bool(arguments.target) == bool(arguments.script):
            raise ArgumentError(
                "which program? Write package.module:function, or -- python train.py"
            )
        # Relative to the folder of the command, which the script may leave.
        for name in ("json", "html"):
            file = getattr(arguments, name)
            if file not in (None, "-"):
                setattr(arguments, name, str(Path(file).absolute()))
        return _run_script(arguments) if arguments.script else _run_target(arguments)
    except XlashardError as error:
        print_error(error)
        return 2


def _run_script(arguments: argparse.Namespace) -> int:
    script = parse_script(arguments.script)
    change_interpreter(script, arguments.words, arguments.script)
    matches("", arguments.programs)
    with output_to_stderr(arguments.json == "-"):
        rule = StopRule(*(arguments.stop_after or ()))
        result = run_script(script.program, rule, _counter(arguments.programs))
    if not result.programs:
        print_error(f"{result.title} {result.outcome} without compiling a program {result.why}")
        return 1
    selected = select(result, arguments.programs, arguments.min_bytes)
    module = importlib.import_module("xlashard.pjit.report.script_report")
    status_line = importlib.import_module("xlashard.commands.common").status_line
    explained = []
    for program in selected:
        with status_line(f"compiling {program.name} for its report"):
            explained.append(module.explain_recorded(program))
    report = module.ScriptReport(
        script=result.title,
        outcome=result.outcome,
        why=result.why,
        programs=tuple(explained),
        omitted=module.summarize_omitted([p for p in result.programs if p not in selected]),
    )
    named = [(p.name, p.report) for p in explained if p.report is not None]
    is_kept = _show(arguments, report, named)
    return 1 if not is_kept or any(p.error for p in explained) or result.outcome == "failed" else 0


def _counter(patterns: Sequence[str]) -> "Callable[[RecordedProgram], bool]":
    """Return which programs count for `--stop-after`."""
    return lambda p: matches(p.name, patterns) if patterns else not p.is_operation


def _run_target(arguments: argparse.Namespace) -> int:
    _ = xlashard.Array  # Runs the body of the package, which waits in a command line.
    common = importlib.import_module("xlashard.commands.common")
    report = common.explain_target(arguments.target, arguments.mesh)
    return 0 if _show(arguments, report, [(report.name, report)]) else 1


def _show(arguments: argparse.Namespace, report: Any, programs: Sequence[tuple[str, Any]]) -> bool:
    """Print and write the report, and return True if all programs keep the budget."""
    limits = importlib.import_module("xlashard.pjit.report.limits")
    budget = limits.parse_limits(arguments.budget, limits.PROGRAM_KEYS)
    common = importlib.import_module("xlashard.commands.common")
    if arguments.json:
        common.write(arguments.json, report.to_json())
    if arguments.json != "-":
        console = importlib.import_module("rich.console").Console()
        console.print(report.renderable(all=arguments.all, print_all=common.ALL))
    if arguments.html and programs:
        page = importlib.import_module("xlashard.pjit.report.html.report_page")
        names, reports = zip(*programs, strict=True)
        common.write(arguments.html, page.program_page(reports, names=names))
    is_kept = True
    for name, program in programs:
        for breach in limits.find_breaches(program, budget, limits.PROGRAM_KEYS):
            is_kept = False
            print(f"{name}: {breach}", file=sys.stderr)
    return is_kept
