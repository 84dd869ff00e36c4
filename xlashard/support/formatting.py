"""Amounts, limits, types, processes and how they ended, as people read and write them."""

import difflib
import io
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO

from xlashard.errors import ArgumentError, XlashardError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult


# Control characters but for line ends and tabs, marks that reverse the order of what follows, and
# the surrogates by which Python keeps bytes of a file name that are no UTF-8.
_UNPRINTABLE = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Return text for a terminal or a log, in which control characters are Python's escapes.

    Example:
        >>> print(printable("run " + chr(27) + "[31mred"))
        run \x1b[31mred
    """
    return re.sub(_UNPRINTABLE, lambda match: match[0].encode("unicode_escape").decode(), text)


_IN_ASCII = {
    **dict.fromkeys(map(chr, range(0x2500, 0x2580)), "+"),  # box drawings
    **dict.fromkeys("─━╌╍┄┅┈┉╴╶╸╺╼╾", "-"),
    **dict.fromkeys("│┃╎╏┆┇┊┋╵╷╹╻╽╿", "|"),
    **dict.fromkeys(map(chr, range(0x2580, 0x2591)), "#"),  # blocks
    **dict.fromkeys("░▒▓", "."),
    **dict.fromkeys(map(chr, range(0x2800, 0x2900)), "*"),  # spinners
    **dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹", (f"^{digit}" for digit in range(10)), strict=True)),
    **{"–": "-", "—": "-", "−": "-", "×": "x", "·": "-", "•": "*", "…": "...", "µ": "u"},
    **{"μ": "u", "π": "pi", "→": "->", "←": "<-", "▶": ">", "✓": "+", "✗": "x", "�": "."},
    **{"≤": "<=", "≥": ">=", "≠": "!=", "≈": "~", "±": "+-", "“": '"', "”": '"', "’": "'"},
}


def in_ascii(text: str) -> str:
    r"""Return a text in ASCII, with Python's escapes for letters of names.

    Example:
        >>> print(in_ascii("2 × größe → 1 µs"))
        2 x gr\xf6\xdfe -> 1 us
    """
    if text.isascii():
        return text
    replaced = "".join(_IN_ASCII.get(letter, letter) for letter in text)
    return replaced.encode("ascii", "backslashreplace").decode("ascii")


class Escaped:
    """Renderable of rich, printed with Python's escapes in place of control characters.

    Names in a report come from programs and files, which may hold anything. Lines end without the
    spaces that fill the last column, and are in ASCII where the output is.

    Args:
        shown: The renderable.
    """

    def __init__(self, shown: "RenderableType") -> None:
        self._shown = shown

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.segment import Segment  # takes long to import, and few need it

        for line in Segment.split_lines(console.render(self._shown, options)):
            while line and not line[-1].text.strip(" ") and not line[-1].control:
                line.pop()
            for number, (text, style, control) in enumerate(line, 1):
                text = printable(text.rstrip(" ") if number == len(line) else text)
                yield Segment(in_ascii(text) if options.ascii_only else text, style, control)
            yield Segment.line()


def print_error(error: object) -> None:
    """Print an error of a command to standard error, printable."""
    print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)


def error_text(error: Exception) -> str:
    """Return the message of an error of this package; of another one, its class before it."""
    return str(error) if isinstance(error, XlashardError) else f"{type(error).__name__}: {error}"


def plain_text(shown: "RenderableType", width: int | None = None) -> str:
    """Return what rich prints without colours, in the given width.

    By default it is for standard output: of the terminal's width, and in ASCII where the output is.
    """
    from rich.console import Console  # takes long to import, and few need it

    is_ascii = width is None and not encodes_all(sys.stdout)
    width = width or shutil.get_terminal_size((100, 24)).columns
    # In a notebook, a console of Jupyter would display an empty block besides.
    console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
    with console.capture() as printed:
        console.print(shown)
    text = "\n".join(line.rstrip() for line in printed.get().rstrip().splitlines())
    return in_ascii(text) if is_ascii else text


def encodes_all(stream: TextIO) -> bool:
    """Return True if a stream takes every character, as one in UTF-8 does."""
    encoding = getattr(stream, "encoding", None)
    return encoding is None or encoding.lower().startswith("utf")


def elided(text: str, most: int) -> str:
    """Return a text of at most some characters: a longer one ends with an ellipsis.

    Example:
        >>> elided("sharding", 6)
        'shard…'
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"


def in_bytes(count: float) -> str:
    """Format a number of bytes: `3.3 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def in_flop(count: float) -> str:
    """Format a number of floating-point operations: `1.8 GFLOP`."""
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "FLOP" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PFLOP"


def in_seconds(seconds: float) -> str:
    """Format a time: `71.6 ms`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.{2 if unit == 's' and seconds < 10 else 1}f} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0 s"


