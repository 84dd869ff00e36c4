"""``xlashard pod``: a command in every process of an emulated pod, with the output of all."""

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
# Of a process that isn't shown, when it fails.
_LAST_LINES = 20


def run(arguments: argparse.Namespace) -> int:
    """Runs a command as the command line asks.

    Args:
        arguments: The words, parsed.

    Returns:
        The exit code: that of the process that failed first, 128 and the signal's number if one
        ended it, 124 after a timeout, 127 or 126 if the command can't be started, 2 for wrong use.
    """
    words = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    only: list[int] | None = arguments.only
    problem = _problem(words, only, arguments.processes)
    if problem:
        print_error(problem)
        return 2
    # A terminal that lacks a letter shows another one; it does not end the run.
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
        with launch, collect_signals() as told:
            return _watch(launch, rules, told, only)
    except BrokenPipeError:
        # Nobody reads any more, as in `xlashard pod ... | head`; nor at this process's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _problem(words: list[str], only: list[int] | None, processes: int) -> str:
    if not words:
        return f"which command? Write, for example:\n  {_EXAMPLE}"
    if only and only[-1] >= processes:
        return f"there is no process {only[-1]} among {processes}; write --only {processes - 1}"
    return ""


def _watch(launch: Launch, rules: EndingRules, told: "deque[int]", only: list[int] | None) -> int:
    processes = len(launch.pids)
    printer = PrefixPrinter(sys.stdout, sys.stderr, processes, only)
    unseen = {n: bytearray() for n in range(processes) if only and n not in only}

    def show(printed: OutputChunk) -> None:
        if printed.process in unseen:
            unseen[printed.process] += printed.text
        printer.show(printed)

    def next_told() -> int | None:
        if not told:
            return None
        number = told.popleft()
        _say(f"{signal_name(number)}: all processes are told to stop; once more ends them at once")
        return number

    verdict = Supervisor(launch, rules, show, next_told).run()
    printer.finish()
    if not verdict.well:
        _show_unseen(verdict, unseen, processes)
        _say(verdict.summary())
    return verdict.exit_code()


def _show_unseen(verdict: Verdict, unseen: dict[int, bytearray], processes: int) -> None:
    """The end of what a process wrote that failed, and that nobody saw."""
    wanted = verdict.timed_out or ((verdict.first.process,) if verdict.first else ())
    for number in wanted:
        lines = bytes(unseen.get(number, b"")).splitlines(keepends=True)[-_LAST_LINES:]
        printer = PrefixPrinter(sys.stderr, sys.stderr, processes)
        printer.show(OutputChunk(number, "stderr", b"".join(lines)))
        printer.finish()


def _say(text: str) -> None:
    if text:
        print(f"xlashard pod: {text}", file=sys.stderr)
