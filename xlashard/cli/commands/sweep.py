"""``xlashard preflight --mesh auto``: every mesh of every topology, ranked."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from xlashard.analysis.explain.comparison import Comparison
from xlashard.analysis.report.printable import PrintableReport
from xlashard.cli.commands.option_words import read_options
from xlashard.cli.commands.result_files import (
    check_outputs,
    check_writable,
    print_reports,
    refuse,
    write_results,
)
from xlashard.cli.commands.status_line import status_line
from xlashard.cli.commands.targets import (
    check_budget,
    find_program,
    load_axes_and_text,
    read_calibration_files,
    topologies_for,
)
from xlashard.errors import ArgumentError, counted
from xlashard.predict.costs.kernel_costs import read_kernel_cost_words
from xlashard.predict.preflight.report.comparison import compare, page, read_budget
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.predict.preflight.target_loading import TargetProgram, load_function
from xlashard.predict.sweep.axis_ranges import AxisRange, parse_axes, read_axes
from xlashard.predict.sweep.evaluate import SweepRequest, evaluate_mesh, source_files
from xlashard.predict.sweep.sweep_report import SweepProgress, SweepReport
from xlashard.predict.sweep.sweep_results import ResultStore
from xlashard.predict.sweep.sweep_run import (
    Prices,
    Sweep,
    SweepRunner,
    find_topologies,
    read_prices,
    run_sweep,
)
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.workers.job_pool import default_limits

_RUNNER = "xlashard.cli.commands.sweep:run_target"
# How many of the best meshes a page shows.
_ON_A_PAGE = 3


def is_sweep(arguments: argparse.Namespace) -> bool:
    """Return whether the arguments of `xlashard preflight` specify a sweep."""
    sizes = [word.rpartition("=")[2].strip() for word in arguments.mesh.split(",")]
    return any(size == "auto" or ".." in size for size in sizes)


def check_no_sweep(arguments: argparse.Namespace) -> None:
    """Refuse options of sweeps where none is specified.

    Raises:
        ArgumentError: If there is one.
    """
    refuse(
        arguments,
        ("folder", "workers", "timeout", "again"),
        "is for meshes that are tried: leave it out, or write --mesh auto, or sizes such as "
        "--mesh data=auto,model=..8",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run a sweep.

    Args:
        arguments: The words of `xlashard preflight`, parsed.

    Returns:
        The exit code: 0 if the program fits on a mesh, whose report keeps the budget; 1 if not.

    Raises:
        XlashardError: If the words are wrong.
    """
    check_outputs(arguments)
    limits = read_budget(arguments.budget)
    prices = read_prices(_prices(arguments.price))
    sweep = _read_sweep(arguments)
    with open_runner(arguments, sweep.title) as runner:
        report = run_sweep(sweep, runner, prices)
    print_reports(arguments, _shown(arguments, report))
    best = _read_best(report, _ON_A_PAGE)
    write_results(
        arguments,
        markdown=lambda: _changes(report).to_markdown(),
        json=report.to_json,
        html=(lambda: page(best)) if best else None,
    )
    if report.best is None:
        print("it fits on none of these meshes", file=sys.stderr)
        return 1
    return 0 if check_budget(report.report(report.best), limits, named=True) else 1


@contextmanager
def open_runner(arguments: argparse.Namespace, title: str) -> Iterator[SweepRunner]:
    """Yield the runner of a sweep; while it runs, its progress is shown.

    Args:
        arguments: The words of `xlashard preflight`, parsed.
        title: Title of the sweep.

    Raises:
        ArgumentError: If the folder of its results can't be written.
    """
    folder = Path(arguments.folder or _usual_folder(title))
    check_writable(str(folder / "sweep.json"))
    limits = default_limits(arguments.workers, arguments.timeout)
    try:
        with (
            status_line(f"trying meshes for {title}", spinner=False),
            SweepProgress() as bar,
            SweepRunner(folder, limits, bar, arguments.again) as runner,
        ):
            yield runner
    except KeyboardInterrupt:
        known = ResultStore(folder).known() if folder.is_dir() else {}
        if known:
            kept = f"{counted(len(known), 'mesh', 'meshes')} kept in {folder}"
            print(f"{kept}: the same command goes on", file=sys.stderr)
        raise


