"""``xlashard pod``: run a command in every process of an emulated pod, with prefixed output."""

import argparse
import errno
import itertools
import math
import sys
from collections import deque
from typing import TextIO

from rich.console import Console
from rich.text import Text

from xlashard.errors import LaunchError
from xlashard.pods.testing.launcher import Launch, LaunchPlan, OutputChunk, PodSize, StreamName
from xlashard.pods.testing.supervision import (
    EndingRules,
    Supervisor,
    collect_signals,
    is_noise,
)
from xlashard.support.formatting import print_error, signal_name

_EXAMPLE = "xlashard pod -n 4 -d 2 -- python script.py"

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")


# Unterminated lines are flushed at this length.
_LONGEST = 1 << 16


def run(arguments: argparse.Namespace) -> int:
    """Run the command of the command line.

    Args:
        arguments: The parsed arguments.

    Returns:
        The exit code: that of the process that failed first, 128 plus the signal number if a signal
        killed it, 124 after a timeout, 127 or 126 if the command cannot be started, 2 for invalid
        arguments.
    """
    words = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not words:
        print_error(f"no command was given, expected for example:\n  {_EXAMPLE}")
        return 2
    size = PodSize(arguments.processes, arguments.devices)
    rules = EndingRules(arguments.timeout or math.inf, arguments.grace)
    try:
        launch = Launch(LaunchPlan(words, size))
    except LaunchError as error:
        print_error(error)
        return 127 if error.errno == errno.ENOENT else 126
    with launch, collect_signals() as stop_signals:
        return _watch(launch, rules, stop_signals)


def _watch(launch: Launch, rules: EndingRules, stop_signals: "deque[int]") -> int:
    printer = PrefixPrinter(sys.stdout, sys.stderr, len(launch.pids))

    def next_stop_signal() -> int | None:
        return stop_signals.popleft() if stop_signals else None

    def announce_stop(number: int) -> None:
        _print(f"{signal_name(number)}: stopping all processes; repeat to kill them")

    verdict = Supervisor(launch, rules, printer.show, next_stop_signal, announce_stop).run()
    printer.finish()
    if not verdict.well:
        _print(verdict.summary())
    return verdict.exit_code()


def _print(text: str) -> None:
    if text:
        print(f"xlashard pod: {text}", file=sys.stderr)


class PrefixPrinter:
    """Writes complete lines of processes, each with the number of its process.

    Args:
        stdout: Destination of standard output.
        stderr: Destination of standard error.
        processes: Number of processes.
    """

    def __init__(self, stdout: TextIO, stderr: TextIO, processes: int) -> None:
        self._streams: dict[StreamName, TextIO] = {"stdout": stdout, "stderr": stderr}
        self._prefixes = {
            name: _prefixes(Console(file=stream), processes)
            for name, stream in self._streams.items()
        }
        self._begun: dict[tuple[int, StreamName], bytes] = {}

    def show(self, printed: OutputChunk) -> None:
        """Accept output of a process, and write the lines that are complete."""
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


def _prefixes(console: Console, processes: int) -> list[str]:
    width = len(str(processes - 1))
    prefixes = []
    for number, colour in zip(range(processes), itertools.cycle(_COLOURS), strict=False):
        with console.capture() as capture:
            console.print(Text(f"[{number:>{width}}]", style=colour), end="")
        prefixes.append(capture.get() + " ")
    return prefixes
