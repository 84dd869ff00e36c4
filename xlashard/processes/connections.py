"""TCP connections between processes, one JSON object per line. Independent of JAX."""

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
"""Timeout of one connection attempt, in seconds."""

# Limits for the host name (characters) and for numbers in a process identity.
_LONGEST_HOST, _LARGEST_NUMBER = 255, 1 << 31

# Maximum length of a line, in bytes.
_LONGEST = 1 << 20


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity that a process reports for itself.

    Attributes:
        process: Process index.
        count: Number of processes that it expects.
        host: Host name.
        pid: Process id on that host.
        secured: Whether it has TLS certificates for the coordination service.
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
        """Parse the identity in a JSON object.

        Raises:
            ValueError: The object does not describe a process.
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
            raise ValueError(
                "the line does not identify a process"
            )  # no-catalogue: needs several processes
        return cls(process, count, host, pid, secured)  # pyright: ignore[reportArgumentType]


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
            host, port, *_ = self.socket.getpeername()
        except OSError:
            return "an unknown address"
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the objects received since the last call; None if the peer closed the connection.

        Raises:
            ValueError: The peer sent something other than lines of JSON objects.
        """
        found = self.socket.recv(1 << 16)
        if not found:
            return None
        *lines, self._unread = (self._unread + found).split(b"\n")
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

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def listen(address: tuple[str, int]) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
        OSError: The address is in use, or does not belong to this machine.
    """
    try:
        return _bound(address, socket.SO_REUSEADDR)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        try:
            connect(address).close()
        except OSError:
            # A launcher that reserved the port holds it until a process listens there.
            return _bound(address, socket.SO_REUSEPORT)
        raise


def _bound(address: tuple[str, int], reuse: int) -> socket.socket:
    family, *_, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # An earlier run may leave the address in TIME_WAIT for minutes.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, reuse, 1)
        listener.bind(place)
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


def connect(address: tuple[str, int]) -> socket.socket:
    """Return a socket connected to an address.

    Raises:
        OSError: No process listens there.
    """
    made = socket.create_connection(address, timeout=ATTEMPT)
    if made.getsockname() == made.getpeername():
        # On one machine the kernel may choose the destination as the source port.
        made.close()
        # no-catalogue: needs a port collision
        raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
    return made
