"""``xlashard preflight``: from the words of the command line to reports and an exit code."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from xlashard._jax.runtime.stand_in_values import StandInRead
from xlashard._jax.trace.observed_programs import ObservedCall
from xlashard.analysis.programs.from_script import RecordedProgram
from xlashard.analysis.report.printable import SerializableReport
from xlashard.cli.commands import sweep
from xlashard.cli.commands.option_words import command_line_message, preflight_options, read_mesh
from xlashard.cli.commands.result_files import (
    OF_ONE_REPORT,
    RESULTS,
    check_measured,
    check_outputs,
    check_results,
    check_single,
    make_absolute,
    output_to_stderr,
    print_reports,
    prints_results,
    read_stored,
    refuse,
    skipped_files,
    write,
    write_results,
)
from xlashard.cli.commands.script_run import (
    ScriptRun,
    StopRule,
    check_script_options,
    matches,
    run_script,
    select,
)
from xlashard.cli.commands.status_line import status_line
from xlashard.cli.commands.targets import (
    check_budget,
    find_program,
    quiet_start,
    read_calibration_files,
    topologies_for,
)
from xlashard.errors import ArgumentError, CompileError, XlashardError, counted
from xlashard.predict.costs.kernel_costs import read_kernel_cost_words
from xlashard.predict.preflight.preflight_run import preflight
from xlashard.predict.preflight.report.comparison import (
    PreflightReports,
    UnreportedProgram,
    compare,
    compare_sets,
    read_budget,
)
from xlashard.predict.preflight.report.measured import (
    Calibration,
    calibration_text,
    compare_with_profile,
)
from xlashard.predict.preflight.report.preflight_model import REPORT_FORMAT
from xlashard.predict.preflight.report.preflight_report import PreflightReport, make_schema
from xlashard.predict.preflight.report.pricing import parse_price
from xlashard.predict.preflight.script_devices import ScriptDevices
from xlashard.predict.preflight.target_loading import check_target, user_code_errors
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.support.consoles import print_json
from xlashard.support.formatting import error_text, in_bytes, near_line, print_error
from xlashard.support.program_runner import ProgramStopped, ScriptOrModule, parse_script

_CALLS = 20
"""Calls of a program after which a script is stopped, if the command line has no limit."""


def run(arguments: argparse.Namespace) -> int:
    """Run ``xlashard preflight``.

    Args:
        arguments: The words, parsed.

    Returns:
        The exit code: 0 if each program fits and keeps its budget, 1 if not, 2 for wrong use.
    """
    if arguments.schema:
        print_json(make_schema())
        return 0
    quiet_start()
    try:
        check_script_options(arguments)
        with skipped_files(arguments.skip):
            return _choose(arguments)
    except XlashardError as error:
        print_error(command_line_message(error))
        return 2


def _choose(arguments: argparse.Namespace) -> int:
    if arguments.shardings or arguments.batch or arguments.remat:
        # The search loads SciPy.
        from xlashard.cli.commands import automatic_layouts

        return automatic_layouts.run(arguments)
    is_sweep = not arguments.script and sweep.is_sweep(arguments)
    check_measured(arguments, is_sweep=is_sweep)
    return sweep.run(arguments) if is_sweep else _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    sweep.check_no_sweep(arguments)
    check_outputs(arguments)
    limits = read_budget(arguments.budget)
    # Refused here, before a script runs for an hour.
    if arguments.price is not None:
        parse_price(arguments.price)
    read_kernel_cost_words(arguments.kernel_cost)
    has_failed, changes = False, None
    if arguments.script:
        make_absolute(arguments, *RESULTS, *OF_ONE_REPORT)
        results, has_failed = _script_reports(arguments)
    elif arguments.compare and (sets := _read_sets(arguments.targets)) is not None:
        _check_programs(arguments, ())
        check_single(arguments, sum(map(len, sets)))
        results, changes = PreflightReports(sets[1]), compare_sets(*sets)
    else:
        results = PreflightReports(tuple(_reports(arguments)))
    judged = results.reports
    try:
        if arguments.compare and changes is None and len(judged) == 2:
            changes, judged = compare(*judged), judged[1:]
        if arguments.script:
            check_results(arguments, len(results.reports))
        _show(arguments, results, changes)
    finally:
        # A script may have run for an hour: its files are written whatever failed.
        _write_files(arguments, results, changes)
    kept = [check_budget(report, limits, named=len(judged) > 1) for report in judged]
    return 1 if has_failed or results.unreported or not all(kept) else 0


def _read_sets(
    targets: Sequence[str],
) -> tuple[tuple[PreflightReport, ...], tuple[PreflightReport, ...]] | None:
    """Return the reports of two stored runs of a script; None for other targets."""
    if len(targets) != 2 or not all(target.endswith(".json") for target in targets):
        return None
    old, new = map(read_reports, targets)
    return None if len(old) == len(new) == 1 else (old, new)


def _reports(arguments: argparse.Namespace) -> list[PreflightReport]:
    """Return the reports to show: read from files, or made per topology and program."""
    if not arguments.targets:
        swallowed = [word for word in (*arguments.option, *arguments.set) if "=" not in word]
        advice = f"; write {swallowed[0]} before --option and --set" if swallowed else ""
        raise ArgumentError(
            "which program? Write a settings file, such as configs/tiny.toml, or "
            f"package.module:function{advice}"
        )
    programs = [target for target in arguments.targets if not target.endswith(".json")]
    for target in programs:
        if target.endswith(".py"):
            raise ArgumentError(f"{target} is a script: write -- python {target}")
        check_target(target)
    _check_programs(arguments, programs)
    # What can be wrong is checked before the first compilation, which may take minutes.
    selection = arguments.topology, arguments.slices, arguments.set
    places = {target: topologies_for(target, *selection) for target in programs}
    calibrations = read_calibration_files(arguments.rates, list(chain(*places.values())))
    axes = read_mesh(arguments.mesh) if arguments.mesh else None
    preflight_options(arguments)
    stored = {
        target: read_reports(target) for target in arguments.targets if target.endswith(".json")
    }
    counts = [len(places.get(target) or stored[target]) for target in arguments.targets]
    check_results(arguments, sum(counts))
    reports: list[PreflightReport] = []
    for target in arguments.targets:
        if target in stored:
            reports += stored[target]
        else:
            reports += [
                preflight_target(arguments, target, place, axes, calibrations.get(place.chip.name))
                for place in places[target]
            ]
    return reports


def _check_programs(arguments: argparse.Namespace, programs: Sequence[str]) -> None:
    """Refuse options for programs to compile where reports are read."""
    instead = "write the settings file or package.module:function that it is of"
    if not programs:
        reason = f"is for programs to predict, and {arguments.targets[0]} has its prediction"
        refuse(arguments, ["rates"], f"{reason}: {instead}")
    if len(programs) < len(arguments.targets):
        reason = "is for programs to compile, not for a stored report"
        refuse(arguments, ["values"], f"{reason}: {instead}")


def preflight_target(
    arguments: argparse.Namespace,
    target: str,
    place: BaseTopology,
    axes: Mapping[str, int] | None,
    calibration: Calibration | None = None,
) -> PreflightReport:
    """Return the report of one program on one topology.

    Args:
        arguments: Command line arguments.
        target: The program.
        place: The topology.
        axes: Mesh axis sizes, if specified.
        calibration: Measured slowdowns of the chip; None for the published rates.
    """
    with status_line(f"compiling {target} for {place}"):
        program = find_program(target, place, axes, arguments.set)
        with user_code_errors(f"{target} can't be traced"):
            return preflight(
                program.function,
                *program.args,
                topology=place,
                mesh=program.mesh,
                workload=program.workload,
                rates=calibration,
                title=target,
                **preflight_options(arguments),
                **program.kwargs,
            )


def read_reports(path: str) -> tuple[PreflightReport, ...]:
    """Read a file of one report or of several.

    Raises:
        ArgumentError: If the file is missing or invalid.
    """
    text, content = read_stored(path, "preflight", "traffic", "reports", "plan")
    try:
        if "reports" in content:
            return PreflightReports.from_json(text).reports
        if {"plan", "report"} <= content.keys():  # of `--shardings auto`
            text = json.dumps({"format": REPORT_FORMAT.version, **content["report"]})
        return (PreflightReport.from_json(text),)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None


def _show(
    arguments: argparse.Namespace,
    results: PreflightReports,
    changes: SerializableReport | None,
) -> None:
    """Print the reports, their comparison, or one beside a profile, whose rates it writes."""
    reports = results.reports
    if changes is not None:
        print_reports(arguments, [changes])
    elif arguments.measured and len(reports) == 1:
        step = compare_with_profile(reports[0], arguments.measured)
        print_reports(arguments, [step])
        if arguments.calibrate:
            chip = reports[0].topology.generation
            write(arguments.calibrate, calibration_text(step, chip))
    else:
        is_more = len(reports) > 1 or results.unreported or results.advice
        summary = [results] if is_more else []
        print_reports(arguments, [*reports, *summary])


def _write_files(
    arguments: argparse.Namespace,
    results: PreflightReports,
    changes: SerializableReport | None,
) -> None:
    """Write the requested files."""
    reports = results.reports
    is_one = len(reports) == 1 and not (results.unreported or results.advice)
    shown = changes or (reports[0] if is_one else results)
    write_results(
        arguments,
        json=shown.to_json,
        markdown=None if changes is None else changes.to_markdown,
        trace=reports[0].to_trace if len(reports) == 1 else None,
        html=partial(results.make_page, changes) if reports else None,
    )


def _script_reports(arguments: argparse.Namespace) -> tuple[PreflightReports, bool]:
    """Run a script, and return the reports of its programs.

    Args:
        arguments: The words, parsed; `script` has those after `--`.

    Returns:
        The reports, and True if the script failed.

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
    program = parse_script(arguments.script).program
    options = preflight_options(arguments)["compiler_options"] or {}
    devices = ScriptDevices(
        places[0],
        options,
        arguments.estimate,
        status_line,
        run_up_to=arguments.run,
        pattern=arguments.values,
    )
    rates = read_calibration_files(arguments.rates, places).get(places[0].chip.name)
    devices.begin()
    try:
        result = _run_on(devices, program, arguments)
    finally:
        devices.end()
    return _reports_of_script(arguments, result, devices, rates)


