"""Shutdown of a multi-process program, normally or because a peer failed, and its messages."""

import contextlib
import math
import os
import sys
import threading
import time
from functools import partial
from types import TracebackType
from typing import NoReturn

from xlashard._jax.runtime import coordination
from xlashard.core.processes.stack_dump import OWN_THREADS, ThreadStack, own_stacks, stack_server
from xlashard.core.processes.wait_graph import how_ended, own_status
from xlashard.pods.multihost.connections import Connection, LivenessMonitor
from xlashard.support.background import at_exit, flush_output, start_background
from xlashard.support.formatting import format_processes

GONE_EXIT_CODE = 75
"""Exit code of a process that ends because a peer is gone: try again (`EX_TEMPFAIL`)."""


# Seconds for the peers to receive the news from process 0 before it ends.
_PEER_NOTICE = 0.5


# Seconds to flush the output streams.
_FLUSH = 0.5


# Seconds to wait for the news from process 0 after a collective has failed.
_HEARD_FROM = 2.0
# Prefix of the error of a CPU collective whose connection to a peer closed.
_COLLECTIVE_BROKE = "Gloo"
# Seconds that a process may block in a JAX call after a peer has failed; at a barrier an exception
# is raised earlier.
_IN_VAIN = 4.0
# The same after a peer has completed. This process may be busy on its own, so it is only reported.
_REPORT_AFTER = 10.0
# Poll interval, in seconds.
_LOOK = 0.5
# Seconds for the peers to end before an error in process 0 stops the service.
_ENDING = _IN_VAIN + 2.0
# Seconds that process 0 waits for its peers when it leaves because of an error.
_LEAVING = 15.0


