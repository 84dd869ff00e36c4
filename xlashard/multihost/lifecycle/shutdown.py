"""How a program of several processes ends: as it should, or because one of them is gone."""

import atexit
import contextlib
import os
import sys
import threading
import time
from types import TracebackType
from typing import NoReturn

from xlashard._jax import coordination
from xlashard.multihost.lifecycle.peer_failure import (
    GONE_EXIT_CODE,
    exit_at_once,
    exit_without_peers,
    flush,
    report_failed_peer,
    report_finished_peer,
    report_late_failure,
)
from xlashard.processes.connections import Connection
from xlashard.processes.liveness import LivenessMonitor
from xlashard.processes.stack_dump import stack_server
from xlashard.processes.thread_stacks import OWN_THREADS, ThreadStack, own_stacks
from xlashard.processes.wait_graph import own_status

# Seconds to hear from process 0 who is gone, after a collective has noticed it first.
_HEARD_FROM = 2.0
# What an error of a collective on CPUs begins with when the connection to another process closes.
_COLLECTIVE_BROKE = "Gloo"
# Seconds for which a process whose peer has failed may wait in a call of JAX, which raises nothing;
# whoever waits at a barrier is told sooner, by an exception.
_IN_VAIN = 4.0
# The same where the other's program is over. It may be doing something of its own, so it is only
# said.
_SAID = 10.0
# How often it looks whether it does, in seconds.
_LOOK = 0.5
# Seconds that the others have to end before an error in process 0 takes the service from them.
_ENDING = _IN_VAIN + 2.0
# Seconds for which process 0 lets others go first that leave because of an error.
_LEAVING = 15.0


class ShutdownHandler:
    """Tells the others when this process ends, and ends it when it can't go on without them.

    Args:
        connections: Those to the others; None where there are none.
    """

    def __init__(self, connections: dict[int, Connection] | None) -> None:
        self._error: BaseException | None = None
        # The first other process that has failed, and how, and whether there is one.
        self._failure: tuple[int, str] | None = None
        self._failed = threading.Event()
        self._first_over: int | None = None
        self._lines = None
        if connections is not None:
            self._lines = LivenessMonitor(connections, self._lose, self._mourn)
        self._hook = sys.excepthook
        sys.excepthook = self._note
        # Registered after JAX's own, so called before it: there is a store yet.
        atexit.register(self._tell)

    def _note(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._error = error
        self._hook(kind, error, traceback)

    def leave(self, code: int, how: str) -> NoReturn:
        """Ends this process at once. Process 0, which holds the store, lets the others go first."""
        _close(how)
        if self._lines is not None:
            self._lines.goodbye(_LEAVING if coordination.process_index() == 0 else 0)
        flush()
        os._exit(code)

    def _tell(self) -> None:
        if self._lines is not None and _COLLECTIVE_BROKE in str(self._error):
            # Another process is gone, or has failed. Of the first the thread that is about to hear
            # of it ends this one.
            self._failed.wait(_HEARD_FROM)
            if self._failure is not None:
                self._end_in_vain(*self._failure)
        _close(_how_text(self._error))
        if self._lines is not None:
            # JAX keeps process 0's service up until all others have come to their end, but not
            # where an error ends it in an emulated pod.
            serves = coordination.process_index() == 0 and self._error is not None
            error = "" if self._error is None else _how_text(self._error)
            self._lines.goodbye(_ENDING if serves else 0, error)

    def _lose(self, processes: tuple[int, ...]) -> None:
        if self._error is not None and self._is_leaving:
            # Its error is told, and only JAX waits yet for those who won't come.
            self._exit_failed()
        exit_without_peers(processes)

    @property
    def _is_leaving(self) -> bool:
        return self._lines is not None and self._lines.leaving

    def _exit_failed(self) -> NoReturn:
        exit_at_once(130 if isinstance(self._error, KeyboardInterrupt) else 1)

    def _mourn(self, process: int, error: str) -> None:
        """Another has ended: looks from now on whether this one waits for it in vain."""
        if coordination.is_recoverable():
            return
        if error and process == 0 and self._is_leaving:
            # Process 0 takes the service along, without which JAX's ending aborts this process.
            if self._error is not None:
                self._exit_failed()
            report_late_failure(process, error)
            exit_at_once(GONE_EXIT_CODE)
        if error and self._failure is None:
            self._failure = process, error
            self._failed.set()
        if self._first_over is not None:
            return
        self._first_over = process
        # Without threads, at the end of Python, this process doesn't wait either.
        with contextlib.suppress(RuntimeError):
            threading.Thread(
                target=self._watch, args=(process,), name=f"{OWN_THREADS}ended", daemon=True
            ).start()

    def _watch(self, first_over: int) -> None:
        since, before, said = time.monotonic(), None, False
        while self._lines is not None and not self._lines.leaving:
            stack = next((stack for stack in own_stacks() if stack.main), None)
            # Where it waits for others by the store, it is told by an exception.
            place = None if own_status.main_waits else _waiting_place(stack)
            waited = time.monotonic() - since
            if place is None or place != before:
                since, before = time.monotonic(), place
            elif self._failure is not None and waited >= _IN_VAIN:
                self._end_in_vain(*self._failure, f"waits for it in {place}")
            elif waited >= _SAID and not said:
                said = True
                report_finished_peer(first_over, place)
            time.sleep(_LOOK)

    def _end_in_vain(
        self, process: int, error: str, what: str = "was in a collective with it"
    ) -> NoReturn:
        report_failed_peer(process, error, what)
        if coordination.process_index() == 0 and self._lines is not None:
            self._lines.end_failed()
        exit_at_once(GONE_EXIT_CODE)


def _close(how: str) -> None:
    """Leaves word of how this process ends, and answers others no longer."""
    # Whatever has happened to the service: this process is to end now.
    with contextlib.suppress(Exception):
        own_status.end(how)
        stack_server.close()


def _waiting_place(stack: ThreadStack | None) -> str | None:
    """The line of the program that waits in a call of JAX; None where the program itself runs."""
    if stack is None or not stack.in_runtime or stack.user_frame is None:
        return None
    return str(stack.user_frame)


def _how_text(error: BaseException | None) -> str:
    if error is None:
        return "its program is over"
    first = str(error).split("\n", 1)[0]
    return f"{type(error).__name__}: {first[:200]}" if first else type(error).__name__