def _run_on(
    devices: ScriptDevices, program: ScriptOrModule, arguments: argparse.Namespace
) -> ScriptRun:
    """Run a script whose programs are compiled for a topology."""
    if devices.options:
        try:
            devices.check_options()
        except CompileError as error:
            raise ArgumentError(f"--option {' '.join(arguments.option)}: {error}") from None
    print(
        f"xlashard: {program.target} runs on {
            counted(devices.topology.num_devices, 'emulated CPU device')
        }; its programs on them are compiled for {devices.topology}. They are not run: zeros "
        "stand in for results, until the script reads a value of a program that is small enough "
        "(--run SIZE). Let it write no checkpoint over a real one.",
        file=sys.stderr,
    )

    def counts(recorded: RecordedProgram) -> bool:
        patterns = arguments.programs
        return devices.is_compiled(recorded) and (not patterns or matches(recorded.name, patterns))

    with output_to_stderr(prints_results(arguments)):
        return run_script(
            program,
            StopRule(*(arguments.stop_after or (_CALLS, None))),
            counts=counts,
            on_call=_stopping(devices.results),
        )


def _stand_in_text(read: StandInRead) -> str:
    """Return what a script read of a program that was not run, and what would run it."""
    program = read.program
    place = f" ({program.source})" if program.source else ""
    line = near_line(*read.line)
    text = f"{line} read results of {program.name}{place} that are zeros, which may stop the script"
    if read.reason:
        return f"{text}: the CPU can't run it, {read.reason}"
    # In MiB, rounded up.
    enough = -(-read.nbytes // (1 << 20))
    return (
        f"{text}: it was not run, its arguments and results have {in_bytes(read.nbytes)} on all "
        f"devices; --run {enough}MiB runs it on the CPU"
    )


def _stopping(results: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return a function that stops the script when Ctrl-C interrupts the compiler."""

    def stopping(recorded: RecordedProgram, call: ObservedCall) -> list[Any]:
        try:
            return results(recorded, call)
        except KeyboardInterrupt as error:
            raise ProgramStopped("Ctrl-C") from error

    return stopping


def _reports_of_script(
    arguments: argparse.Namespace,
    result: ScriptRun,
    devices: ScriptDevices,
    calibration: Calibration | None,
) -> tuple[PreflightReports, bool]:
    place = devices.topology
    selected = select(result, arguments.programs, arguments.min_bytes)
    spread = [p for p in selected if devices.is_compiled(p)]
    if not spread:
        names = ", ".join(sorted({p.name for p in selected}))
        raise ArgumentError(
            f"{result.title} has no program for {place}: {names} ran on one device. Make the mesh "
            "of jax.devices(), and put the arguments on it"
        )
    price = None if arguments.price is None else parse_price(arguments.price)
    costs = read_kernel_cost_words(arguments.kernel_cost)
    reports: dict[RecordedProgram, PreflightReport] = {}
    unreported = []
    for program in spread:
        try:
            reports[program] = devices.report(program, price, costs, calibration)
        except Exception as error:
            facts = program.name, program.source, program.caller, error_text(error)
            unreported.append(UnreportedProgram(*facts))
            if prints_results(arguments):
                print_error(f"{program.name} ({program.source or program.caller}): {facts[-1]}")
    if result.outcome != "finished":
        print(f"xlashard: {result.title} {result.outcome}: {result.why}", file=sys.stderr)
    for read in devices.values.reads:
        print(f"xlashard: {_stand_in_text(read)}", file=sys.stderr)
    left = len(result.programs) - len(spread)
    if left:
        print(f"xlashard: {counted(left, 'other program')} ran on the CPU", file=sys.stderr)
    shown, advice = tuple(reports.values()), ()
    if reports and not arguments.estimate:
        shown, advice = devices.try_advice(reports, costs, calibration)
    results = PreflightReports(tuple(shown), tuple(unreported), tuple(advice))
    return results, result.outcome == "failed"
