"""Excerpts of the user's source files, which reports keep for their pages."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from textwrap import dedent

from xlashard.analysis.programs.source_lines import SourceLine
from xlashard.support.tracebacks import is_users_file

_AROUND = 2
"""Lines before and after the line of an excerpt."""
_LONGEST_LINE = 120
_LARGEST_FILE = 2**20


@dataclass(frozen=True)
class Excerpt:
    """Lines around a line of a source file, as they were when the report was made.

    Attributes:
        file: Path of the file.
        line: The line, from 1 on.
        text: The lines with their numbers, an arrow before the line.
    """

    file: str
    line: int
    text: str


def list_places(source: SourceLine) -> Sequence[tuple[str, int]]:
    """Return the places of which a page has excerpts: a line, and that of its caller."""
    return [(frame.file, frame.line) for frame in (source, *source.callers[:1])]


def read_excerpts(sources: Iterable[SourceLine | None]) -> tuple[Excerpt, ...]:
    """Return excerpts of lines and of their callers, each once, as far as files can be read.

    Reports are passed on: only Python files are read, those in the working folder and others that
    are no installed package's.
    """
    places = dict.fromkeys(place for source in sources if source for place in list_places(source))
    excerpts = [Excerpt(*place, _read_text(*place)) for place in places]
    return tuple(excerpt for excerpt in excerpts if excerpt.text)


def _read_text(file: str, line: int) -> str:
    """Return the lines around a line; empty if the file can't be read, or lacks the line."""
    try:
        path = Path(file).resolve()
        is_of_user = path.is_relative_to(Path.cwd()) or is_users_file(str(path))
        status = path.stat()
        if path.suffix != ".py" or not is_of_user or status.st_size > _LARGEST_FILE:
            return ""
        lines = _read_lines(path, status.st_mtime_ns)
    except (OSError, ValueError):
        return ""
    if not 1 <= line <= len(lines):
        return ""
    first = max(1, line - _AROUND)
    shown = dedent("\n".join(lines[first - 1 : line + _AROUND]).expandtabs()).split("\n")
    return "\n".join(
        f"{'→' if number == line else ' '}{number:>5}  {text[:_LONGEST_LINE]}"
        for number, text in enumerate(shown, first)
    )


@lru_cache(maxsize=16)
def _read_lines(path: Path, modified: int) -> list[str]:
    # The time of the last change makes a changed file another one.
    return path.read_text(encoding="utf-8").splitlines()