class ShutdownHandler:
    """Notifies the peers when this process ends, and ends it if it cannot continue alone.

    Args:
        connections: Connections to the peers; None without peers.
        heartbeat: Seconds of silence after which a peer counts as gone.
    """

    def __init__(
        self, connections: dict[int, Connection] | None, heartbeat: float = math.inf
    ) -> None:
        self._error: BaseException | None = None
        # First failed peer with its error, and an event set by it.
        self._failure: tuple[int, str] | None = None
        self._failed = threading.Event()
        self._first_over: int | None = None
        self._lines = None
        if connections is not None:
            self._lines = LivenessMonitor(
                connections, self._on_peer_gone, self._on_peer_ended, heartbeat
            )
            coordination.after_shutdown(self._lines.stop)
        self._hook = sys.excepthook
        sys.excepthook = self._note
        # Registered after JAX's handler, so it runs before it: the store still exists.
        at_exit(self._notify_peers)
        own_status.ends_at_exit = True

    def _note(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._error = error
        self._hook(kind, error, traceback)

    def leave(self, code: int, how: str) -> NoReturn:
        """End this process immediately; process 0 holds the store, so its peers end first."""
        _close(how)
        if self._lines is not None:
            self._lines.goodbye(_LEAVING if coordination.process_index() == 0 else 0)
        flush_output()
        os._exit(code)

    def _notify_peers(self) -> None:
        if self._lines is not None and _COLLECTIVE_BROKE in str(self._error):
            # A peer is gone or has failed. If it is gone, the thread that is about to be notified
            # ends this process.
            self._failed.wait(_HEARD_FROM)
            if self._failure is not None:
                self._end_in_vain(*self._failure)
        _close(how_ended(self._error))
        if self._lines is not None:
            # JAX keeps the service of process 0 until all peers have shut down, but not if an error
            # ends process 0 in an emulated pod.
            serves = coordination.process_index() == 0 and self._error is not None
            error = "" if self._error is None else how_ended(self._error)
            self._lines.goodbye(_ENDING if serves else 0, error)

    def _on_peer_gone(self, processes: tuple[int, ...], how: str) -> None:
        stack_server.lose(processes, how)
        if self._error is not None and self._is_leaving:
            # The error has been reported; only JAX's shutdown still waits for missing peers.
            self._exit_failed()
        exit_without_peers(processes)

    @property
    def _is_leaving(self) -> bool:
        return self._lines is not None and self._lines.leaving.is_set()

    def _exit_failed(self) -> NoReturn:
        exit_at_once(130 if isinstance(self._error, KeyboardInterrupt) else 1)

    def _on_peer_ended(self, process: int, error: str) -> None:
        """Watch from now on whether this process waits forever for the peer that has ended."""
        if coordination.is_recoverable():
            return
        if error and process == 0 and self._is_leaving:
            # Without the service of process 0, JAX's shutdown aborts this process.
            if self._error is not None:
                self._exit_failed()
            _report(
                "process {peer} of {count} has failed ({error}) after the program of process {me} "
                f"completed; process {{me}} ends with exit code {GONE_EXIT_CODE}. See the log of "
                "process {peer}.",
                peer=process,
                error=error,
            )
            exit_at_once(GONE_EXIT_CODE)
        if error and self._failure is None:
            self._failure = process, error
            self._failed.set()
        if self._first_over is not None:
            return
        self._first_over = process
        # During interpreter shutdown no thread starts, and this process does not wait either.
        with contextlib.suppress(RuntimeError):
            # The goodbye ends it.
            start_background(partial(self._watch, process), lambda: None, f"{OWN_THREADS}ended")

    def _watch(self, first_over: int) -> None:
        since, before, reported = time.monotonic(), None, False
        while self._lines is not None and not self._lines.leaving.wait(_LOOK):
            stack = next((stack for stack in own_stacks() if stack.main), None)
            # At a barrier of the store an exception is raised instead.
            place = None if own_status.main_waits else _waiting_place(stack)
            waited = time.monotonic() - since
            if place is None or place != before:
                since, before = time.monotonic(), place
            elif self._failure is not None and waited >= _IN_VAIN:
                self._end_in_vain(*self._failure, f"waits for it in {place}")
            elif waited >= _REPORT_AFTER and not reported:
                reported = True
                _report(
                    "the program of process {peer} of {count} has completed, and process {me} is "
                    "in {place}. If all processes must execute that line, process {me} waits "
                    "forever: make the same calls in all processes.",
                    peer=first_over,
                    place=place,
                )

    def _end_in_vain(
        self, process: int, error: str, what: str = "was in a collective with it"
    ) -> NoReturn:
        _report(
            "process {peer} of {count} has ended ({error}), and process {me} {what}. Process {me} "
            "ends: it cannot continue without it. See the log of process {peer}.",
            peer=process,
            error=error,
            what=what,
        )
        if coordination.process_index() == 0 and self._lines is not None:
            self._lines.end_failed()
        exit_at_once(GONE_EXIT_CODE)


def _close(how: str) -> None:
    """Publish how this process ends, and stop its stack server."""
    # This process must end, whatever the state of the service.
    with contextlib.suppress(Exception):
        own_status.end(how)
        stack_server.close()


def _waiting_place(stack: ThreadStack | None) -> str | None:
    """Return the program's line that blocks in a JAX call; None while the program itself runs."""
    if stack is None or not stack.in_runtime or stack.user_frame is None:
        return None
    return str(stack.user_frame)


def exit_without_peers(processes: tuple[int, ...]) -> None:
    """End this process with a message, because peers are gone. An exception could not do so.

    Its main thread may be blocked in a collective that never returns, and JAX's client is about to
    terminate the process with a message that is hard to read.
    """
    going_on = coordination.is_recoverable()
    _report(
        "{peers} of {count}{coordinator} {verb} gone: the connection closed or was silent before "
        "the end, as when a process is killed, stopped, preempted, out of memory or ended by its "
        "watchdog. Process "
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
    flushing = threading.Thread(target=flush_output, daemon=True)
    try:
        flushing.start()
        flushing.join(_FLUSH)
    except RuntimeError:
        # During interpreter shutdown no new thread starts, and no other thread prints.
        flush_output()
    if coordination.process_index() == 0:
        time.sleep(_PEER_NOTICE)
    os._exit(code)


def _report(text: str, **fields: object) -> None:
    """Write a message about this process (`me`) of `count`, without a lock of an output stream."""
    me, count = coordination.process_index(), coordination.process_count()
    os.write(2, f"\nxlashard: {text.format(me=me, count=count, **fields)}\n".encode())