def in_amount(count: float) -> str:
    """Format a number of things: `181,000`, `8.03 billion`."""
    for word, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.2f} {word}"
    return f"{count:,.0f}" if count >= 100 or count == int(count) else f"{count:.3g}"


def in_percent(share: float) -> str:
    """Format a share of one: `42.7%`."""
    return f"{share:.1%}" if share < 9.995 else f"{share:,.0%}"


def signed(formatter: Callable[[float], str]) -> Callable[[float], str]:
    """Return a formatter of changes, which have a sign.

    Example:
        >>> signed(in_bytes)(3 * 2**20), signed(in_seconds)(-0.5)
        ('+3.0 MiB', '-500.0 ms')
    """

    def format_change(change: float) -> str:
        sign = "+" if change > 0 else "-" * (change < 0)
        return f"{sign}{formatter(abs(change))}"

    return format_change


type Unit = Literal["bytes", "seconds", "flop", "part", "number"]
"""Unit of an amount."""

FORMATTERS: Mapping[Unit, Callable[[float], str]] = {
    "bytes": in_bytes,
    "seconds": in_seconds,
    "flop": in_flop,
    "part": in_percent,
    "number": in_amount,
}
"""Formatter of each unit."""

_UNITS: dict[Unit, dict[str, float]] = {
    "bytes": {
        "b": 1,
        **{f"{p}{b}": 1000**i for i, p in enumerate("kmgt", 1) for b in ("", "b")},
        **{f"{p}i{b}": 1024**i for i, p in enumerate("kmgt", 1) for b in ("", "b")},
    },
    "seconds": {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60},
    "part": {"%": 0.01},
    "flop": {"flop": 1, **{f"{p}flop": 1000**i for i, p in enumerate("kmgtp", 1)}},
    "number": {},
}
_EXAMPLES = {"bytes": "2GB", "seconds": "250ms", "part": "90%", "flop": "3PFLOP", "number": "100"}


class Limit(NamedTuple):
    """Limit of one figure.

    Attributes:
        key: Key: `all_gather_bytes`.
        quantity: Unit of the value.
        value: The limit.
        text: Text as entered: `all_gather_bytes=2GB`.
    """

    key: str
    quantity: Unit
    value: float
    text: str


def parse_limits(words: Iterable[str], units: Mapping[str, Sequence[Unit]]) -> tuple[Limit, ...]:
    """Parse limits.

    Args:
        words: Each `KEY=VALUE`: `memory=80GiB`, `all_gather_bytes=2GB`, `time=250ms`. GB are 10⁹
            bytes, GiB 2³⁰.
        units: The units of the limits of each figure, by its key.

    Raises:
        ArgumentError: If a key or value is invalid.
    """
    return tuple(_limit(word, units) for word in words)


def _limit(word: str, units: Mapping[str, Sequence[Unit]]) -> Limit:
    name, equals, text = word.partition("=")
    name = name.strip().replace("-", "_")
    if not equals:
        first = next(iter(units))
        raise ArgumentError(
            f"budget {word!r} has no value: write KEY=VALUE, such as "
            f"{first}={_EXAMPLES[units[first][0]]} or all_gather_bytes=2GB; a program goes before "
            "the budget"
        )
    if name not in units:
        near = difflib.get_close_matches(name, units, n=2, cutoff=0.5)
        known = ", ".join(units)
        meant = f"; did you mean {' or '.join(near)}?" if near else f": the keys are {known}"
        raise ArgumentError(f"budget {word!r} has an unknown key{meant}")
    for unit in units[name]:
        # A number alone would be ambiguous beside a percentage, or as a time.
        is_clear = len(units[name]) == 1 and unit not in ("seconds", "part")
        value = parse_amount(text, unit, plain=is_clear)
        if value is not None:
            return Limit(name, unit, value, word)
    examples = " or ".join(f"{name}={_EXAMPLES[unit]}" for unit in units[name])
    raise ArgumentError(f"budget {word!r} has the invalid value {text!r}: write {examples}")


