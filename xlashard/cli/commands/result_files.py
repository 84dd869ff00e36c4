"""Results of commands: options checked before the work, without JAX, printing and writing."""

import argparse
import contextlib
import gzip
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlashard.config import SKIP_FILES, split_globs
from xlashard.errors import ArgumentError
from xlashard.support.consoles import make_console
from xlashard.support.documents import parse_json, read_text, write_whole

if TYPE_CHECKING:
    from xlashard.analysis.report.printable import PrintableReport

RESULTS = ("json", "html", "markdown")
"""Options that name a file of results, or - for standard output."""

OF_ONE_REPORT = ("trace", "measured", "calibrate")
"""Options of preflight that name further files of one report."""


def refuse(arguments: argparse.Namespace, names: Iterable[str], reason: str) -> None:
    """Refuse options that the other words exclude.

    Args:
        arguments: The words, parsed.
        names: The options.
        reason: Why, and what to write.

    Raises:
        ArgumentError: If one is written.
    """
    for name in names:
        value = getattr(arguments, name)
        if value:
            raise ArgumentError(f"--{name} {reason if value is True else f'{value} {reason}'}")


def check_outputs(arguments: argparse.Namespace) -> None:
    """Check the options that name files of results.

    Args:
        arguments: The words, parsed.

    Raises:
        ArgumentError: If they exclude each other, or one can't be written.
    """
    if not arguments.compare:
        refuse(arguments, ["markdown"], "writes what --compare shows: write --compare, too")
    printed = [name for name in RESULTS if getattr(arguments, name) == "-"]
    if len(printed) > 1:
        both = " and ".join(f"--{name}" for name in printed)
        raise ArgumentError(f"{both} are both -: write --{printed[0]} FILE")
    if Path(arguments.json or "").suffix not in ("", ".json", ".gz"):
        raise ArgumentError(
            f"--json {arguments.json} is no name of a JSON file: write a name that ends with "
            ".json or .json.gz"
        )
    for name in RESULTS:
        check_writable(getattr(arguments, name))


@contextlib.contextmanager
def skipped_files(globs: Sequence[str]) -> Iterator[None]:
    """Drop files from those whose lines reports show, in this process and those that it starts.

    Args:
        globs: The words of `--skip`.

    Raises:
        ArgumentError: If one is empty, or holds two.
    """
    for glob in globs:
        if split_globs(glob) != (glob,):
            raise ArgumentError(
                f"--skip {glob!r} is not one pattern: write a file, or a glob such as "
                "'layers/*.py', and --skip again for another one"
            )
    before = os.environ.get(SKIP_FILES, "")
    os.environ[SKIP_FILES] = os.pathsep.join([*split_globs(before), *globs])
    try:
        yield
    finally:
        os.environ[SKIP_FILES] = before


def write_results(arguments: argparse.Namespace, **texts: Callable[[], str] | None) -> None:
    """Write the files of results that the words request.

    Args:
        arguments: The words, parsed.
        **texts: Functions that return their texts, by option; None for one without a text.
    """
    for option, make_text in texts.items():
        path = getattr(arguments, option)
        if path and make_text is not None:
            write(path, make_text())


def check_measured(arguments: argparse.Namespace, *, is_sweep: bool) -> None:
    """Check the options of preflight for traces, profiles and measured rates.

    Args:
        arguments: The words, parsed.
        is_sweep: Whether they try every mesh.

    Raises:
        ArgumentError: If they exclude each other, or a file can't be written.
    """
    if is_sweep:
        refuse(arguments, OF_ONE_REPORT, "is of one mesh: write its axes, such as data=4")
    if not arguments.measured:
        refuse(arguments, ["calibrate"], "needs a measurement: write --measured PROFILE, too")
    if arguments.rates:
        reason = f"compares with published rates: write it without --rates {arguments.rates}"
        refuse(arguments, ["calibrate"], reason)
    check_writable(arguments.trace)
    check_writable(arguments.calibrate)


