"""What commands have in common: words of the command line, files, and what goes to the terminal."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from xlashard.documents import parse_json
from xlashard.errors import ArgumentError, TopologyError, XlashardError
from xlashard.tpu.preflight.report.budget import Limit, broken_limits
from xlashard.tpu.preflight.report.preflight_report import PreflightReport

ALL = "--all"
"""The word by which a report shows every row."""


def quiet_start() -> None:
    """Keeps JAX from looking for chips: a preflight needs none, and must not lock those there."""
    with suppress(RuntimeError):  # JAX runs already, in a program that calls this function.
        jax.config.update("jax_platforms", "cpu")


def told(error: XlashardError) -> str:
    """What is wrong, with what to write on the command line where Python has words of its own.

    Example:
        >>> from xlashard.errors import TopologyError
        >>> told(TopologyError("that is no mesh", axes={"data": 4, "model": 2}))
        'that is no mesh: write --mesh data=4,model=2'
    """
    if not isinstance(error, TopologyError):
        return str(error)
    if error.topology:
        return f"{error.problem}: write --topology {error.topology} --slices {error.slices}"
    if error.axes is None:
        return str(error)
    words = ",".join(f"{name}={size}" for name, size in error.axes.items())
    return f"{error.problem}: write --mesh {words}"


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
            found[name] = parse_json(said)
        except ValueError:
            found[name] = said
    return found


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
        raise ArgumentError(f"{path} can't be written: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """Why a file can't be read or written.

    Args:
        error: What Python raised.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it is no text" if isinstance(error, UnicodeDecodeError) else str(error)


def judge(report: PreflightReport, limits: Sequence[Limit], *, named: bool) -> bool:
    """Says on standard error what is wrong with a program; whether nothing is.

    Args:
        report: Of the program.
        limits: That it is to keep.
        named: Whether to say which program that is.
    """
    broken = broken_limits(report, limits)
    found = [str(breach) for breach in broken]
    if not report.fits:
        found.insert(0, "it does not fit")
    about = f"{report.title} on {report.topology.name}: " if named else ""
    for text in found:
        print(f"{about}{text}", file=sys.stderr)
    return not found


@contextmanager
def saying(what: str) -> Iterator[None]:
    """Says on a terminal what takes so long.

    Args:
        what: That it does.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield
