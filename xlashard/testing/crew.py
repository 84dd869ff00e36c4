"""Workers: the processes of a pod that stay and do one thing after another, all the same."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from xlashard.testing.channel import Unpacker, pack
from xlashard.testing.launcher import Event, Launch, LaunchPlan, PodSize, Printed, Said
from xlashard.testing.rounds import Patience, Round, pod_error
from xlashard.testing.supervision import AFTER_ABORT, is_paused, show_stacks
from xlashard.testing.wires import CHANNEL

_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_WORKER = "xlashard.testing.worker"
_START_TIMEOUT = 300.0


class Crew:
    """Workers of one pod, which JAX has joined.

    Args:
        size: How many processes, with how many devices each.
        environment: In which they run; None means that of this process.
        folder: In which they run.
        on_output: Is given what they write, as it comes.

    Raises:
        PodError: They don't start.
        LaunchError: Not even that.
    """

    def __init__(
        self,
        size: PodSize,
        *,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        on_output: Callable[[Printed], None] = lambda printed: None,
    ) -> None:
        self.size = size
        self.usable = True
        self._on_output = on_output
        self._unpackers = [Unpacker() for _ in range(size.processes)]
        self._launch = Launch(
            LaunchPlan(
                [sys.executable, str(_BOOTSTRAP), CHANNEL],
                size,
                environment=dict(os.environ) if environment is None else environment,
                folder=folder,
                one_stream=True,
                channels=True,
            )
        )
        start = json.dumps({"path": sys.path, "module": _WORKER}).encode() + b"\n"
        began = self._round([start] * size.processes, Patience(_START_TIMEOUT))
        if not began.well:
            self.close()
            # no-catalogue: needs processes that fail
            raise pod_error("the pod did not start", began)

    def ask(self, request: object, patience: Patience) -> Round:
        """Gives all workers the same request, and waits for their replies.

        A worker that doesn't reply in time shows the stacks of its threads and is ended. After a
        failure that is not everywhere the same, all are ended, as nobody knows where they were.
        """
        return self._round([pack(request)] * self.size.processes, patience)

    def ask_each(self, requests: Sequence[object], patience: Patience) -> Round:
        """The same with a request for each worker."""
        return self._round([pack(request) for request in requests], patience)

    def _round(self, requests: Sequence[bytes], patience: Patience) -> Round:
        around = Round(self.size, patience)
        self.usable = False
        try:
            for number, request in enumerate(requests):
                # One that ended since is among the events.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._launch.send(number, request)
            self._await_replies(around)
        finally:
            if around.in_step and not around.ended:
                self.usable = True
            else:
                self._end(around)
        return around

    def _await_replies(self, around: Round) -> None:
        end = time.monotonic() + around.patience.timeout
        failed = False
        while waiting := self._launch.running - set(around.replies):
            now = time.monotonic()
            if now >= end:
                around.timed_out = not failed
                around.late = tuple(sorted(waiting))
                around.paused = tuple(n for n in waiting if is_paused(self._launch.pids[n]))
                return
            self._note(self._launch.events(end - now), around)
            if not failed and self._has_failed(around):
                failed = True
                end = min(end, time.monotonic() + around.patience.grace)
        # What they wrote before their replies is there by now.
        while events := self._launch.events(0):
            self._note(events, around)

    def _has_failed(self, around: Round) -> bool:
        return bool(around.ended) or not all(reply.well for reply in around.replies.values())

    def _note(self, events: list[Event], around: Round) -> None:
        for event in events:
            if isinstance(event, Printed):
                around.outputs.setdefault(event.process, bytearray()).extend(event.text)
                self._on_output(event)
            elif isinstance(event, Said):
                for reply in self._unpackers[event.process].feed(event.text):
                    around.replies[event.process] = reply
                    around.heard.append(event.process)
            else:
                around.ended.append(event)
                around.heard.append(event.process)

    def _end(self, around: Round) -> None:
        """Ends the workers; those that didn't reply show where they are before."""
        if around.late:
            show_stacks(self._launch, around.late)
            end = time.monotonic() + AFTER_ABORT
            while self._launch.running & set(around.late) and time.monotonic() < end:
                self._note_late(self._launch.events(end - time.monotonic()), around)
        self._note_late(self._launch.rest(), around)
        self.close()

    def _note_late(self, events: list[Event], around: Round) -> None:
        # What the others say now is about the end of their peers.
        self._note([event for event in events if event.process in around.late], around)

    def close(self) -> None:
        """Ends the workers."""
        self.usable = False
        self._launch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
