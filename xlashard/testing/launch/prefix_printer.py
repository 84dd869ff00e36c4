"""Line-by-line output of several processes, each line prefixed with its process."""

from collections.abc import Collection, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from xlashard.testing.launch.launcher import OutputChunk
from xlashard.testing.launch.output_text import is_noise
from xlashard.testing.launch.pipes import StreamName

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")
# Unterminated lines are flushed at this length.
_LONGEST = 1 << 16


class PrefixPrinter:
    """Writes complete lines of processes, each with the number of its process.

    Args:
        stdout: Destination of standard output.
        stderr: Destination of standard error.
        processes: Number of processes.
        only: Processes to show; None means all.
        names: Prefixes in place of the process numbers.
    """

    def __init__(
        self,
        stdout: TextIO,
        stderr: TextIO,
        processes: int,
        only: Collection[int] | None = None,
    ) -> None:
        names = [str(number) for number in range(processes)]
        self._streams: dict[StreamName, TextIO] = {"stdout": stdout, "stderr": stderr}
        self._prefixes = {
            name: _prefixes(Console(file=stream), names) for name, stream in self._streams.items()
        }
        self._only = only
        self._begun: dict[tuple[int, StreamName], bytes] = {}

    def show(self, printed: OutputChunk) -> None:
        """Accept output of a process, and write the lines that are complete."""
        if self._only is not None and printed.process not in self._only:
            return
        key = (printed.process, printed.stream)
        *lines, begun = (self._begun.pop(key, b"") + printed.text).split(b"\n")
        if begun and (len(begun) > _LONGEST or not printed.text):
            lines.append(begun)
        elif begun:
            self._begun[key] = begun
        self._write(printed.process, printed.stream, lines)

    def _write(self, process: int, name: StreamName, lines: list[bytes]) -> None:
        prefix, stream = self._prefixes[name][process], self._streams[name]
        shown = [prefix + as_shown(line) + "\n" for line in lines if not is_noise(line)]
        if shown:
            stream.write("".join(shown))
            stream.flush()

    def finish(self) -> None:
        """Write the remaining unterminated lines."""
        for process, name in list(self._begun):
            self.show(OutputChunk(process, name, b""))


def as_shown(line: bytes) -> str:
    """Return a line as a terminal displays it, with overwritten progress removed."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", errors="replace")


def _prefixes(console: Console, names: Sequence[str]) -> list[str]:
    width = max(map(len, names), default=0)
    found = []
    for number, name in enumerate(names):
        with console.capture() as capture:
            shown = Text(f"[{name:>{width}}]", style=_COLOURS[number % len(_COLOURS)])
            console.print(shown, end="")
        found.append(capture.get() + " ")
    return found
