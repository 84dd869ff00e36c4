"""Startup barrier over TCP, before JAX's runtime starts.

JAX's client terminates its process, without an exception, if not all processes connect in time, and
does not report the missing ones. Processes therefore meet first, at the address where the
coordination service of process 0 will listen: each sends its identity, process 0 reports the
missing processes to all, and when all have arrived it releases the address for the service. The
connections stay open: see `connections`.

Messages are JSON objects, one per line. They contain no secrets and are validated only for
consistency: any client that reaches the address can take the place of a missing process, as with
the service itself.
"""

import logging
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from xlashard.core.processes.process_facts import ProcessFacts, describe_other_code
from xlashard.pods.multihost.connections import (
    ATTEMPT,
    Connection,
    ProcessIdentity,
    connect,
    listen,
)
from xlashard.support.formatting import format_processes, printable
from xlashard.support.lazily import dataclass

# Seconds between connection attempts, and between progress messages.
_RETRY, _WORD = 0.1, 1.0
# Seconds that a process has to send its identity, and to confirm once all have arrived.
_HELLO, _CONFIRM = 5.0, 20.0
# Maximum number of hosts whose dropped connections, or other code, are logged.
_LOGGED = 20

logger = logging.getLogger("xlashard.multihost")


@dataclass(frozen=True)
class StartupBarrier:
    """Parameters of the startup barrier.

    Attributes:
        me: Identity of this process.
        coordinator: Host and port at which the other processes reach process 0.
        bind: Host and port at which process 0 listens.
        alone: Seconds to wait while no other process has connected.
        timeout: Seconds to wait once another process has connected.
        on_wait: Called about once a second with the missing processes and the seconds waited so
            far.
    """

    me: ProcessIdentity
    coordinator: tuple[str, int]
    bind: tuple[str, int]
    alone: float
    timeout: float
    on_wait: Callable[[tuple[int, ...], float], None]


class MissingProcessesError(Exception):
    """Some processes did not arrive.

    Attributes:
        processes: Indices of the missing processes.
        seconds: How long this process waited.
        reason: Why process 0 could not be reached, if it is the missing one.
    """

    def __init__(self, processes: tuple[int, ...], seconds: float, reason: str = "") -> None:
        super().__init__(processes, seconds, reason)
        self.processes = processes
        self.seconds = seconds
        self.reason = reason


class ProcessConflictError(Exception):
    """Processes report inconsistent identities, or another program listens at the address."""


def wait_for_all(call: StartupBarrier) -> dict[int, Connection]:
    """Wait until all processes have arrived; return this process's connections by peer.

    Process 0 is connected to every other process, and each other process to process 0.

    Raises:
        MissingProcessesError: Some processes did not arrive in time.
        ProcessConflictError: The identities are inconsistent.
        OSError: Process 0 cannot listen at its address.
    """
    return _Coordinator(call).run() if call.me.process == 0 else _Participant(call).run()


