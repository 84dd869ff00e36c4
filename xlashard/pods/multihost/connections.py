"""TCP connections between processes, and detection of processes that exit or are killed.

Messages are JSON objects, one per line. The kernel closes a connection when its process ends,
however it ends. A process that ends normally sends a goodbye first, so a connection that closes
without one belongs to a process that was killed. A process that is stopped, and a machine that
vanishes from the network, close nothing: processes also send beats, and one that is silent for the
heartbeat timeout counts as gone. JAX's coordination service has heartbeats, too, but aborts all
processes after them, with the exit code of a crash; they take over if these threads hang.

A process that ends because of an error reports the error with its goodbye, because its peers may be
waiting for it in a collective, which no exception can interrupt.
"""

import contextlib
import errno
import json
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from xlashard.core.processes.stack_dump import OWN_THREADS
from xlashard.support.background import end_thread
from xlashard.support.documents import decode, parse_json
from xlashard.support.formatting import printable
from xlashard.support.lazily import dataclass

ATTEMPT = 2.0
"""Timeout of one connection attempt, in seconds."""

# Limits for the host name (characters) and for numbers in a process identity.
_LONGEST_HOST, _LARGEST_NUMBER = 255, 1 << 31

# Maximum length of a line, in bytes.
_LONGEST = 1 << 20


# Beats per timeout.
_BEATS = 8


# TCP keepalive: idle seconds before the first probe, seconds between probes, and failed probes
# before the connection is considered dead.
_IDLE, _INTERVAL, _PROBES = 60, 10, 6

