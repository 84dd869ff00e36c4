"""Lines of a module, with their source locations in Python."""

import linecache
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from xlashard.lazily import dataclass

_LOCATION = re.compile(r' ?\bloc\((#loc\d*|unknown|"(?:[^"\\]|\\.)*"[:\d to]*)\)')
_NAMED = re.compile(r"(#loc\d*) = loc\((.*)\)")
_IN_FILE = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+):\d+')
_NAMED_IN_FILE = re.compile(r'^#loc\d* = loc\("((?:[^"\\]|\\.)*)":(\d+):\d+', re.MULTILINE)
_WITH_NAME = re.compile(r'"((?:[^"\\]|\\.)*)"\((#loc\d*)\)')
_CONSTANT = re.compile(r"\s*(%\w+) = stablehlo\.constant\b")
_REFERENCE = re.compile(r"#loc\d*")

# Lines of a diff before the first difference, and from it on.
_BEFORE, _FROM = 2, 6
# Lines to search for the use of a constant.
_SEARCHED = 1000
# Characters of a line in a diff.
_WIDTH = 150


@dataclass(frozen=True)
class SourcePlace:
    """Source location of an operation.

    Attributes:
        file: The file.
        line: The number of the line.
        function: The function.
    """

    file: str
    line: int
    function: str

    @property
    def key(self) -> str:
        """Return file and line: `train.py:12`."""
        return f"{self.file}:{self.line}"


class Listing:
    """A module as text.

    Args:
        text: MLIR text with its locations.
    """

    def __init__(self, text: str) -> None:
        self.lines: list[str] = []
        self._locations: list[str] = []
        self._named: dict[str, str] = {}
        for line in text.splitlines():
            named = _NAMED.fullmatch(line) if line.startswith("#loc") else None
            if named is not None:
                self._named[named[1]] = named[2]
                continue
            locations = _LOCATION.findall(line) if "loc(" in line else ()
            self.lines.append(_LOCATION.sub("", line) if locations else line)
            self._locations.append(locations[-1] if locations else "")

    def place(self, number: int) -> SourcePlace | None:
        """Return the source location of a line, or of the next line with a location."""
        number = self._use_of_constant(number)
        for location in self._locations[number : number + _FROM]:
            place = self._place(location, "")
            if place is not None:
                return place
        return None

    def _use_of_constant(self, number: int) -> int:
        """Return the line that uses a constant, which has no location of its own."""
        constant = _CONSTANT.match(self.lines[number]) if number < len(self.lines) else None
        if constant is None:
            return number
        use = re.compile(rf"{re.escape(constant[1])}(?![\w#])")
        following = range(number + 1, min(number + _SEARCHED, len(self.lines)))
        return next((n for n in following if use.search(self.lines[n])), number)

    def _place(self, location: str, function: str) -> SourcePlace | None:
        """Return the innermost place of a location, and the function that it is in."""
        for _ in range(len(self._named) + 1):
            text = self._named.get(location, location)
            in_file = _IN_FILE.match(text)
            if in_file is not None:
                # The file name of a text without a file.
                place = SourcePlace(in_file[1], int(in_file[2]), function)
                return None if in_file[1] == "-" else place
            with_name = _WITH_NAME.fullmatch(text)
            if with_name is not None:
                function = with_name[1]
            # The location of a call begins with that of the callee.
            inner = _REFERENCE.search(text) if text != location else None
            if inner is None:
                return None
            location = inner[0]
        return None


def source_lines(text: str) -> dict[str, str]:
    """Return the lines of Python that a module names, by file and line number."""
    lines = {}
    files: dict[str, list[str]] = {}
    for match in _NAMED_IN_FILE.finditer(text):
        file, number = match[1], int(match[2])
        if file not in files:
            files[file] = linecache.getlines(file)
        if 0 < number <= len(files[file]):
            lines[f"{file}:{number}"] = files[file][number - 1].strip()
    return lines


def first_difference(one: Sequence[str], other: Sequence[str]) -> int | None:
    """Return the number of the first line in which two texts differ."""
    pairs = enumerate(zip_longest(one, other))
    return next((number for number, (a, b) in pairs if a != b), None)


def small_diff(one: Sequence[str], other: Sequence[str], number: int) -> list[str]:
    """Return a short diff at the first line that differs: `-` lines of one, `+` of the other.

    Args:
        one: Lines of a text.
        other: Lines of another.
        number: The first in which they differ.
    """
    start = max(number - _BEFORE, 0)
    again = _meeting_again(one, other, number)
    stops = [number + _FROM] * 2 if again is None else list(again)
    shown = [f"  {_cut(line, 0)}" for line in one[start:number]]
    column = _first_column(one, other, number)
    for mark, lines, stop in (("-", one, stops[0]), ("+", other, stops[1])):
        part = lines[number : min(stop, number + _FROM)]
        shown += [f"{mark} {_cut(line, column)}" for line in part]
    if again is not None and again[0] < len(one):
        shown.append(f"  {_cut(one[again[0]], 0)}")
    return shown


def _meeting_again(one: Sequence[str], other: Sequence[str], number: int) -> tuple[int, int] | None:
    """Return the next equal lines of two texts, soon after the first difference."""
    ahead = range(number, number + _FROM + 1)
    pairs = ((i, j) for i in ahead for j in ahead if i < len(one) and j < len(other))
    same = (pair for pair in pairs if one[pair[0]] == other[pair[1]])
    return min(same, key=sum, default=None)


def _first_column(one: Sequence[str], other: Sequence[str], number: int) -> int:
    if number >= len(one) or number >= len(other):
        return 0
    return first_difference(one[number], other[number]) or 0


def _cut(line: str, column: int) -> str:
    """Return the part of a line around a column."""
    if len(line) <= _WIDTH:
        return line
    first = max(0, min(column - _WIDTH // 2, len(line) - _WIDTH))
    part = line[first : first + _WIDTH]
    return ("…" if first else "") + part + ("…" if first + _WIDTH < len(line) else "")


def place_text(place: SourcePlace | None, code: Mapping[str, str]) -> str:
    """Return the text of a source location: `train.py:12 in step: y = x * 2`."""
    if place is None:
        return "unknown source line"
    function = f" in {place.function}" if place.function else ""
    line = code.get(place.key, "")
    return f"{place.key}{function}" + (f": {line}" if line else "")
