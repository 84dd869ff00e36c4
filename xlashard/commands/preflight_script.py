"""``xlashard preflight --topology T -- python train.py``: a script's programs on TPU chips."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from xlashard.commands.common import read_options, status_line, topologies_for
from xlashard.commands.script_run import (
    ScriptRun,
    StopRule,
    matches,
    output_to_stderr,
    run_script,
    select,
)
from xlashard.commands.script_words import change_interpreter, parse_script
from xlashard.errors import ArgumentError, XlashardError, counted
from xlashard.pjit import RecordedProgram
from xlashard.program_runner import ProgramStopped
from xlashard.tpu.preflight.report.preflight_report import PreflightReport
from xlashard.tpu.preflight.report.pricing import parse_price
from xlashard.tpu.preflight.script_devices import ScriptDevices
from xlashard.wording import print_error

_CALLS = 20
"""Calls of a program after which a script is stopped, if the command line has no limit."""


def script_reports(arguments: argparse.Namespace) -> tuple[list[PreflightReport], int]:
    """Run a script, and return the reports of its programs.

    Args:
        arguments: The words, parsed; `script` has those after `--`.

    Returns:
        The reports, and the number of programs and scripts that failed.

    Raises:
        XlashardError: If the words are wrong, or the script has no program for the topology.
    """
    for word, value in (("--mesh", arguments.mesh), ("--set", arguments.set)):
        if value or arguments.targets:
            what = arguments.targets[0] if arguments.targets else word
            raise ArgumentError(
                f"{what} is invalid together with a script after --: the script makes its own mesh "
                "and settings"
            )
    places = topologies_for("", arguments.topology, arguments.slices, ())
    if len(places) > 1:
        raise ArgumentError(
            f"--topology {arguments.topology} names {len(places)} topologies, but a script runs "
            f"for one: write --topology {places[0].name}"
        )
    script = parse_script(arguments.script)
    change_interpreter(script, arguments.command_line, arguments.script)
    options = read_options(arguments.option)
    devices = ScriptDevices(places[0], options, arguments.estimate, status_line)
    devices.begin()
    print(
        f"xlashard: {script.program.target} runs on {
            counted(places[0].num_devices, 'emulated CPU device')
        }; its programs on them are compiled for {places[0]} and not run: their results "
        "are zeros. Let it write no checkpoint over a real one.",
        file=sys.stderr,
    )
    rule = StopRule(*(arguments.stop_after or (_CALLS, None)))
    try:
        with output_to_stderr("-" in (arguments.json, arguments.markdown)):
            result = run_script(
                script.program,
                rule,
                counts=_counter(arguments, devices.is_compiled),
                on_call=_stopping(devices.results),
            )
    finally:
        devices.end()
    return _reports(arguments, result, devices)


def _counter(
    arguments: argparse.Namespace, is_compiled: Callable[[RecordedProgram], bool]
) -> Callable[[RecordedProgram], bool]:
    patterns = arguments.programs
    return lambda p: is_compiled(p) and (not patterns or matches(p.name, patterns))


def _stopping(results: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return a function that stops the script where a program can't be compiled."""

    def stopping(recorded: RecordedProgram, *call: Any) -> list[Any]:
        try:
            return results(recorded, *call)
        except KeyboardInterrupt as error:
            raise ProgramStopped("Ctrl-C") from error
        except XlashardError as error:
            raise ProgramStopped(f"{recorded.name} can't be compiled: {error}") from error

    return stopping


def _reports(
    arguments: argparse.Namespace, result: ScriptRun, devices: ScriptDevices
) -> tuple[list[PreflightReport], int]:
    place = devices.topology
    selected = [p for p in select(result, arguments.programs, arguments.min_bytes)]
    spread = [p for p in selected if devices.is_compiled(p)]
    if not spread:
        names = ", ".join(sorted({p.name for p in selected}))
        raise ArgumentError(
            f"{result.title} has no program for {place}: {names} ran on one device. Make the mesh "
            "of jax.devices(), and put the arguments on it"
        )
    price = None if arguments.price is None else parse_price(arguments.price)
    reports, failed = [], int(result.outcome == "failed")
    for program in spread:
        try:
            reports.append(devices.report(program, price))
        except XlashardError as error:
            print_error(f"{program.name} ({program.source}): {error}")
            failed += 1
    if result.outcome != "finished":
        print(f"xlashard: {result.title} {result.outcome}: {result.why}", file=sys.stderr)
    left = len(result.programs) - len(spread)
    if left:
        print(f"xlashard: {counted(left, 'other program')} ran on the CPU", file=sys.stderr)
    return reports, failed
