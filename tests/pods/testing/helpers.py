"""Processes of a pod that need no JAX."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from xlashard.pods.testing.launcher import Launch, LaunchPlan, PodSize
from xlashard.pods.testing.supervision import EndingRules, PodRun, run_to_end

ROOT = Path(__file__).resolve().parents[3]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of this process, in which xlashard is found."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def python(source: str) -> list[str]:
    """Return a command that runs a few lines."""
    return [sys.executable, "-c", source]


def plan(command: Sequence[str], processes: int = 2, **more: object) -> LaunchPlan:
    """Return a plan for processes with one device."""
    return LaunchPlan(command, PodSize(processes, 1), **more)  # pyright: ignore[reportArgumentType]


def ran(command: Sequence[str], processes: int = 2, **rules: float) -> PodRun:
    """Run a command in all processes, and return its end."""
    return run_to_end(Launch(plan(command, processes, one_stream=True)), EndingRules(**rules))


# Prints the ids of three processes: itself, one of its group, and one that has left it, as
# daemons do, and that no process waits for.
FAMILY = """
import os, signal, subprocess, sys
for number in {ignored}:
    signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
reader, writer = os.pipe()
if not os.fork():
    os.setsid()
    if not os.fork():
        os.write(writer, str(os.getpid()).encode())
        os.execvp("sleep", ["sleep", "1000"])
    os._exit(0)
print("family", os.getpid(), child.pid, os.read(reader, 20).decode(), flush=True)
signal.pause()
child.wait()
"""


def family(*ignored: int) -> list[str]:
    """Return a command whose processes leave others behind, and that some signals don't end."""
    return python(FAMILY.format(ignored=[int(number) for number in ignored]))


def families(lines: Iterable[str], processes: int) -> list[int]:
    """Return the ids of all processes that they print."""
    members: list[int] = []
    for line in lines:
        _, separator, numbers = line.partition("family ")
        members += map(int, numbers.split()) if separator else []
        if len(members) == 3 * processes:
            return members
    raise AssertionError(f"the processes ended early: {members}")


def start(command: Sequence[str], **more: str) -> subprocess.Popen[str]:
    """Start a command whose output can be read line by line, and that Ctrl-C ends.

    A shell starts background processes with SIGINT ignored, as their children do: the tests would
    not pass there.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            command,
            env=environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