def parse_amount(text: str, unit: Unit, *, plain: bool) -> float | None:
    """Return the amount of a text such as `1.5GiB` or `250ms`; None for another one.

    Args:
        text: The text.
        unit: Unit of the amount.
        plain: Whether a number without a unit is accepted: bytes, seconds, FLOP.

    Example:
        >>> parse_amount("250ms", "seconds", plain=False), parse_amount("2", "bytes", plain=True)
        (0.25, 2.0)
    """
    match = re.fullmatch(
        r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zµ%]*)\s*",
        text.lower().replace("\N{GREEK SMALL LETTER MU}", "µ"),
    )
    if match is None:
        return None
    factor = _UNITS[unit].get(match[2]) if match[2] else 1.0 if plain else None
    try:
        value = float(match[1])
    except ValueError:
        return None
    amount = math.inf if factor is None else value * factor
    return amount if math.isfinite(amount) else None


def numbered(numbers: Iterable[tuple[str, int]]) -> str:
    """Format names with their numbers.

    Example:
        >>> numbered([("opcode frobnicate", 2), ("line", 1)])
        'opcode frobnicate ×2, line'
    """
    return ", ".join(f"{name} ×{n:,}" if n > 1 else name for name, n in numbers)


_LONGEST = 60
_PLAIN = int | float | complex | str | bytes | tuple | list | None


def shortened(text: str, most: int = _LONGEST) -> str:
    """Return a text of at most some characters, with `...` in place of the end of a longer one."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def brief(value: object) -> str:
    """Return an invalid value for an error: its code, shortened, or the name of its type.

    Example:
        >>> brief([2, 3.5]), brief(object())
        ('[2, 3.5]', 'object')
    """
    return shortened(repr(value)) if isinstance(value, _PLAIN) else type(value).__name__


def shape_text(shape: Iterable[int]) -> str:
    """Format sizes: `[8,16]`."""
    return f"[{','.join(map(str, shape))}]"


def typed(dtype: object, shape: Iterable[int]) -> str:
    """Format a type by the name of its dtype and its shape: `float32[8,16]`."""
    return f"{dtype}{shape_text(shape)}"


def signal_name(number: int) -> str:
    """Return the name of a signal: `SIGKILL` for 9, `signal 40` for one without a name.

    Python names no real-time signals but the first and the last.
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_text(code: int) -> str:
    """Describe an exit code, or the negative number of a signal: `killed by SIGKILL`."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that a misspelt one may stand for; None if none resembles it.

    Example:
        >>> closest("proceses", ["processes", "devices"])
        'processes'
    """
    matches = difflib.get_close_matches(word, list(known), n=1)
    return matches[0] if matches else None


def error_line(error: BaseException, *plain: type[BaseException]) -> str:
    """Return an error in one line: its class, and the first line of its message.

    Args:
        error: The error.
        plain: Classes whose messages are shown without the class.

    Example:
        >>> error_line(KeyError("a")), error_line(ValueError()), error_line(OSError("b"), OSError)
        ("KeyError: 'a'", 'ValueError', 'b')
    """
    name = type(error).__name__
    lines = str(error).strip().splitlines()
    if not lines:
        return name
    return lines[0] if isinstance(error, plain) else f"{name}: {lines[0]}"


def format_axes(sizes: Mapping[str, int]) -> str:
    """Format the axes of a mesh: `x=4, y=2`."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


CELL = "cell "
"""Start of the name of a notebook's cell."""


def name_file(file: str) -> str:
    """Return `cell 3` for the code of a notebook's cell, by the number in its `In [3]`.

    Jupyter compiles a cell as a temporary file, and IPython under a name of its own.

    Args:
        file: The file of a frame; others than those of cells are returned unchanged.
    """
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    named = None if shell is None else shell.compile.format_code_name(file)
    number = None if named is None else re.fullmatch(r"In\[(\d+)\]", named[1])
    return file if number is None else f"{CELL}{number[1]}"


