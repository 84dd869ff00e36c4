"""Who has come, before JAX's own runtime starts.

JAX's client ends its process, with no exception, when not all processes come in time, and doesn't
say who is missing. So they come together first on the address where process 0's coordination
service is going to listen: each says who it is, process 0 says to all who is missing, and when
everybody is there it leaves the address to the service. The connections stay open: see `lines`.

What is said is one line of JSON at a time. Nothing of it is secret, and nothing is checked but that
it fits: whoever reaches the address can come as a process that is missing, as with the service.
"""

import logging
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from xlashard.lazily import dataclass
from xlashard.processes.connections import ATTEMPT, Connection, ProcessIdentity, connect, listen
from xlashard.processes.process_groups import format_processes
from xlashard.wording import printable

# Seconds between two attempts to reach process 0, and between two words to those who wait.
_RETRY, _WORD = 0.1, 1.0
# Seconds that a process has to say who it is, and to answer when all have come.
_HELLO, _CONFIRM = 5.0, 20.0
# Hosts of dropped connections that are logged.
_LOGGED = 20

logger = logging.getLogger("xlashard.multihost")


@dataclass(frozen=True)
class StartupBarrier:
    """How processes come together.

    Attributes:
        me: This process.
        coordinator: Host and port of process 0, as the others reach it.
        bind: The host and port where process 0 listens.
        alone: How long a process waits that has seen no other, in seconds.
        timeout: How long one waits that has, in seconds.
        told: Is told about once a second who is missing, and for how many seconds already.
    """

    me: ProcessIdentity
    coordinator: tuple[str, int]
    bind: tuple[str, int]
    alone: float
    timeout: float
    told: Callable[[tuple[int, ...], float], None]


class MissingProcessesError(Exception):
    """Processes that didn't come.

    Attributes:
        processes: Their numbers.
        seconds: How long they were waited for.
        reason: What came of trying to reach process 0, where that was it.
    """

    def __init__(self, processes: tuple[int, ...], seconds: float, reason: str = "") -> None:
        super().__init__(processes, seconds, reason)
        self.processes = processes
        self.seconds = seconds
        self.reason = reason


class ProcessConflictError(Exception):
    """Processes that say what doesn't fit together, or an address with something else behind it."""


def wait_for_all(call: StartupBarrier) -> dict[int, Connection]:
    """Returns when all processes are there: the connections of this one, by process.

    Process 0 has one to each of the others, and they have one to process 0.

    Raises:
        AbsentError: Some did not come in time.
        ConflictError: Some say what doesn't fit.
        OSError: Process 0 can't listen at its address.
    """
    return _Coordinator(call).run() if call.me.process == 0 else _Participant(call).run()