class _Coordinator:
    """Process 0, to which the other processes connect."""

    def __init__(self, call: StartupBarrier) -> None:
        self._call = call
        self._began = time.monotonic()
        self._came: dict[int, Connection] = {}
        self._strangers: list[Connection] = []
        # Processes that were asked to confirm once all had arrived, and those that did.
        self._asked: set[int] = set()
        self._confirmed: set[int] = set()
        self._asked_since = self._began
        # Hosts whose connections were dropped because of an invalid message.
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
        other_code = self._describe_other_code()
        self._broadcast(all_here=True, other_code=other_code)
        _log_other_code(other_code)
        return self._came

    def _describe_other_code(self) -> list[str]:
        """Describe the processes whose files differ from those of most."""
        callers = [connection.caller for connection in self._came.values()]
        each = {c.process: c for c in [self._call.me, *callers] if c is not None}
        facts = {p: ProcessFacts(c.host, c.pid, {}, dict(c.code)) for p, c in each.items()}
        return [
            f"process {process} ({each[process]}) has other code: {text}"
            for process, text in sorted(describe_other_code(facts).items())
        ][:_LOGGED]

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
                self._broadcast(conflict=trouble)
                raise ProcessConflictError(trouble)  # no-catalogue: needs several processes
            if self._missing and seconds > (self._call.timeout if self._came else self._call.alone):
                self._broadcast(absent=self._missing, seconds=seconds)
                raise MissingProcessesError(
                    self._missing, seconds
                )  # no-catalogue: needs several processes
            if now >= word and self._missing:
                word = now + _WORD
                self._broadcast(missing=self._missing, seconds=seconds)
                self._call.on_wait(self._missing, seconds)
                for stranger in [s for s in self._strangers if now - s.since > _HELLO]:
                    self._leave(stranger)

    def _ask(self) -> bool:
        """Ask every connected process to confirm; return whether confirmations are missing.

        A foreign program that has taken a place does not confirm. Without this check JAX's client
        would wait for it silently, and then terminate this process.
        """
        for process in set(self._came) - self._asked:
            self._asked.add(process)
            self._asked_since = time.monotonic()
            self._came[process].send(confirm=True)
        return self._confirmed != set(self._came)

    def _silence_text(self) -> str:
        silent = sorted(set(self._came) - self._confirmed)
        silent_peers = (self._came[process] for process in silent)
        named = ", ".join(f"{peer.caller}, at {peer.peer}" for peer in silent_peers)
        return (
            f"{format_processes(silent)} of {self._call.me.count} ({named}) connected but has not "
            f"confirmed for {_CONFIRM:.0f} s: the process is suspended, or another program has "
            "taken its place; end it"
        )

    def _greet(self, listener: socket.socket) -> None:
        try:
            accepted = listener.accept()[0]
        except OSError:
            return  # The client is gone, or too many are connected: `_HELLO` drops some.
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
        """Admit the processes that a connection identifies; drop it on an invalid line."""
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
        """Log the first invalid line of each host, as a scanner may send thousands."""
        host = connection.peer.rpartition(":")[0]
        if host in self._dropped or len(self._dropped) >= _LOGGED:
            return
        self._dropped.add(host)
        name = f" ({connection.caller})" if connection.caller is not None else ""
        logger.warning(
            "process 0 of %d dropped a connection from %s%s that sent an invalid message, and "
            "continues to wait for %s",
            self._call.me.count,
            connection.peer,
            name,
            format_processes(self._missing) if self._missing else "all confirmations",
        )

    def _admit(self, connection: Connection, caller: ProcessIdentity) -> None:
        trouble = self._conflict(caller)
        if trouble:
            connection.send(conflict=trouble)
            self._broadcast(conflict=trouble)
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
                f"process {caller.process} ({caller}) expects {caller.count} processes, but "
                f"process 0 ({me}) expects {me.count}: start all with the same number of processes"
            )
        if caller.secured != me.secured:
            one, other = (caller, me) if caller.secured else (me, caller)
            return (
                f"process {one.process} ({one}) has TLS certificates (tls=), but process "
                f"{other.process} ({other}) has none: pass tls= in all processes"
            )
        arrival = self._came.get(caller.process)
        other = arrival.caller if arrival else me if caller.process == me.process else None
        if other is not None:
            return (
                f"two processes have process_id {caller.process}: {other} and {caller}; end the "
                "processes of an earlier run, and give each process its own process_id"
            )
        if caller.versions and me.versions and caller.versions != me.versions:
            return (
                f"process {caller.process} ({caller}) has {printable(caller.versions)}, but "
                f"process 0 ({me}) has {me.versions}: install the same versions on all hosts"
            )
        if not 0 < caller.process < me.count:
            return (
                f"a process ({caller}) has process_id {caller.process}, expected 0 to "
                f"{me.count - 1}"
            )
        return ""

    def _broadcast(self, **message: Any) -> None:
        for connection in self._came.values():
            connection.send(**message)


def _log_other_code(texts: Sequence[str]) -> None:
    for text in texts:
        logger.warning("%s. Copy the same files to all hosts", printable(text))


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


class _Participant:
    """Any process other than 0, which connects to process 0."""

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
                self._call.on_wait((0,), self._seconds)
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
                # The peer is silent: suspended, or not a process of this project.
                limit = self._call.alone if silent else self._call.timeout
                if self._seconds > limit:
                    # no-catalogue: needs several processes
                    raise MissingProcessesError((0,), self._seconds, "it sends nothing") from None
                continue
            except (KeyError, TypeError, ValueError):
                # no-catalogue: needs several processes
                raise ProcessConflictError(self._something_else()) from None
            except OSError as error:
                # no-catalogue: needs several processes
                raise MissingProcessesError((0,), self._seconds, str(error)) from None
            if lines is None:
                # The peer ended while this process waited, or a coordination service rejected the
                # message.
                reason = "it closed the connection"
                # no-catalogue: needs several processes
                raise MissingProcessesError((0,), self._seconds, reason) from None
            silent = False

    def _take(self, connection: Connection, message: dict[str, Any]) -> bool:
        """Handle one message; return whether all processes have arrived."""
        if "conflict" in message:
            # no-catalogue: needs several processes
            raise ProcessConflictError(printable(str(message["conflict"])))
        if "absent" in message:
            # no-catalogue: needs several processes
            raise MissingProcessesError(_numbers(message["absent"]), float(message["seconds"]))
        if "missing" in message and message["seconds"] >= _WORD:
            self._call.on_wait(_numbers(message["missing"]), float(message["seconds"]))
        if "confirm" in message:
            connection.send(here=True)
        _log_other_code([str(text) for text in message.get("other_code", ())])
        return "all_here" in message

    def _something_else(self) -> str:
        host, port = self._call.coordinator
        return (
            f"{host}:{port} is not served by the startup barrier of process 0, but by another "
            "program or by a coordination service whose processes have all joined; end it, or use "
            "another port"
        )

    def _await_service(self) -> None:
        """Wait for the service of process 0, because JAX's client is slow to retry."""
        end = time.monotonic() + _HELLO
        while time.monotonic() < end:
            try:
                connect(self._call.coordinator).close()
            except OSError:
                time.sleep(_RETRY / 10)
            else:
                return