_CLOSED = "is dead: its connection closed before its end"


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity that a process reports for itself.

    Attributes:
        process: Process index.
        count: Number of processes that it expects.
        host: Host name.
        pid: Process id on that host.
        secured: Whether it has TLS certificates for the coordination service.
        versions: Versions of the packages that have to be equal; empty if unknown.
        code: Digests of the files of the program, by module.
    """

    process: int
    count: int
    host: str
    pid: int
    secured: bool = False
    versions: str = ""
    code: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"pid {self.pid} on {printable(self.host)}"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "ProcessIdentity":
        """Parse the identity in a JSON object.

        Raises:
            ValueError: The object does not describe a process.
        """
        identity = decode(cls, values)
        numbers = (identity.process, identity.count, identity.pid)
        if max(map(abs, numbers)) >= _LARGEST_NUMBER or len(identity.host) > _LONGEST_HOST:
            raise ValueError("no such process")  # no-catalogue: needs several processes
        return identity


@dataclass
class Connection:
    """Line-based connection to another process.

    Attributes:
        socket: The underlying socket.
        caller: Identity of the peer, once it is known.
        since: Monotonic time at which the connection was made.
    """

    socket: socket.socket
    caller: ProcessIdentity | None = None
    since: float = field(default_factory=time.monotonic)
    _unread: bytes = b""

    @property
    def peer(self) -> str:
        """Address of the peer."""
        try:
            return address_text(self.socket.getpeername()[:2])
        except OSError:
            return "an unknown address"

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the objects received since the last call; None if the peer closed the connection.

        Raises:
            ValueError: The peer sent something other than lines of JSON objects.
        """
        received = self.socket.recv(1 << 16)
        if not received:
            return None
        *lines, self._unread = (self._unread + received).split(b"\n")
        if len(self._unread) > _LONGEST or (self._unread and self._unread[:1] != b"{"):
            raise ValueError("not a line of JSON")  # no-catalogue: needs several processes
        messages = [parse_json(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("not an object of JSON")  # no-catalogue: needs several processes
        return messages

    def send(self, **message: Any) -> None:
        """Send one JSON object; a peer that is already gone is ignored."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def send_if_possible(self, **message: Any) -> None:
        """Send one short JSON object if the peer has room for it."""
        with contextlib.suppress(OSError):
            self.socket.send(json.dumps(message).encode() + b"\n", socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def address_text(address: tuple[str, int]) -> str:
    """Format host and port as an address."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: tuple[str, int]) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
        OSError: The address is in use, or does not belong to this machine.
    """
    try:
        return _listener(address, reuse_port=False)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        try:
            connect(address).close()
        except OSError:
            # A launcher that reserved the port holds it until a process listens there.
            return _listener(address, reuse_port=True)
        raise


def _listener(address: tuple[str, int], *, reuse_port: bool) -> socket.socket:
    family, *_, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(
            place,
            family=family,
            backlog=socket.SOMAXCONN,
            reuse_port=reuse_port,
            dualstack_ipv6=family == socket.AF_INET6 and socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        # Python adds the address, which callers name themselves, unless a name stands for it.
        resolved = "" if place[0] == address[0] else f" {place[0]}"
        # no-catalogue: needs a port or an address of another program
        raise OSError(error.errno, f"{os.strerror(error.errno or 0)}{resolved}") from None


def connect(address: tuple[str, int]) -> socket.socket:
    """Return a socket connected to an address.

    Raises:
        OSError: No process listens there.
    """
    connection = socket.create_connection(address, timeout=ATTEMPT)
    if connection.getsockname() == connection.getpeername():
        # On one machine the kernel may choose the destination as the source port.
        connection.close()
        # no-catalogue: needs a port collision
        raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
    return connection


class LivenessMonitor:
    """Connections of this process to its peers.

    Args:
        connections: Connection of each peer, from the startup barrier.
        gone: Called in a background thread with the processes that disappeared, and how that was
            noticed.
        failed: Called in a background thread with a process that has ended and its error; "" if its
            program completed.
        timeout: Seconds without a message after which a peer counts as gone.

    Attributes:
        leaving: Event that is set once this process has sent its goodbye.
    """

    def __init__(
        self,
        connections: dict[int, Connection],
        gone: Callable[[tuple[int, ...], str], None],
        failed: Callable[[int, str], None] = lambda process, error: None,
        timeout: float = math.inf,
    ) -> None:
        self._connections = dict(connections)
        self._timeout = timeout
        self._ended: set[int] = set()
        self._all_ended = threading.Event()
        self.leaving = threading.Event()
        self._gone = gone
        self._failed = failed
        self._have_failed: set[int] = set()
        for connection in connections.values():
            _keep_open(connection.socket)
        # A forked child would keep the connections open after this process is gone.
        os.register_at_fork(after_in_child=self._close)
        self._stopped, self._wake = socket.socketpair()
        # Not stopped at exit, but by `stop`: peers can fail during JAX's own shutdown too.
        self._thread = threading.Thread(target=self._watch, name=f"{OWN_THREADS}lines", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the background thread, before Python finalizes."""
        with contextlib.suppress(OSError):
            end_thread(self._thread, lambda: self._wake.send(b"."))

    def goodbye(self, wait: float = 0, error: str | None = None) -> None:
        """Announce that this process ends normally, so that peers do not report it as gone.

        Args:
            wait: Maximum number of seconds to wait for the peers to end first.
            error: Error that ends this process, or "" if its program completed. None if the peers
                already have it.
        """
        self.leaving.set()
        me = {} if error is None else {"failed": error}
        for connection in self._connections.values():
            connection.send(goodbye=True, **me)
        self._all_ended.wait(wait)

    def end_failed(self) -> None:
        """Notify failed peers that still wait in JAX's shutdown that process 0 ends."""
        for process in self._have_failed & set(self._connections):
            self._connections[process].send(gone=[0])

    def _close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._stopped.close()
        self._wake.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, connection in self._connections.items():
                selector.register(connection.socket, selectors.EVENT_READ, process)
            selector.register(self._stopped, selectors.EVENT_READ)
            interval = None if self._timeout == math.inf else self._timeout / _BEATS
            last_messages = dict.fromkeys(self._connections, time.monotonic())
            beat = before = time.monotonic()
            while True:
                ready = selector.select(interval)
                now = time.monotonic()
                if interval is not None and now - before > 2 * interval:
                    # This process was stopped, or had no processor: its peers are not to blame.
                    last_messages = dict.fromkeys(last_messages, now)
                before = now
                for key, _ in ready:
                    if key.data is None:
                        return
                    last_messages[key.data] = now
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                        del last_messages[key.data]
                if interval is not None and now - beat >= interval:
                    beat = now
                    self._exchange_beats(last_messages, now)

    def _exchange_beats(self, last_messages: dict[int, float], now: float) -> None:
        """Send a beat to the peers, and report those that are silent."""
        for process in last_messages.keys() - self._ended:
            # A peer that reads nothing must not block this thread; its buffer is full of beats.
            self._connections[process].send_if_possible(beat=True)
        silent = tuple(
            p
            for p in last_messages
            if p not in self._ended and now - last_messages[p] > self._timeout
        )
        if silent:
            self._report_gone(silent, f"is gone: it was silent for {self._timeout:g} s")

    def _hear(self, process: int) -> bool:
        """Handle received messages; return whether the connection is still open."""
        connection = self._connections[process]
        try:
            messages = connection.receive()
        except ConnectionResetError:
            messages = None
        except (OSError, ValueError):
            return False  # A network error: JAX's heartbeats decide whether the peer is gone.
        if messages is None:
            # Without process 0 the coordination service is gone, and JAX's client terminates this
            # process if it is still running, whether process 0 ended normally or not.
            if process not in self._ended or (process == 0 and not self.leaving.is_set()):
                self._report_gone((process,), _CLOSED)
            return False
        for line in messages:
            failed = line.get("process", process)
            if "failed" in line and type(failed) is int:
                self._fail(failed, printable(str(line["failed"])))
            if "goodbye" in line:
                self._end(process)
            gone = line.get("gone")
            if isinstance(gone, list) and gone and all(type(number) is int for number in gone):
                self._report_gone(tuple(gone), printable(str(line.get("how", _CLOSED))))
        return True

    def _end(self, *processes: int) -> None:
        self._ended.update(processes)
        if self._ended >= set(self._connections):
            self._all_ended.set()

    def _fail(self, process: int, error: str) -> None:
        if error:
            self._have_failed.add(process)
        if 0 not in self._connections:
            for other, connection in self._connections.items():
                if other != process and other not in self._ended:
                    connection.send(failed=error, process=process)
        self._failed(process, error)

    def _report_gone(self, processes: tuple[int, ...], how: str) -> None:
        self._end(*processes)
        if 0 not in self._connections:  # Only process 0 is connected to all processes.
            for process, connection in self._connections.items():
                if process not in self._ended:
                    connection.send(gone=processes, how=how)
        self._gone(processes, how)


def _keep_open(connection: socket.socket) -> None:
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": _IDLE, "TCP_KEEPINTVL": _INTERVAL, "TCP_KEEPCNT": _PROBES}
    for name, value in options.items():
        # Each platform supports a subset of the options.
        with contextlib.suppress(OSError, AttributeError):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
