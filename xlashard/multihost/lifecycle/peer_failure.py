"""Messages about peers that failed or disappeared, and immediate exit of this process."""

import contextlib
import os
import sys
import threading
import time
from typing import NoReturn

from xlashard._jax.runtime import coordination
from xlashard.processes import format_processes

GONE_EXIT_CODE = 75
"""Exit code of a process that ends because a peer is gone: try again (`EX_TEMPFAIL`)."""

# Seconds for the peers to receive the news from process 0 before it ends.
_PEER_NOTICE = 0.5
# Seconds to flush the output streams.
_FLUSH = 0.5


def exit_without_peers(processes: tuple[int, ...]) -> None:
    """End this process with a message, because peers are gone. An exception could not do so.

    Its main thread may be blocked in a collective that never returns, and JAX's client is about to
    terminate the process with a message that is hard to read.
    """
    going_on = coordination.is_recoverable()
    _report(
        "{peers} of {count}{coordinator} {verb} gone: the connection closed before the end, as "
        "when a process is killed, preempted, out of memory or ended by its watchdog. Process "
        "{me} {what_now} it. See the end of its log, then start all processes again; with "
        "--resume, if the program supports it, they continue from the last checkpoint.",
        peers=format_processes(processes),
        coordinator=", the coordinator," if 0 in processes else "",
        verb="is" if len(processes) == 1 else "are",
        what_now="continues without" if going_on else "ends: it cannot continue without",
    )
    if not going_on:
        exit_at_once(GONE_EXIT_CODE)


def exit_at_once(code: int) -> NoReturn:
    """End this process immediately; process 0 first gives its peers time to be notified."""
    _flush_soon()
    if coordination.process_index() == 0:
        time.sleep(_PEER_NOTICE)
    os._exit(code)


def _flush_soon() -> None:
    flushing = threading.Thread(target=flush, daemon=True)
    try:
        flushing.start()
    except RuntimeError:
        # During interpreter shutdown no new thread starts, and no other thread prints.
        flush()
    else:
        flushing.join(_FLUSH)


def flush() -> None:
    """Flush the output streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def report_failed_peer(process: int, error: str, what: str) -> None:
    """Print that this process ends because it takes part in an operation with a failed peer."""
    _report(
        "process {peer} of {count} has ended ({error}), and process {me} {what}. Process {me} "
        "ends: it cannot continue without it. See the log of process {peer}.",
        peer=process,
        error=error,
        what=what,
    )


def report_late_failure(process: int, error: str) -> None:
    """Print that a peer failed after the program of this process completed."""
    _report(
        "process {peer} of {count} has failed ({error}) after the program of process {me} "
        f"completed; process {{me}} ends with exit code {GONE_EXIT_CODE}. See the log of process "
        "{peer}.",
        peer=process,
        error=error,
    )


def report_finished_peer(process: int, place: str) -> None:
    """Print that this process waits at a line for a peer whose program has completed."""
    _report(
        "the program of process {peer} of {count} has completed, and process {me} is in {place}. "
        "If all processes must execute that line, process {me} waits forever: make the same calls "
        "in all processes.",
        peer=process,
        place=place,
    )


def _report(text: str, **fields: object) -> None:
    """Write a message about this process (`me`) of `count`, without a lock of an output stream."""
    me, count = coordination.process_index(), coordination.process_count()
    os.write(2, f"\nxlashard: {text.format(me=me, count=count, **fields)}\n".encode())
