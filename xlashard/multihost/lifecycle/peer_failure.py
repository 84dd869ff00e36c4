"""What is said of other processes that are gone or waited for in vain, and an end at once."""

import contextlib
import os
import sys
import threading
import time
from typing import NoReturn

from xlashard._jax import coordination
from xlashard.processes import format_processes

GONE_EXIT_CODE = 75
"""The exit code of a process that ends because another is gone: try again (`EX_TEMPFAIL`)."""

# Seconds that the others have to hear from process 0 who is gone, before it ends itself.
_HEARD = 0.5
# Seconds for what was printed to come out.
_FLUSH = 0.5


def exit_without_peers(processes: tuple[int, ...]) -> None:
    """Ends this process because others are gone, with a message; no exception can do it.

    Its main thread may be in a collective that never returns, and JAX's client is about to end the
    process itself, with a message that is hard to read.
    """
    me, count = coordination.process_index(), coordination.process_count()
    is_are = "is" if len(processes) == 1 else "are"
    coordinator = ", the coordinator," if 0 in processes else ""
    going_on = coordination.is_recoverable()
    what_now = "goes on without" if going_on else "ends: it can't go on without"
    text = (
        f"\nxlashard: {format_processes(processes)} of {count}{coordinator} {is_are} gone: the "
        "connection closed before the end, as when a process is killed, preempted, out of "
        f"memory or ended by its watchdog. Process {me} {what_now} it. See the end of its log, "
        "then start all processes again; with --resume, where the program has it, they go on from "
        "the last checkpoint.\n"
    )
    # The message first, and by no lock that another thread may hold.
    os.write(2, text.encode())
    if not going_on:
        exit_at_once(GONE_EXIT_CODE)


def exit_at_once(code: int) -> NoReturn:
    """Ends this process, wherever it is; process 0 gives the others time to hear of it before."""
    _flush_soon()
    if coordination.process_index() == 0:
        time.sleep(_HEARD)
    os._exit(code)


def _flush_soon() -> None:
    flushing = threading.Thread(target=flush, daemon=True)
    try:
        flushing.start()
    except RuntimeError:
        # The program is at its end, where there are no new threads, and nobody else who prints.
        flush()
    else:
        flushing.join(_FLUSH)


def flush() -> None:
    """Writes out what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def report_failed_peer(process: int, error: str, what: str) -> None:
    """Says that this process ends, which does something together with one that has failed."""
    me, count = coordination.process_index(), coordination.process_count()
    text = (
        f"\nxlashard: process {process} of {count} has ended ({error}), and process {me} "
        f"{what}. Process {me} ends: it can't go on without it. The log of process {process} "
        "says more.\n"
    )
    os.write(2, text.encode())


def report_late_failure(process: int, error: str) -> None:
    """Print that another process has failed after the program of this process was over."""
    me, count = coordination.process_index(), coordination.process_count()
    text = (
        f"\nxlashard: process {process} of {count} has failed ({error}) after the program of "
        f"process {me} was over; process {me} ends with exit code {GONE_EXIT_CODE}. The log of "
        f"process {process} says more.\n"
    )
    os.write(2, text.encode())


def report_finished_peer(process: int, place: str) -> None:
    """Says that this process waits at a line for one whose program is over."""
    me, count = coordination.process_index(), coordination.process_count()
    text = (
        f"\nxlashard: the program of process {process} of {count} is over, and process {me} is in "
        f"{place}. If that is to be done together, it waits in vain: let all processes make the "
        "same calls.\n"
    )
    os.write(2, text.encode())
