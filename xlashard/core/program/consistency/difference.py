"""Differences between two programs, the most informative first."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter

from xlashard.core.program.consistency.fingerprint import ProgramDescription, ValueDescription
from xlashard.errors import counted
from xlashard.hlo.module import Frame
from xlashard.support.lazily import dataclass

_LOCATION = re.compile(r' ?\bloc\((#loc\d*|unknown|"(?:[^"\\]|\\.)*"[:\d to]*)\)')
_NAMED = re.compile(r"(#loc\d*) = loc\((.*)\)")
_IN_FILE = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+):\d+')
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
class Difference:
    """A difference, and advice.

    Attributes:
        kind: Kind of the difference.
        title: The difference, as a sentence.
        one: Value of the first process.
        other: Value of the other process.
        fix: Advice.
        lines: Diff of the two modules.
    """

    kind: str
    title: str
    one: str
    other: str
    fix: str
    lines: tuple[str, ...] = ()


type Look = Callable[[ProgramDescription, ProgramDescription], Difference | None]
"""Comparison of one property of two programs."""


def find_difference(one: ProgramDescription, other: ProgramDescription) -> Difference:
    """Return the most informative difference of two programs."""
    results = (look(one, other) for look in _LOOKS)
    return next(difference for difference in results if difference is not None)


def environment_difference(one: Mapping[str, str], other: Mapping[str, str]) -> Difference | None:
    """Return the first version or variable that differs between two processes."""
    for name in dict.fromkeys((*one, *other)):
        texts = [variables.get(name, "") for variables in (one, other)]
        if texts[0] == texts[1]:
            continue
        if name.isupper():
            shown = [_only(a, b) for a, b in (texts, texts[::-1])]
            title = f"The environment variable {name} is not the same:"
            fix = f"start all processes with the same {name}"
            return Difference("flags", title, shown[0], shown[1], fix)
        fix = "install the same versions on every machine of the pod"
        shown = [f"{name} {text}" for text in texts]
        return Difference("version", f"The versions of {name} are not the same:", *shown, fix=fix)
    return None


def _only(flags: str, others: str) -> str:
    left = [flag for flag in flags.split() if flag not in others.split()]
    return " ".join(left) or "nothing more"


def _of_programs(
    kind: str, title: str, text: Callable[[ProgramDescription], str], fix: str
) -> Look:
    """Return the comparison of a text about the program."""

    def look(one: ProgramDescription, other: ProgramDescription) -> Difference | None:
        first, second = text(one), text(other)
        return None if first == second else Difference(kind, title, first, second, fix)

    return look


def _of_values(kind: str, title: str, text: Callable[[ValueDescription], str], fix: str) -> Look:
    """Return the comparison of a text about each argument and result, which the title names."""

    def look(one: ProgramDescription, other: ProgramDescription) -> Difference | None:
        for path, *pair in _values(one, other):
            first, second = map(text, pair)
            if first != second:
                return Difference(kind, title.format(path), first, second, fix)
        return None

    return look


def _types(one: ProgramDescription, other: ProgramDescription) -> Difference | None:
    fix = (
        "call it with arrays of one global shape and dtype in every process; a process's own part "
        "of the data becomes one by xlashard.make_array_from_process_local_data"
    )
    for number, pair in enumerate(zip(one.arguments, other.arguments, strict=False)):
        if pair[0].type != pair[1].type:
            path = _path(pair[0], number)
            title = f"The argument {path} is not of one type:"
            return Difference("argument", title, pair[0].type, pair[1].type, fix)
    counts = [len(story.arguments) for story in (one, other)]
    if counts[0] == counts[1]:
        return None
    longer = max(one.arguments, other.arguments, key=len)
    number = min(counts)
    title = f"It takes more arguments in one of them, the first of which is {
        _path(longer[number], number)
    }:"
    texts = [counted(count, "argument") for count in counts]
    return Difference("argument", title, texts[0], texts[1], fix)


def _path(value: ValueDescription, number: int) -> str:
    return value.path or f"{number} (an array that the function closes over)"


def _values(
    one: ProgramDescription, other: ProgramDescription
) -> Iterator[tuple[str, ValueDescription, ValueDescription]]:
    for number, (first, second) in enumerate(zip(one.arguments, other.arguments, strict=True)):
        yield f"the argument {_path(first, number)}", first, second
    for number, (first, second) in enumerate(zip(one.results, other.results, strict=False)):
        yield first.path or f"the result {number}", first, second


def _settings(one: ProgramDescription, other: ProgramDescription) -> Difference | None:
    for name in sorted({*one.settings, *other.settings}):
        texts = [story.settings.get(name, "not given") for story in (one, other)]
        if texts[0] != texts[1]:
            return Difference(
                "option",
                f"The setting {name!r} is not the same:",
                texts[0],
                texts[1],
                "compile it under the same settings in every process",
            )
    return None


def _closed(one: ProgramDescription, other: ProgramDescription) -> Difference | None:
    for first, second in zip(one.closed, other.closed, strict=False):
        if first != second:
            return Difference(
                "closed over",
                f"Its values are not the same: {first[0]}",
                *(f"{kind}, of the digest {digest[:12]}" for _, kind, digest in (first, second)),
                fix="compute or read it alike in every process (the same seed, the same file), or "
                "send one process's by xlashard.multihost.broadcast_one_to_all",
            )
    return None


def _operations(one: ProgramDescription, other: ProgramDescription) -> Difference | None:
    if not one.text or not other.text:
        return None
    first, second = Listing(one.text), Listing(other.text)
    number = first_difference(first.lines, second.lines)
    if number is None:
        return None
    return Difference(
        "operation",
        f"The first operation that differs, in line {number + 1} of the module:",
        place_text(first.place(number), one.code),
        place_text(second.place(number), other.code),
        "let nothing that differs between processes (jax.process_index(), the time, a random "
        "number of Python or NumPy, the order of a set) reach the traced function; what must "
        "differ goes in as data",
        tuple(small_diff(first.lines, second.lines, number)),
    )


def _unknown(one: ProgramDescription, other: ProgramDescription) -> Difference:
    if not one.text or not other.text:
        return Difference(
            "module",
            "They were compiled of other modules:",
            *(
                f"{story.name}, " + ("compiled here" if story.text else "from a file")
                for story in (one, other)
            ),
            fix="load the same file in every process",
        )
    return Difference(
        "module",
        "Their digests differ, and their texts don't:",
        f"{len(one.text)} characters of StableHLO",
        f"{len(other.text)} characters of StableHLO",
        "compare them by lower(...).as_text(debug_info=True)",
    )


_LOOKS: Sequence[Look] = (
    _of_programs(
        "order",
        "They are at different functions:",
        attrgetter("name"),
        "call the same functions in the same order in every process; look for a call under an `if` "
        "on jax.process_index(), or in a loop that is longer in some processes",
    ),
    _types,
    _of_values(
        "sharding",
        "The sharding of {} is not the same:",
        attrgetter("sharding"),
        "give the same in_shardings and out_shardings, on the same mesh, in every process, and "
        "place the arguments alike",
    ),
    _of_programs(
        "devices",
        "The devices, or their order, are not the same:",
        attrgetter("devices"),
        "make the mesh of the same devices in the same order in every process, for example of "
        "jax.devices(), never of jax.local_devices()",
    ),
    _settings,
    _of_values(
        "donation",
        "Donation, layout or memory of {} is not the same:",
        lambda value: value.rest or "nothing",
        "donate the same arguments, and ask for the same layouts, in every process",
    ),
    _closed,
    _of_programs(
        "callback",
        "It calls other Python functions:",
        lambda program: ", ".join(program.callbacks) or "none",
        "let it call the same Python functions in every process",
    ),
    _operations,
    _unknown,
)


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

    def place(self, number: int) -> Frame | None:
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

    def _place(self, location: str, function: str) -> Frame | None:
        """Return the innermost place of a location, and the function that it is in."""
        for _ in range(len(self._named) + 1):
            text = self._named.get(location, location)
            in_file = _IN_FILE.match(text)
            if in_file is not None:
                # The file name of a text without a file.
                place = Frame(in_file[1], int(in_file[2]), function)
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


def place_text(place: Frame | None, code: Mapping[str, str]) -> str:
    """Return the text of a source location: `train.py:12 in step: y = x * 2`."""
    if place is None:
        return "unknown source line"
    at = f"{place.file}:{place.line}"
    function = f" in {place.function}" if place.function else ""
    line = code.get(at, "")
    return f"{at}{function}" + (f": {line}" if line else "")
