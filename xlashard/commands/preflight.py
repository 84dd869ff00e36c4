"""``xlashard preflight``: from the words of the command line to reports and an exit code."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from xlashard.commands import sweep
from xlashard.commands.common import (
    ALL,
    check_budget,
    check_writable,
    command_line_message,
    find_program,
    quiet_start,
    read_mesh,
    read_options,
    reason_of,
    status_line,
    topologies_for,
    write,
)
from xlashard.commands.preflight_script import script_reports
from xlashard.commands.script_run import check_outputs
from xlashard.documents import read_text
from xlashard.errors import ArgumentError, XlashardError
from xlashard.tpu import Topology
from xlashard.tpu.preflight.preflight_run import preflight
from xlashard.tpu.preflight.render.html import page
from xlashard.tpu.preflight.render.terminal_report import SummaryText
from xlashard.tpu.preflight.report.budget import read_budget
from xlashard.tpu.preflight.report.comparison import compare
from xlashard.tpu.preflight.report.preflight_report import PreflightReport, make_schema
from xlashard.tpu.preflight.report.pricing import parse_price
from xlashard.tpu.preflight.target_loading import check_target, user_code_errors
from xlashard.wording import print_error


def run(arguments: argparse.Namespace) -> int:
    """Run ``xlashard preflight``.

    Args:
        arguments: The words, parsed.

    Returns:
        The exit code: 0 if each program fits and keeps its budget, 1 if not, 2 for wrong use.
    """
    if arguments.schema:
        print(json.dumps(make_schema(), indent=2, ensure_ascii=False))
        return 0
    quiet_start()
    try:
        is_sweep = not arguments.script and sweep.is_sweep(arguments)
        return sweep.run(arguments) if is_sweep else _run(arguments)
    except XlashardError as error:
        print_error(command_line_message(error))
        return 2


def _run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    limits = read_budget(arguments.budget)
    if arguments.price is not None:
        parse_price(arguments.price)
    failed = 0
    if arguments.script:
        reports, failed = script_reports(arguments)
        _check_results(arguments, len(reports))
    else:
        reports = _reports(arguments)
    _show(arguments, reports)
    _write_files(arguments, reports)
    judged = reports[1:] if arguments.compare else reports
    kept = [check_budget(report, limits, named=len(judged) > 1) for report in judged]
    return 1 if failed or not all(kept) else 0


def _reports(arguments: argparse.Namespace) -> list[PreflightReport]:
    """Return the reports to show: read from files, or made per topology and program."""
    if not arguments.targets:
        raise ArgumentError(
            "which program? Write a settings file, such as configs/tiny.toml, or "
            "package.module:function"
        )
    programs = [target for target in arguments.targets if not target.endswith(".json")]
    for target in programs:
        if target.endswith(".py"):
            raise ArgumentError(f"{target} is a script: write -- python {target}")
        check_target(target)
    # What can be wrong is checked before the first compilation, which may take minutes.
    selection = arguments.topology, arguments.slices, arguments.set
    places = {target: topologies_for(target, *selection) for target in programs}
    axes = read_mesh(arguments.mesh) if arguments.mesh else None
    read_options(arguments.option)
    stored = {
        target: read_report(target) for target in arguments.targets if target.endswith(".json")
    }
    _check_results(arguments, sum(len(places.get(target, "1")) for target in arguments.targets))
    reports: list[PreflightReport] = []
    for target in arguments.targets:
        if target in stored:
            reports.append(stored[target])
        else:
            reports += [
                preflight_target(arguments, target, place, axes) for place in places[target]
            ]
    return reports


def _check_results(arguments: argparse.Namespace, count: int) -> None:
    """Check the arguments for the results of a number of reports."""
    if arguments.compare and count != 2:
        raise ArgumentError(
            f"--compare takes two reports, and here are {count}: write --compare A.json "
            "B.json, or one program and two topologies, or one topology and two programs"
        )
    file = arguments.json
    if file and count > 1 and not arguments.compare:
        if file == "-" or Path(file).suffix:
            raise ArgumentError(
                f"--json {file} is one file, and here are {count} reports: name a folder"
            )
        file = str(Path(file) / "report.json")
    check_writable(file)
    check_writable(arguments.html)


def preflight_target(
    arguments: argparse.Namespace, target: str, place: Topology, axes: Mapping[str, int] | None
) -> PreflightReport:
    """Return the report of one program on one topology.

    Args:
        arguments: Command line arguments.
        target: The program.
        place: The topology.
        axes: Mesh axis sizes, if specified.
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
                price=arguments.price,
                compiler_options=read_options(arguments.option) or None,
                estimate=arguments.estimate,
                title=target,
                **program.kwargs,
            )


def read_report(path: str) -> PreflightReport:
    """Read a stored report.

    Raises:
        ArgumentError: If the file is missing or invalid.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} can't be read: {reason_of(error)}") from None
    try:
        return PreflightReport.from_json(text)
    except ArgumentError as error:
        if '"traffic"' not in text:
            raise ArgumentError(
                f"{path} is not a preflight report: write it with xlashard preflight --json {path}"
            ) from None
        raise ArgumentError(f"{path}: {error}") from None


def _show(arguments: argparse.Namespace, reports: Sequence[PreflightReport]) -> None:
    """Print the reports, unless JSON goes to standard output."""
    if "-" in (arguments.json, arguments.markdown):
        return
    console = Console()
    if arguments.compare:
        console.print(compare(*reports).renderable(all=arguments.all, print_all=ALL))
        return
    for number, report in enumerate(reports):
        if number:
            console.rule(style="dim")
        console.print(report.renderable(all=arguments.all, print_all=ALL))
    if len(reports) > 1:
        console.rule(style="dim")
        console.print(SummaryText(reports))


def _write_files(arguments: argparse.Namespace, reports: Sequence[PreflightReport]) -> None:
    """Write the requested files."""
    if arguments.json:
        if arguments.compare:
            write(arguments.json, compare(*reports).to_json())
        elif len(reports) == 1:
            write(arguments.json, reports[0].to_json())
        else:
            _write_all(arguments.json, reports)
    if arguments.markdown:
        write(arguments.markdown, compare(*reports).to_markdown())
    if arguments.html:
        write(arguments.html, page(reports, compare(*reports) if arguments.compare else None))


def _write_all(folder: str, reports: Sequence[PreflightReport]) -> None:
    for report in reports:
        slices = f"{report.topology.slices}x" if report.topology.slices > 1 else ""
        name = Path(report.title.replace(":", ".")).name.removesuffix(".toml")
        chips = report.topology.name.replace(":", "-")
        write(str(Path(folder) / f"{name}.{slices}{chips}.json"), report.to_json())
