"""``xlashard preflight``: from the words of the command line to reports and an exit code."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from xlashard.commands.targets import blamed, check_target, find_program
from xlashard.errors import ArgumentError, XlashardError
from xlashard.tpu import Topology, topology
from xlashard.tpu.preflight.api import preflight
from xlashard.tpu.preflight.budget import Limit, broken_limits, read_budget
from xlashard.tpu.preflight.comparison import compare
from xlashard.tpu.preflight.money import read_price
from xlashard.tpu.preflight.page import page
from xlashard.tpu.preflight.report import PreflightReport
from xlashard.tpu.preflight.schema import make_schema
from xlashard.tpu.preflight.summary import SummaryText


def run(arguments: argparse.Namespace) -> int:
    """Looks at programs as the command line asks.

    Args:
        arguments: The words, parsed.

    Returns:
        The exit code: 0 if each program fits and keeps its budget, 1 if not, 2 for wrong use.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    if arguments.schema:
        print(json.dumps(make_schema(), indent=2, ensure_ascii=False))
        return 0
    quiet_start()
    try:
        return _run(arguments)
    except XlashardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def quiet_start() -> None:
    """Keeps JAX from looking for chips: a preflight needs none, and must not lock those there."""
    with suppress(RuntimeError):  # JAX runs already, in a program that calls this function.
        jax.config.update("jax_platforms", "cpu")


def _run(arguments: argparse.Namespace) -> int:
    limits = read_budget(arguments.budget)
    if arguments.price is not None:
        read_price(arguments.price)
    reports = list(_reports(arguments))
    if arguments.compare and len(reports) != 2:
        raise ArgumentError(
            f"--compare takes two reports, and here are {len(reports)}: write --compare A.json "
            "B.json, or one program and two topologies, or one topology and two programs"
        )
    _show(arguments, reports)
    _keep(arguments, reports)
    judged = reports[1:] if arguments.compare else reports
    kept = [_judge(report, limits, named=len(judged) > 1) for report in judged]
    return 0 if all(kept) else 1


def _reports(arguments: argparse.Namespace) -> Iterator[PreflightReport]:
    """The reports that were asked for: read, or made for each topology and program."""
    if not arguments.targets:
        raise ArgumentError(
            "which program? Write a settings file, such as configs/tiny.toml, or "
            "package.module:function"
        )
    names = [name.strip() for name in arguments.topology.split(",") if name.strip()]
    programs = [target for target in arguments.targets if not target.endswith(".json")]
    for target in programs:
        check_target(target)
    if programs and not names:
        raise ArgumentError("for which chips? Write, for example, --topology v5p-128")
    # All of them before the first, which may take minutes.
    places = [topology(name, arguments.slices) for name in names] if programs else []
    axes = read_mesh(arguments.mesh) if arguments.mesh else None
    for target in arguments.targets:
        if target.endswith(".json"):
            yield read_report(target)
        else:
            for place in places:
                yield look(arguments, target, place, axes)


def look(
    arguments: argparse.Namespace, target: str, place: Topology, axes: Mapping[str, int] | None
) -> PreflightReport:
    """The report of one program on one topology.

    Args:
        arguments: The words, for all that is not said by the others.
        target: The program.
        place: The topology.
        axes: Of the mesh, if they were given.
    """
    with _saying(f"compiling {target} for {place}"):
        program = find_program(target, place, axes, arguments.set)
        with blamed(f"{target} can't be traced"):
            return preflight(
                program.function,
                *program.args,
                topology=place,
                mesh=program.mesh,
                workload=program.workload,
                price=arguments.price,
                compiler_options=read_options(arguments.option) or None,
                title=target,
                **program.kwargs,
            )


def read_mesh(text: str) -> dict[str, int]:
    """Mesh axes as they are written on the command line.

    Raises:
        ArgumentError: If that is none.

    Example:
        >>> read_mesh("data=8,model=4")
        {'data': 8, 'model': 4}
    """
    axes: dict[str, int] = {}
    for word in text.split(","):
        name, _, size = (part.strip() for part in word.partition("="))
        number = size.removeprefix("-")
        if not name.isidentifier() or not (number.isascii() and number.isdecimal()):
            raise ArgumentError(
                f"--mesh {text} is no list of axes and sizes ({word.strip()!r}): write --mesh "
                "data=8,model=4"
            )
        if name in axes:
            raise ArgumentError(f"--mesh {text} names the axis {name} twice")
        axes[name] = int(size)
    return axes


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """Options of the compiler as they are written on the command line.

    Raises:
        ArgumentError: If one has no value.

    Example:
        >>> read_options(["xla_a=true", "xla_b=3", "xla_c=fast"])
        {'xla_a': True, 'xla_b': 3, 'xla_c': 'fast'}
    """
    found: dict[str, Any] = {}
    for word in words:
        name, equals, said = word.removeprefix("--").partition("=")
        if not (name and equals):
            raise ArgumentError(f"--option {word} has no value: write --option {name}=true")
        try:
            found[name] = json.loads(said)
        except ValueError:
            found[name] = said
    return found


def read_report(path: str) -> PreflightReport:
    """A report that was kept.

    Raises:
        ArgumentError: If there is no such file, or something else is in it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} can't be read: {_reason(error)}") from None
    try:
        return PreflightReport.from_json(text)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is no text"


def _show(arguments: argparse.Namespace, reports: Sequence[PreflightReport]) -> None:
    """Prints what was asked for; nothing where JSON goes to standard output."""
    if arguments.json == "-":
        return
    console = Console()
    if arguments.compare:
        compare(*reports).print(all=arguments.all, console=console)
        return
    for number, report in enumerate(reports):
        if number:
            console.rule(style="dim")
        report.print(all=arguments.all, console=console)
    if len(reports) > 1:
        console.rule(style="dim")
        console.print(SummaryText(reports))


def _keep(arguments: argparse.Namespace, reports: Sequence[PreflightReport]) -> None:
    """Writes the files that were asked for."""
    if arguments.json:
        if arguments.compare:
            write(arguments.json, compare(*reports).to_json())
        elif len(reports) == 1:
            write(arguments.json, reports[0].to_json())
        else:
            _write_all(arguments.json, reports)
    if arguments.html:
        write(arguments.html, page(reports, compare(*reports) if arguments.compare else None))


def _write_all(folder: str, reports: Sequence[PreflightReport]) -> None:
    if folder == "-" or Path(folder).suffix:
        raise ArgumentError(
            f"--json {folder} is one file, and here are {len(reports)} reports: name a folder"
        )
    for report in reports:
        slices = f"{report.topology.slices}x" if report.topology.slices > 1 else ""
        name = Path(report.title.replace(":", ".")).name.removesuffix(".toml")
        chips = report.topology.name.replace(":", "-")
        write(str(Path(folder) / f"{name}.{slices}{chips}.json"), report.to_json())


def write(path: str, text: str) -> None:
    """Writes a file, or to standard output for `-`.

    Raises:
        ArgumentError: If it can't be written.
    """
    if path == "-":
        print(text)
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"{path} can't be written: {_reason(error)}") from None


def _judge(report: PreflightReport, limits: Sequence[Limit], *, named: bool) -> bool:
    """Says on standard error what is wrong with a program; whether nothing is."""
    broken = broken_limits(report, limits)
    found = [str(breach) for breach in broken]
    if not report.fits:
        found.insert(0, "it does not fit")
    about = f"{report.title} on {report.topology.name}: " if named else ""
    for text in found:
        print(f"{about}{text}", file=sys.stderr)
    return not found


@contextmanager
def _saying(what: str) -> Iterator[None]:
    """Says on a terminal what takes so long."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield
