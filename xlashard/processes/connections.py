"""Connections between processes, without JAX: listening, connecting, and lines of JSON."""

import errno
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from xlashard.documents import parse_json
from xlashard.lazily import dataclass
from xlashard.wording import printable

ATTEMPT = 2.0
"""Seconds that one attempt to connect may take."""

# Characters of a host's name, and the size of numbers, that a process may have.
_LONGEST_HOST, _LARGEST_NUMBER = 255, 1 << 31

# Bytes of a line at most.
_LONGEST = 1 << 20


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, as it says who it is.

    Attributes:
        process: Its number.
        count: How many it takes part with.
        host: The name of its machine.
        pid: Its number there.
        secured: Whether it has certificates for the service.
    """

    process: int
    count: int
    host: str
    pid: int
    secured: bool = False

    def __str__(self) -> str:
        return f"pid {self.pid} on {printable(self.host)}"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "ProcessIdentity":
        """Return the process that a line of JSON names.

        Raises:
            ValueError: The line names none.
        """
        process, count, host, pid = (values.get(n) for n in ("process", "count", "host", "pid"))
        secured = values.get("secured", False)
        numbers = (process, count, pid)
        if (
            not all(type(n) is int and abs(n) < _LARGEST_NUMBER for n in numbers)
            or type(host) is not str
            or len(host) > _LONGEST_HOST
            or type(secured) is not bool
        ):
            raise ValueError("no process is named")  # no-catalogue: needs several processes
        return cls(process, count, host, pid, secured)  # pyright: ignore[reportArgumentType]


@dataclass
class Connection:
    """A connection to another process, read by lines.

    Attributes:
        socket: The connection.
        caller: Who is at the other end, once that is known.
        since: When it was made, by the monotonic clock.
    """

    socket: socket.socket
    caller: ProcessIdentity | None = None
    since: float = field(default_factory=time.monotonic)
    _unread: bytes = b""

    @property
    def peer(self) -> str:
        """The address at the other end."""
        try:
            host, port, *_ = self.socket.getpeername()
        except OSError:
            return "an unknown address"
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def receive(self) -> list[dict[str, Any]] | None:
        """What has come since; None if the other end is closed.

        Raises:
            ValueError: Something came that no process says.
        """
        found = self.socket.recv(1 << 16)
        if not found:
            return None
        *lines, self._unread = (self._unread + found).split(b"\n")
        if len(self._unread) > _LONGEST or (self._unread and self._unread[:1] != b"{"):
            raise ValueError("not a line of JSON")  # no-catalogue: needs several processes
        said = [parse_json(line) for line in lines]
        if not all(isinstance(one, dict) for one in said):
            raise ValueError("not an object of JSON")  # no-catalogue: needs several processes
        return said

    def send(self, **said: Any) -> None:
        """Says something; one that is gone doesn't hear it."""
        try:
            self.socket.sendall(json.dumps(said).encode() + b"\n")
        except OSError:
            return

    def close(self) -> None:
        """Closes it."""
        self.socket.close()


def listen(address: tuple[str, int]) -> socket.socket:
    """A listener at an address.

    Raises:
        OSError: It is taken, or not one of this machine.
    """
    try:
        return _bound(address, socket.SO_REUSEADDR)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        try:
            connect(address).close()
        except OSError:
            # A launcher that has chosen the port keeps it until it is listened at.
            return _bound(address, socket.SO_REUSEPORT)
        raise


def _bound(address: tuple[str, int], reuse: int) -> socket.socket:
    family, *_, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # What an earlier run leaves behind for some minutes doesn't keep the address taken.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, reuse, 1)
        listener.bind(place)
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


def connect(address: tuple[str, int]) -> socket.socket:
    """A connection to an address.

    Raises:
        OSError: Nobody listens there.
    """
    made = socket.create_connection(address, timeout=ATTEMPT)
    if made.getsockname() == made.getpeername():
        # On one machine, the port that this end was given by chance can be the one that it tries.
        made.close()
        # no-catalogue: needs a port collision
        raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
    return made
