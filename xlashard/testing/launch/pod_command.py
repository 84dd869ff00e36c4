"""``xlashard pod``: run a command in every process of an emulated pod."""

import argparse
import errno
import os
import signal
import sys
from collections import deque

from xlashard.errors import LaunchError
from xlashard.testing.launch.launcher import Launch, LaunchPlan, OutputChunk, PodSize
from xlashard.testing.launch.prefix_printer import PrefixPrinter
from xlashard.testing.launch.supervision import (
    EndingRules,
    Supervisor,
    Verdict,
    collect_signals,
    signal_name,
)
from xlashard.wording import print_error

_EXAMPLE = "xlashard pod -n 4 -d 2 -- python script.py"
# Output lines of a hidden process that are shown when it fails.
_LAST_LINES = 20


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
    problem = _problem(words, only, arguments.processes)
    if problem:
        print_error(problem)
        return 2
    # A character that the terminal cannot encode is replaced; it does not end the run.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    size = PodSize(arguments.processes, arguments.devices)
    rules = EndingRules(arguments.timeout, arguments.grace)
    try:
        launch = Launch(LaunchPlan(words, size))
    except LaunchError as error:
        print_error(error)
        return 127 if error.errno == errno.ENOENT else 126
    try:
        with launch, collect_signals() as stop_signals:
            return _watch(launch, rules, stop_signals, only)
    except BrokenPipeError:
        # The reader has exited, as in `xlashard pod ... | head`; discard output at exit too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _problem(words: list[str], only: list[int] | None, processes: int) -> str:
    if not words:
        return f"no command was given, expected for example:\n  {_EXAMPLE}"
    if only and only[-1] >= processes:
        return (
            f"--only {only[-1]} is invalid for {processes} processes: expected 0 to {processes - 1}"
        )
    return ""


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
        if not stop_signals:
            return None
        number = stop_signals.popleft()
        _print(f"{signal_name(number)}: stopping all processes; repeat to kill them")
        return number

    verdict = Supervisor(launch, rules, show, next_stop_signal).run()
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