def check_results(arguments: argparse.Namespace, count: int) -> None:
    """Check the options of preflight for the results of a number of reports.

    Args:
        arguments: The words, parsed.
        count: Number of reports.

    Raises:
        ArgumentError: If an option takes another number.
    """
    if arguments.compare and count != 2:
        raise ArgumentError(
            f"--compare takes two reports, and here are {count}: write --compare A.json "
            "B.json, or one program and two topologies, or one topology and two programs"
        )
    check_single(arguments, count)


def check_single(arguments: argparse.Namespace, count: int) -> None:
    """Refuse options of one report beside another number of reports.

    Args:
        arguments: The words, parsed.
        count: Number of reports.

    Raises:
        ArgumentError: If there are several.
    """
    if count != 1:
        reason = f"is of one report, and here are {count}: write one program and one topology"
        refuse(arguments, ["trace", "measured"], reason)


def make_absolute(arguments: argparse.Namespace, *names: str) -> None:
    """Make the paths of options relative to the current folder, which a script may leave."""
    for name in names:
        path = getattr(arguments, name)
        if path not in (None, "-"):
            setattr(arguments, name, str(Path(path).absolute()))


def prints_results(arguments: argparse.Namespace) -> bool:
    """Return True if a file of results goes to standard output, in place of the tables."""
    return "-" in [getattr(arguments, name, None) for name in (*RESULTS, "trace")]


def print_reports(arguments: argparse.Namespace, reports: "Iterable[PrintableReport]") -> None:
    """Print reports below each other, unless results go to standard output.

    Args:
        arguments: The words, parsed; `all` shows every row.
        reports: The reports, each of which is made when those before it are printed.
    """
    if prints_results(arguments):
        return
    console = make_console()
    for number, report in enumerate(reports):
        if number:
            console.rule(style="dim")
        console.print(report.renderable(all=arguments.all, print_all="--all"))


@contextlib.contextmanager
def output_to_stderr(needed: bool) -> Iterator[None]:
    """Send what is written to standard output to standard error, if needed for reports."""
    if not needed:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def write(path: str, text: str) -> None:
    """Write a file, compressed for a name that ends with .gz, or to standard output for `-`.

    Raises:
        ArgumentError: If it can't be written.
    """
    if path == "-":
        print(text)
        return
    content = (text.rstrip("\n") + "\n").encode()
    write_bytes(path, gzip.compress(content) if path.endswith(".gz") else content)


def write_bytes(path: str, data: bytes) -> None:
    """Write a file, whole or not at all, and the folders around it.

    Raises:
        ArgumentError: If it can't be written.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        raise ArgumentError(f"{path} can't be written: {reason_of(error)}") from None


def check_writable(path: str | None) -> None:
    """Refuse a file that can't be written, before the work whose result it is to hold.

    Args:
        path: The file; None, or `-` for standard output, is accepted.

    Raises:
        ArgumentError: If the path is a folder, or can't be written.
    """
    if not path or path == "-":
        return
    file = Path(path)
    if file.is_dir() or path.endswith(os.sep):
        raise ArgumentError(f"{path} can't be written: it is a folder, expected a file")
    try:
        if file.is_file():
            file.open("ab").close()
        elif not file.exists():  # a pipe is not opened: its reader would see an end
            folder = next(each for each in file.absolute().parents if each.exists())
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ArgumentError(f"{path} can't be written: {reason_of(error)}") from None


def read_stored(path: str, command: str, *fields: str) -> tuple[str, Mapping[str, Any]]:
    """Return the text of a stored report, and its JSON.

    Args:
        path: The file.
        command: The command that writes such reports.
        *fields: Their fields, of which a report has one or more.

    Raises:
        ArgumentError: If the file can't be read, or is no such report.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} can't be read: {reason_of(error)}") from None
    reason = ""
    try:
        content = parse_json(text)
    except ValueError as error:
        content, reason = None, f" ({error})"
    if not (isinstance(content, dict) and "format" in content and content.keys() & set(fields)):
        raise ArgumentError(
            f"{path} is no report of {command}{reason}: write it with xlashard {command} --json "
            f"{path} ..."
        )
    return text, content


def reason_of(error: Exception) -> str:
    """Return the reason why a file can't be read or written.

    Args:
        error: The exception.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it is no text" if isinstance(error, UnicodeDecodeError) else str(error)