def _read_sweep(arguments: argparse.Namespace) -> Sweep:
    if len(arguments.targets) != 1 or arguments.targets[0].endswith(".json"):
        raise ArgumentError(
            "a sweep takes one program: write xlashard preflight --mesh auto --topology "
            "v5e-16,v5p-16 CONFIG.toml"
        )
    refuse(arguments, ["values"], "is for one mesh: write its sizes, such as --mesh data=4")
    (title,) = arguments.targets
    places = topologies_for(title, arguments.topology, arguments.slices, arguments.set)
    own_axes = load_axes_and_text(title, arguments.set)[0] if title.endswith(".toml") else ()
    sweep = describe_sweep(arguments, title, find_topologies(places))
    return replace(sweep, axes=_axes(arguments.mesh, own_axes))


def describe_sweep(
    arguments: argparse.Namespace, title: str, places: tuple[BaseTopology, ...]
) -> Sweep:
    """Return the specification of a sweep, without its axes.

    Args:
        arguments: The words of `xlashard preflight`, parsed.
        title: The program.
        places: The topologies.

    Raises:
        XlashardError: If the words are wrong.
    """
    target: dict[str, Any] = {"name": title, "set": list(arguments.set)}
    sources: tuple[Path, ...] = ()
    if title.endswith(".toml"):
        target["settings"] = load_axes_and_text(title, arguments.set)[1]
    else:
        load_function(title)
        sources = tuple(source_files(title.partition(":")[0]))
    return Sweep(
        title=title,
        target=target,
        topologies=places,
        runner=_RUNNER,
        options=tuple(read_options(arguments.option).items()),
        estimate=arguments.estimate,
        kernel_costs=read_kernel_cost_words(arguments.kernel_cost),
        calibrations=read_calibration_files(arguments.rates, places),
        sources=sources,
    )


def _axes(text: str, own: tuple[str, ...]) -> Mapping[str, AxisRange]:
    """Return the axes to choose sizes for: those of the words, or of the settings."""
    if text.strip() != "auto":
        return parse_axes(text)
    if not own:
        raise ArgumentError(
            "--mesh auto takes the axes of a settings file; of a function write them, --mesh "
            "data=auto,model=..8"
        )
    return read_axes(dict.fromkeys(own, "auto"))


def _prices(text: str | None) -> Prices | None:
    """Parse prices: `4.2`, or `v5e=1.2,v5p=4.2` by generation."""
    if text is None or "=" not in text:
        return text
    pairs = (word.partition("=") for word in text.split(","))
    return {name.strip(): price.strip() for name, _, price in pairs}


def _usual_folder(title: str) -> str:
    name = Path(title.replace(":", ".")).name.removesuffix(".toml")
    return str(Path("sweeps") / name)


def _shown(arguments: argparse.Namespace, report: SweepReport) -> Iterator[PrintableReport]:
    yield report
    if arguments.compare:
        yield _changes(report)


def _changes(report: SweepReport) -> Comparison:
    """Return what changes from the second best mesh to the best."""
    best = _read_best(report, 2)
    if len(best) < 2:
        raise ArgumentError("--compare shows what differs between the best two meshes that fit")
    return compare(best[1], best[0])


def _read_best(report: SweepReport, count: int) -> list[PreflightReport]:
    return [report.report(result) for result in report.fitting[:count]]


def run_target(request: Mapping[str, Any]) -> dict[str, Any]:
    """Look at a program on one mesh, in a process of a sweep."""
    return evaluate_mesh(SweepRequest.from_json(request), _program)


def _program(request: SweepRequest, topology: BaseTopology) -> TargetProgram:
    words = checked_settings(request.target)
    return find_program(request.target["name"], topology, request.axes, words)


def checked_settings(target: Mapping[str, Any]) -> Sequence[str]:
    """Return the words of `--set` of a sweep's target.

    Args:
        target: The target.

    Raises:
        ArgumentError: If its settings file has changed.
    """
    name, words = target["name"], target["set"]
    if "settings" in target and load_axes_and_text(name, words)[1] != target["settings"]:
        raise ArgumentError(f"{name} has changed since the sweep began: start it again")
    return words
