"""Report of the removed names that a program uses, as text and as JSON."""

import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from xlashard.errors import counted
from xlashard.legacy.recorder import Use
from xlashard.support.formatting import near_line

_NOTHING = "no removed names were used: today's JAX runs this program unchanged"
_APART = "in installed packages, not counted: their newer releases use today's names"
_INSTALLED = tuple({sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib", "stdlib")})


@dataclass(frozen=True)
class Report:
    """Uses of names that a program must replace.

    Attributes:
        own: Uses in the program's own files.
        installed: Uses in installed packages.
        failure: What ended the program early, such as `KeyError`; empty if it ran to its end.
    """

    own: Sequence[Use]
    installed: Sequence[Use]
    failure: str = ""

    @classmethod
    def of(cls, uses: Sequence[Use], folder: str = "", failure: str = "") -> "Report":
        """Sort the uses of a run.

        Args:
            uses: The recorded uses.
            folder: The program's folder; its files are the program's own even if installed.
            failure: What ended the program early.
        """
        removed = [use for use in uses if not use.entry.stays]
        own = (folder.rstrip(os.sep) + os.sep,) if folder else ()
        installed = {use for use in removed if use.file.startswith(_INSTALLED)}
        apart = {use for use in installed if not use.file.startswith(own)}
        inside = [use for use in removed if use not in apart]
        return cls(inside, [use for use in removed if use in apart], failure)


def show_report(report: Report, to: TextIO) -> None:
    """Print a report: names, lines and today's code.

    Args:
        report: The sorted uses.
        to: The stream; a terminal gets colours, other streams plain text.
    """
    if not to.isatty():
        to.write(text_of(report))
    else:
        Console(file=to, highlight=False).print(*_coloured(report), sep="\n")


def text_of(report: Report) -> str:
    """Return the report as plain text: each name with today's code, and its lines.

    Args:
        report: The sorted uses.
    """
    lines = [_title(report), *_lines(report.own)]
    if report.installed:
        lines += [_APART, *_lines(report.installed)]
    return "\n".join(lines) + "\n"


def _lines(uses: Sequence[Use]) -> Iterator[str]:
    for entry, of_name in _by_name(uses):
        until = f" (until {entry.library} {entry.gone})" if entry.gone else ""
        yield f"{entry.name}{until}; today: {entry.today}"
        if entry.note:
            yield f"  {entry.treatment}: {entry.note}"
        yield from (f"  {_place(use)}{_times(use)}" for use in of_name)


def json_of(report: Report) -> str:
    """Return the report as JSON: `{"uses": [{"name", ...}], "installed": [...], "failure": ""}`.

    Args:
        report: The sorted uses.
    """
    parts = {"uses": _records(report.own), "installed": _records(report.installed)}
    return json.dumps({**parts, "failure": report.failure}, indent=1) + "\n"


def _records(uses: Sequence[Use]) -> list[dict[str, Any]]:
    return [
        {
            "name": entry.name,
            "library": entry.library,
            "gone": entry.gone,
            "treatment": entry.treatment,
            "today": entry.today,
            "note": entry.note,
            "count": sum(use.count for use in of_name),
            "lines": [{"file": use.file, "line": use.line, "count": use.count} for use in of_name],
        }
        for entry, of_name in _by_name(uses)
    ]


def _by_name(uses: Sequence[Use]) -> Iterator[tuple[Any, list[Use]]]:
    ordered = sorted(uses, key=lambda use: (use.entry.name, use.file, use.line))
    for _, group in groupby(ordered, key=lambda use: use.entry.name):
        of_name = list(group)
        yield of_name[0].entry, of_name


def _title(report: Report) -> str:
    names = len({use.entry.name for use in report.own})
    lines = len({(use.file, use.line) for use in report.own})
    used = f"{counted(names, 'removed name')} used, at {counted(lines, 'line')}"
    if report.failure:
        used = used if report.own else "no removed names were used"
        return f"{used}, before {report.failure} ended the program"
    return used if report.own else _NOTHING


def _coloured(report: Report) -> Iterator[RenderableType]:
    """Return the report for a terminal of any width, without columns."""
    yield Text(_title(report), "italic")
    yield from _coloured_lines(report.own)
    if report.installed:
        yield Text(f"\n{_APART}", "italic")
        yield from _coloured_lines(report.installed)


def _coloured_lines(uses: Sequence[Use]) -> Iterator[RenderableType]:
    for entry, of_name in _by_name(uses):
        until = f"  until {entry.library} {entry.gone}" if entry.gone else ""
        yield Text.assemble("\n", (entry.name, "bold"), (until, "dim"))
        yield _indented(Text.assemble("today  ", (entry.today, "green")))
        if entry.note:
            yield _indented(Text(f"{entry.treatment}: {entry.note}", "dim"))
        for use in of_name:
            yield _indented(Text(f"{_place(use)}{_times(use)}"))


def _indented(text: Text) -> Padding:
    """Indent a text, including its wrapped lines."""
    return Padding(text, (0, 0, 0, 2), expand=False)


def _place(use: Use) -> str:
    """Return file and line, relative to the working directory or to site-packages."""
    folders = [folder for folder in _INSTALLED if use.file.startswith(folder)]
    if folders:
        return f"{use.file.removeprefix(max(folders, key=len))}:{use.line}"
    return near_line(use.file, use.line)


def _times(use: Use) -> str:
    return "" if use.count == 1 else f" ×{use.count}"
