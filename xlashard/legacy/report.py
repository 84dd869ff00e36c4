"""What a program uses of the era, for people and for other programs."""

import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from xlashard.errors import counted
from xlashard.legacy.uses import Use

_NOTHING = "no name of 2022 or 2023 ran: today's JAX runs this program as it is"
_INSTALLED = tuple({sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib", "stdlib")})


def show_report(uses: Sequence[Use], to: TextIO) -> None:
    """Writes which names ran, where, and what to write today.

    Args:
        uses: What ran.
        to: Where to write it: in colours on a terminal, elsewhere lines of plain text.
    """
    if not to.isatty():
        to.write(text_of(uses))
    elif not uses:
        Console(file=to).print(_NOTHING)
    else:
        Console(file=to, highlight=False).print(*_coloured(uses), sep="\n")


def text_of(uses: Sequence[Use]) -> str:
    """The report as plain text: each name with what to write, and its lines below it.

    Args:
        uses: What ran.
    """
    if not uses:
        return f"{_NOTHING}\n"
    lines = [_title(uses)]
    for entry, of_name in _by_name(uses):
        lines.append(f"{entry.name} (until JAX {entry.gone}); today: {entry.today}")
        if entry.note:
            lines.append(f"  {entry.treatment}: {entry.note}")
        lines += [f"  {_place(use)}{_times(use)}" for use in of_name]
    return "\n".join(lines) + "\n"


def json_of(uses: Sequence[Use]) -> str:
    """The report for programs: `{"uses": [{"name", "gone", "treatment", "today", ...}]}`.

    Args:
        uses: What ran.
    """
    names = [
        {
            "name": entry.name,
            "gone": entry.gone,
            "treatment": entry.treatment,
            "today": entry.today,
            "note": entry.note,
            "count": sum(use.count for use in of_name),
            "lines": [
                {
                    "file": use.file,
                    "line": use.line,
                    "count": use.count,
                    "installed": _is_installed(use),
                }
                for use in of_name
            ],
        }
        for entry, of_name in _by_name(uses)
    ]
    return json.dumps({"uses": names}, indent=1) + "\n"


def _by_name(uses: Sequence[Use]) -> Iterator[tuple[Any, list[Use]]]:
    """Names with their lines: those of the program before those of installed packages."""
    ordered = sorted(uses, key=lambda use: (use.entry.name, _is_installed(use), use.file, use.line))
    for _, group in groupby(ordered, key=lambda use: use.entry.name):
        of_name = list(group)
        yield of_name[0].entry, of_name


def _title(uses: Sequence[Use]) -> str:
    names = len({use.entry.name for use in uses})
    lines = len({(use.file, use.line) for use in uses})
    return f"{counted(names, 'name')} of 2022 and 2023 ran, at {counted(lines, 'line')}"


def _coloured(uses: Sequence[Use]) -> Iterator[RenderableType]:
    """The report for a terminal of any width: nothing stands beside anything else."""
    yield Text(_title(uses), "italic")
    for entry, of_name in _by_name(uses):
        yield Text.assemble("\n", (entry.name, "bold"), (f"  until JAX {entry.gone}", "dim"))
        yield _indented(Text.assemble("today  ", (entry.today, "green")))
        if entry.note:
            yield _indented(Text(f"{entry.treatment}: {entry.note}", "dim"))
        for use in of_name:
            yield _indented(Text(f"{_place(use)}{_times(use)}"))


def _indented(text: Text) -> Padding:
    """Also the lines that follow where the terminal is too narrow for one."""
    return Padding(text, (0, 0, 0, 2), expand=False)


def _is_installed(use: Use) -> bool:
    return use.file.startswith(_INSTALLED)


def _place(use: Use) -> str:
    """File and line, as short as a person needs it to find them."""
    folders = [folder for folder in _INSTALLED if use.file.startswith(folder)]
    if folders:
        return f"{use.file.removeprefix(max(folders, key=len))}:{use.line}"
    near = os.path.relpath(use.file)
    return f"{use.file if near.startswith(os.pardir) else near}:{use.line}"


def _times(use: Use) -> str:
    return "" if use.count == 1 else f" ×{use.count}"