def near_line(file: str, line: object) -> str:
    """Return a line of a file, relative to the working directory if it is inside: `train.py:41`.

    Example:
        >>> near_line("cell 1", 8)
        'cell 1, line 8'
    """
    file = name_file(file)
    if file.startswith(CELL):
        return f"{file}, line {line}"
    try:
        near = os.path.relpath(file) if os.path.isabs(file) else file
    except FileNotFoundError:  # The working directory was removed.
        near = file
    return f"{file if near.startswith(os.pardir) else near}:{line}"


def sizes_text(sizes: Iterable[tuple[str, int]]) -> str:
    """Format mesh axes with their sizes.

    Example:
        >>> sizes_text([("data", 4), ("model", 1)])
        'data=4 × model=1'
        >>> sizes_text([("pod", 1), ("data", 4), ("stage", 1), ("model", 2)])
        'data=4 × model=2 and 2 axes of size 1'
    """
    shown, rest = fold_axes(list(sizes), lambda axis: axis[1])
    return " × ".join(f"{name}={size}" for name, size in shown) + rest


def fold_axes[T](axes: Sequence[T], size: Callable[[T], int]) -> tuple[Sequence[T], str]:
    """Return the mesh axes to show, and a text that counts the others, if several are of size 1."""
    longer = [axis for axis in axes if size(axis) > 1]
    left = len(axes) - len(longer)
    if left < 2:
        return axes, ""
    return longer, f"{' and ' if longer else ''}{left} axes of size 1"


_PROCESSES_SHOWN = 8


def format_processes(processes: Sequence[int]) -> str:
    """Return `process 3`, `processes 1, 2` or `processes 0 to 63`; long lists are truncated."""
    noun = "process" if len(processes) == 1 else "processes"
    more = len(processes) - _PROCESSES_SHOWN
    if more > 0 and list(processes) == list(range(processes[0], processes[-1] + 1)):
        return f"{noun} {processes[0]} to {processes[-1]}"
    shown = ", ".join(map(str, processes[:_PROCESSES_SHOWN]))
    return f"{noun} {shown}{f' and {more} more' if more > 0 else ''}"


_DEVICES_SHOWN = 16


def format_devices(devices: Sequence[Any]) -> str:
    """Return `device 0 (cpu)` or `2 devices [0, 1] (cpu)`; long lists are truncated.

    Args:
        devices: Devices of JAX.
    """
    if not devices:
        return "no device"
    ids = [device.id for device in devices]
    shown = str(ids) if len(ids) <= _DEVICES_SHOWN else f"[{ids[0]}, {ids[1]}, ..., {ids[-1]}]"
    listed = f"device {ids[0]}" if len(ids) == 1 else f"{len(ids)} devices {shown}"
    return f"{listed} ({devices[0].platform})"


def format_two_device_lists(one: Sequence[Any], other: Sequence[Any]) -> tuple[str, str]:
    """Return two lists of devices as texts; truncated ones show where the lists differ."""
    texts = format_devices(one), format_devices(other)
    differing = (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    at = next(differing, None)
    if texts[0] != texts[1] or at is None:
        return texts
    return (
        f"{texts[0]}, {one[at].id} at position {at}",
        f"{texts[1]}, {other[at].id} at position {at}",
    )


def group_by_value[T: Hashable](by_process: Mapping[int, T]) -> list[tuple[T, list[int]]]:
    """Group processes by value, largest group first.

    Example:
        >>> group_by_value({0: "a", 1: "b", 2: "b"})
        [('b', [1, 2]), ('a', [0])]
    """
    groups: dict[T, list[int]] = {}
    for process in sorted(by_process):
        groups.setdefault(by_process[process], []).append(process)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))


def format_by_process(by_process: Mapping[int, str]) -> str:
    """Format a text per process, grouped by equal text: `processes 1, 2: b; process 0: a`."""
    return "; ".join(f"{format_processes(who)}: {what}" for what, who in group_by_value(by_process))
