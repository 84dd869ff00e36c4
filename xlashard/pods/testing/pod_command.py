"""``xlashard pod``: run a command in every process of an emulated pod, with prefixed output."""

import argparse
import errno
import itertools
import math
import sys
from collections import deque
from collections.abc import Collection
from typing import TextIO

from rich.console import Console
from rich.text import Text

from xlashard.errors import LaunchError
from xlashard.pods.testing.launcher import Launch, LaunchPlan, OutputChunk, PodSize, StreamName
from xlashard.pods.testing.supervision import (
    EndingRules,
    Supervisor,
    Verdict,
    collect_signals,
    is_noise,
)
from xlashard.support.formatting import print_error, signal_name

_EXAMPLE = "xlashard pod -n 4 -d 2 -- python script.py"
# Output lines of a hidden process that are shown when it fails.
_LAST_LINES = 20


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
    only: list[int] | None = arguments.only
    most = arguments.processes - 1
    if not words:
        print_error(f"no command was given, expected for example:\n  {_EXAMPLE}")
        return 2
    if only and only[-1] > most:
        count = arguments.processes
        print_error(f"--only {only[-1]} is invalid for {count} processes: expected 0 to {most}")
        return 2
    size = PodSize(arguments.processes, arguments.devices)
    rules = EndingRules(arguments.timeout or math.inf, arguments.grace)
    try:
        launch = Launch(LaunchPlan(words, size))
    except LaunchError as error:
        print_error(error)
        return 127 if error.errno == errno.ENOENT else 126
    with launch, collect_signals() as stop_signals:
        return _watch(launch, rules, stop_signals, only)


def _watch(
    launch: Launch, rules: EndingRules, stop_signals: "deque[int]", only: list[int] | None
) -> int:
    processes = len(launch.pids)
    printer = PrefixPrinter(sys.stdout, sys.stderr, processes, only)
    unseen = {n: bytearray() for n in range(processes) if only and n not in only}

    def show(printed: OutputChunk) -> None:
        if printed.process in unseen:
            unseen[printed.process] += printed.text
        printer.show(printed)

    def next_stop_signal() -> int | None:
        return stop_signals.popleft() if stop_signals else None

    def announce_stop(number: int) -> None:
        _print(f"{signal_name(number)}: stopping all processes; repeat to kill them")

    verdict = Supervisor(launch, rules, show, next_stop_signal, announce_stop).run()
    printer.finish()
    if not verdict.well:
        _show_unseen(verdict, unseen, processes)
        _print(verdict.summary())
    return verdict.exit_code()


def _show_unseen(verdict: Verdict, unseen: dict[int, bytearray], processes: int) -> None:
    """Show the last lines of a failed process that was hidden."""
    shown = verdict.timed_out or ((verdict.first.process,) if verdict.first else ())
    for number in shown:
        lines = bytes(unseen.get(number, b"")).splitlines(keepends=True)[-_LAST_LINES:]
        printer = PrefixPrinter(sys.stderr, sys.stderr, processes)
        printer.show(OutputChunk(number, "stderr", b"".join(lines)))
        printer.finish()


def _print(text: str) -> None:
    if text:
        print(f"xlashard pod: {text}", file=sys.stderr)


class PrefixPrinter:
    """Writes complete lines of processes, each with the number of its process.

    Args:
        stdout: Destination of standard output.
        stderr: Destination of standard error.
        processes: Number of processes.
        only: Processes to show; None means all.
    """

    def __init__(
        self,
        stdout: TextIO,
        stderr: TextIO,
        processes: int,
        only: Collection[int] | None = None,
    ) -> None:
        self._streams: dict[StreamName, TextIO] = {"stdout": stdout, "stderr": stderr}
        self._prefixes = {
            name: _prefixes(Console(file=stream), processes)
            for name, stream in self._streams.items()
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


def _prefixes(console: Console, processes: int) -> list[str]:
    width = len(str(processes - 1))
    prefixes = []
    for number, colour in zip(range(processes), itertools.cycle(_COLOURS), strict=False):
        with console.capture() as capture:
            console.print(Text(f"[{number:>{width}}]", style=colour), end="")
        prefixes.append(capture.get() + " ")
    return prefixes