class _Coordinator:
    """Process 0, to which the others come."""

    def __init__(self, call: StartupBarrier) -> None:
        self._call = call
        self._began = time.monotonic()
        self._came: dict[int, Connection] = {}
        self._strangers: list[Connection] = []
        # Who was asked, once all had come, whether it is there yet; and who has answered.
        self._asked: set[int] = set()
        self._confirmed: set[int] = set()
        self._asked_since = self._began
        # Hosts whose connections were dropped for what they sent.
        self._dropped: set[str] = set()

    def run(self) -> dict[int, Connection]:
        with listen(self._call.bind) as listener, selectors.DefaultSelector() as self._selector:
            self._selector.register(listener, selectors.EVENT_READ)
            try:
                self._wait(listener)
            except BaseException:
                for connection in [*self._came.values(), *self._strangers]:
                    connection.close()
                raise
        for connection in self._strangers:
            connection.close()
        for connection in self._came.values():
            connection.send(all_here=True)
        return self._came

    @property
    def _missing(self) -> tuple[int, ...]:
        return tuple(p for p in range(1, self._call.me.count) if p not in self._came)

    def _wait(self, listener: socket.socket) -> None:
        word = self._began + _WORD
        while self._missing or self._ask():
            for key, _ in self._selector.select(_RETRY):
                if key.fileobj is listener:
                    self._greet(listener)
                else:
                    self._hear(key.data)
            now = time.monotonic()
            seconds = now - self._began
            if not self._missing and now - self._asked_since > _CONFIRM:
                trouble = self._silence_text()
                self._say(conflict=trouble)
                raise ProcessConflictError(trouble)  # no-catalogue: needs several processes
            if self._missing and seconds > (self._call.timeout if self._came else self._call.alone):
                self._say(absent=self._missing, seconds=seconds)
                raise MissingProcessesError(
                    self._missing, seconds
                )  # no-catalogue: needs several processes
            if now >= word and self._missing:
                word = now + _WORD
                self._say(missing=self._missing, seconds=seconds)
                self._call.told(self._missing, seconds)
                for stranger in [s for s in self._strangers if now - s.since > _HELLO]:
                    self._leave(stranger)

    def _ask(self) -> bool:
        """Ask all who have come whether they are there yet; return whether some have not answered.

        A stranger that has taken a place does not answer. Without the question JAX's client would
        wait for it, in silence, and end this process.
        """
        for process in set(self._came) - self._asked:
            self._asked.add(process)
            self._asked_since = time.monotonic()
            self._came[process].send(confirm=True)
        return self._confirmed != set(self._came)

    def _silence_text(self) -> str:
        silent = sorted(set(self._came) - self._confirmed)
        named = ", ".join(
            f"{self._came[process].caller}, at {self._came[process].peer}" for process in silent
        )
        return (
            f"{format_processes(silent)} of {self._call.me.count} ({named}) came and has not "
            f"answered for {_CONFIRM:.0f} s: it is stopped, or another program that has taken the "
            "place; end it"
        )

    def _greet(self, listener: socket.socket) -> None:
        try:
            accepted = listener.accept()[0]
        except OSError:
            return  # It is gone again; or there are too many, of which `_HELLO` lets some go.
        accepted.settimeout(ATTEMPT)
        connection = Connection(accepted)
        self._strangers.append(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _leave(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.close()
        if connection in self._strangers:
            self._strangers.remove(connection)
        elif connection.caller is not None:
            process = connection.caller.process
            if self._came.get(process) is connection:
                del self._came[process]
                self._asked.discard(process)
                self._confirmed.discard(process)

    def _hear(self, connection: Connection) -> None:
        """Admit the processes that a connection names; drop it at a line that names none."""
        try:
            lines = connection.receive()
            callers = [ProcessIdentity.of(line) for line in lines or () if "here" not in line]
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError):
                self._log_dropped(connection)
            lines, callers = None, []
        if lines is None:
            self._leave(connection)
            return
        for caller in callers:
            self._admit(connection, caller)
        if connection.caller is not None and any("here" in line for line in lines):
            self._confirmed.add(connection.caller.process)

    def _log_dropped(self, connection: Connection) -> None:
        """Log the first line of each host that is of no process; a scanner may send thousands."""
        host = connection.peer.rpartition(":")[0]
        if host in self._dropped or len(self._dropped) >= _LOGGED:
            return
        self._dropped.add(host)
        name = f" ({connection.caller})" if connection.caller is not None else ""
        logger.warning(
            "process 0 of %d dropped a connection from %s%s, whose line is of no process of this "
            "program, and goes on waiting for %s",
            self._call.me.count,
            connection.peer,
            name,
            format_processes(self._missing) if self._missing else "all to confirm",
        )

    def _admit(self, connection: Connection, caller: ProcessIdentity) -> None:
        trouble = self._conflict(caller)
        if trouble:
            connection.send(conflict=trouble)
            self._say(conflict=trouble)
            raise ProcessConflictError(trouble)  # no-catalogue: needs several processes
        if connection in self._strangers:
            self._strangers.remove(connection)
        connection.caller = caller
        self._came[caller.process] = connection
        connection.send(missing=self._missing, seconds=time.monotonic() - self._began)

    def _conflict(self, caller: ProcessIdentity) -> str:
        me = self._call.me
        if caller.count != me.count:
            return (
                f"process {caller.process} ({caller}) is to be one of {caller.count}, and process "
                f"0 ({me}) one of {me.count}: start all for the same number"
            )
        if caller.secured != me.secured:
            one, other = (caller, me) if caller.secured else (me, caller)
            return (
                f"process {one.process} ({one}) was given certificates (tls=), and process "
                f"{other.process} ({other}) none: give them to all"
            )
        there = self._came.get(caller.process)
        other = there.caller if there else me if caller.process == me.process else None
        if other is not None:
            return (
                f"two processes are to be number {caller.process}: {other} and {caller}; end what "
                "is left of an earlier run, and give each a number of its own"
            )
        if not 0 < caller.process < me.count:
            return f"a process ({caller}) is to be number {caller.process} of 0 … {me.count - 1}"
        return ""

    def _say(self, **said: Any) -> None:
        for connection in self._came.values():
            connection.send(**said)


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


class _Participant:
    """Any other process, which comes to process 0."""

    def __init__(self, call: StartupBarrier) -> None:
        self._call = call
        self._began = time.monotonic()

    def run(self) -> dict[int, Connection]:
        connection = self._reach()
        try:
            self._wait(connection)
        except BaseException:
            connection.close()
            raise
        self._await_service()
        return {0: connection}

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _reach(self) -> Connection:
        word = _WORD
        while True:
            try:
                connection = Connection(connect(self._call.coordinator))
            except OSError as error:
                reason = str(error)
            else:
                connection.send(**asdict(self._call.me))
                return connection
            if self._seconds > self._call.alone:
                # no-catalogue: needs several processes
                raise MissingProcessesError((0,), self._seconds, reason)
            if self._seconds >= word:
                word += _WORD
                self._call.told((0,), self._seconds)
            time.sleep(_RETRY)

    def _wait(self, connection: Connection) -> None:
        connection.socket.settimeout(_WORD)
        silent = True
        while True:
            try:
                lines = connection.receive()
                if any([self._take(connection, line) for line in lines or ()]):
                    return
            except TimeoutError:
                # It is there and says nothing: stopped, or no process of this project.
                limit = self._call.alone if silent else self._call.timeout
                if self._seconds > limit:
                    # no-catalogue: needs several processes
                    raise MissingProcessesError((0,), self._seconds, "it says nothing") from None
                continue
            except (KeyError, TypeError, ValueError):
                # no-catalogue: needs several processes
                raise ProcessConflictError(self._something_else()) from None
            except OSError as error:
                # no-catalogue: needs several processes
                raise MissingProcessesError((0,), self._seconds, str(error)) from None
            if lines is None:
                # One that ended while it waited; or a service that took this for an error.
                reason = "it closed the connection"
                # no-catalogue: needs several processes
                raise MissingProcessesError((0,), self._seconds, reason) from None
            silent = False

    def _take(self, connection: Connection, said: dict[str, Any]) -> bool:
        """Whether all are here."""
        if "conflict" in said:
            # no-catalogue: needs several processes
            raise ProcessConflictError(printable(str(said["conflict"])))
        if "absent" in said:
            # no-catalogue: needs several processes
            raise MissingProcessesError(_numbers(said["absent"]), float(said["seconds"]))
        if "missing" in said and said["seconds"] >= _WORD:
            self._call.told(_numbers(said["missing"]), float(said["seconds"]))
        if "confirm" in said:
            connection.send(here=True)
        return "all_here" in said

    def _something_else(self) -> str:
        host, port = self._call.coordinator
        return (
            f"at {host}:{port} something else than process 0's roll call answers: another program, "
            "or a coordination service whose processes have all come; end it, or use another port"
        )

    def _await_service(self) -> None:
        """Waits for process 0's service, for JAX's client is slow to try again."""
        end = time.monotonic() + _HELLO
        while time.monotonic() < end:
            try:
                connect(self._call.coordinator).close()
            except OSError:
                time.sleep(_RETRY / 10)
            else:
                return
