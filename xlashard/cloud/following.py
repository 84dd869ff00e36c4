"""Following what one worker writes, by a connection that is made again when it breaks."""

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from xlashard.cloud.commands import Command, Runner
from xlashard.cloud.retrying import Backoff

_CHUNK = 1 << 16
_LAST_ERRORS = 400


class Stream(Protocol):
    """The output of a worker's command, as far as it has come.

    Attributes:
        seen: Bytes that have come.
    """

    seen: int

    def command(self) -> Command:
        """What gives the rest of it."""
        ...

    def feed(self, chunk: bytes) -> bytes:
        """Takes what that wrote, and gives what of it the worker's command wrote."""
        ...

    def over(self, code: int) -> "Over | None":
        """How the worker's command ended, after the connection has with an exit code.

        None if it runs as far as is known.
        """
        ...


@dataclass(frozen=True)
class Over:
    """A worker's command that is over.

    Attributes:
        label: Of the worker.
        code: Its exit code; None if nobody knows, as the worker is gone or can't be reached.
        why: Then what was heard last.
    """

    label: str
    code: int | None
    why: str = ""


class AgentStream:
    """A job's log, as the agent on the worker sends it.

    The agent writes what is not the log between zero bytes: `go` before it, and in the end `end`
    with the exit code, or `gone` if the job ran, and its processes are not there any more.

    Args:
        label: Of the worker.
        command: Makes the command that sends the log from a byte on.
    """

    def __init__(self, label: str, command: Callable[[int], Command]) -> None:
        self.seen = 0
        self._label = label
        self._command = command
        self._unread = b""
        self._going = False
        self._over: Over | None = None

    def command(self) -> Command:
        """What sends the rest of the log."""
        self._unread, self._going = b"", False
        return self._command(self.seen)

    def feed(self, chunk: bytes) -> bytes:
        """Takes what the agent sent, and gives what of it is the log."""
        text = self._unread + chunk
        self._unread = b""
        log = b""
        while text:
            if self._going:
                part, mark, text = text.partition(b"\0")
                log += part
                if not mark:
                    break
                self._going = False
                text = b"\0" + text
                continue
            _, mark, rest = text.partition(b"\0")
            word, closed, after = rest.partition(b"\0")
            if not closed:
                self._unread = mark + rest
                break
            self._hear(word.decode(errors="replace").split())
            text = after
        self.seen += len(log)
        return log

    def _hear(self, words: list[str]) -> None:
        if words == ["go"]:
            self._going = True
        elif words[:1] == ["end"]:
            self._over = Over(self._label, int(words[1]))
        elif words == ["gone"]:
            self._over = Over(self._label, None, "its processes were killed, or the VM restarted")

    def over(self, code: int) -> Over | None:
        """How the job ended; None if it runs as far as is known."""
        return self._over


class Follower:
    """Follows one stream in a thread of its own, until it is over.

    Args:
        label: Of the worker.
        stream: What it writes.
        take: Is given that, as it comes.
        ends: Gets one `Over` in the end.
        runner: Makes connections.
        backoff: When broken ones are made again, and how often in a row without a word.
    """

    def __init__(
        self,
        label: str,
        stream: Stream,
        take: Callable[[bytes], None],
        ends: "queue.Queue[Over]",
        runner: Runner,
        backoff: Backoff,
    ) -> None:
        self._label, self._stream, self._take, self._ends = label, stream, take, ends
        self._runner, self._backoff = runner, backoff
        self._cancelled = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"follow {label}", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def cancel(self) -> None:
        """Follows no longer; what runs on the worker goes on."""
        self._cancelled.set()
        with self._lock:
            if self._process is not None:
                end_connection(self._process)

    def join(self) -> None:
        """Returns when the thread is over."""
        self._thread.join()

    def _run(self) -> None:
        over = Over(self._label, None, "something here failed")
        try:
            over = self._follow()
        except Exception as error:  # It must be told, by the thread that waits for an end.
            over = Over(self._label, None, str(error))
        finally:
            self._ends.put(over)

    def _follow(self) -> Over:
        silent = 0
        while not self._cancelled.is_set():
            seen = self._stream.seen
            code, said = self._connect()
            over = self._stream.over(code)
            if over is not None:
                return over
            silent = 0 if self._stream.seen > seen else silent + 1
            if silent >= self._backoff.tries:
                return Over(self._label, None, f"can't be reached ({said or f'exit code {code}'})")
            self._cancelled.wait(self._backoff.wait(max(silent, 1)))
        return Over(self._label, None, "it was not followed to its end")

    def _connect(self) -> tuple[int, str]:
        """Follows by one connection; gives its exit code, and its last word about an error."""
        with self._lock:
            if self._cancelled.is_set():
                return 0, ""
            process = self._process = self._runner.start(self._stream.command())
        if process is None:
            return 0, ""
        assert process.stdout is not None and process.stderr is not None
        errors = _Tail(process.stderr.fileno())
        errors.start()
        try:
            while chunk := os.read(process.stdout.fileno(), _CHUNK):
                if text := self._stream.feed(chunk):
                    self._take(text)
            code = process.wait()
            errors.join(1.0)  # What gcloud has left behind may hold it open.
        finally:
            end_connection(process)
            process.stdout.close()
            process.stderr.close()
        return code, errors.last_line


class _Tail(threading.Thread):
    """Reads to the end what nobody waits for, and keeps its last line."""

    def __init__(self, source: int) -> None:
        super().__init__(daemon=True)
        self._source = source
        self._text = b""

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(self._source, _CHUNK):
                self._text = (self._text + chunk)[-_LAST_ERRORS:]

    @property
    def last_line(self) -> str:
        lines = self._text.decode("utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def end_connection(process: "subprocess.Popen[bytes]") -> None:
    """Ends a connection with all that it started here."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
