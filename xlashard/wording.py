"""Bytes, operations, shapes, types, processes and tables as people read them."""

import io
import re
import shutil
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

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


class Escaped:
    """A renderable of rich, printed with Python's escapes in place of control characters.

    Names in a report come from programs and files, which may hold anything.

    Args:
        shown: The renderable.
    """

    def __init__(self, shown: "RenderableType") -> None:
        self._shown = shown

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.segment import Segment  # takes long to import, and few need it

        for segment in console.render(self._shown, options):
            yield Segment(printable(segment.text), segment.style, segment.control)


def print_error(error: object) -> None:
    """Print an error of a command to standard error, printable."""
    print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)


def plain_text(shown: "RenderableType", width: int | None = None) -> str:
    """Return what rich prints without colours, in the given width or the terminal's."""
    from rich.console import Console  # takes long to import, and few need it

    width = width or shutil.get_terminal_size((100, 24)).columns
    # In a notebook, a console of Jupyter would display an empty block besides.
    console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
    with console.capture() as printed:
        console.print(shown)
    return "\n".join(line.rstrip() for line in printed.get().rstrip().splitlines())


def in_bytes(count: float) -> str:
    """A number of bytes: `3.3 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def in_flop(count: float) -> str:
    """A number of floating-point operations: `1.8 GFLOP`."""
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "FLOP" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PFLOP"


def in_seconds(seconds: float) -> str:
    """A time: `71.6 ms`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.{2 if unit == 's' and seconds < 10 else 1}f} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0 s"


def in_amount(count: float) -> str:
    """A number of things: `181,000`, `8.03 billion`."""
    for word, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.2f} {word}"
    return f"{count:,.0f}" if count >= 100 or count == int(count) else f"{count:.3g}"


def in_percent(share: float) -> str:
    """A share of one: `42.7%`."""
    return f"{share:.1%}" if share < 9.995 else f"{share:,.0%}"


def numbered(numbers: Iterable[tuple[str, int]]) -> str:
    """Format names with their numbers.

    Example:
        >>> numbered([("opcode frobnicate", 2), ("line", 1)])
        'opcode frobnicate ×2, line'
    """
    return ", ".join(f"{name} ×{n:,}" if n > 1 else name for name, n in numbers)


def shape_text(shape: Iterable[int]) -> str:
    """Sizes as in `[8,16]`."""
    return f"[{','.join(map(str, shape))}]"


def typed(dtype: object, shape: Iterable[int]) -> str:
    """A type by the name of its dtype and its shape: `float32[8,16]`."""
    return f"{dtype}{shape_text(shape)}"


_PROCESSES_SHOWN = 8


def format_processes(processes: Sequence[int]) -> str:
    """Return `process 3` or `processes 1, 2`; lists of more than eight processes are truncated."""
    shown = ", ".join(map(str, processes[:_PROCESSES_SHOWN]))
    more = len(processes) - _PROCESSES_SHOWN
    noun = "process" if len(processes) == 1 else "processes"
    return f"{noun} {shown}{f' and {more} more' if more > 0 else ''}"


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
