"""Excerpts of the user's source files, for pages."""

from functools import lru_cache
from pathlib import Path
from textwrap import dedent

from xlashard.support.tracebacks import is_users_file

_AROUND = 2
"""Lines before and after the line of an excerpt."""
_LONGEST_LINE = 120
_LARGEST_FILE = 2**20


def read_excerpt(file: str, line: int) -> str:
    """Return the lines around a line, with their numbers, as the file has them now.

    A stored report may name any file, and pages are passed on: only Python files are read, those
    in the working folder and others that are no installed package's.

    Args:
        file: Path of the file.
        line: The line, from 1 on.

    Returns:
        The lines; empty if the file can't be read, is too large, or lacks the line.
    """
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
