"""Pickled Python values over a socket between a launcher and a worker of the same user."""

import pickle
import socket
import struct
import traceback
from dataclasses import dataclass
from typing import Any, Self

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Reply:
    """Reply of a worker to a request.

    Attributes:
        well: Whether the request succeeded; otherwise the other workers have little time left.
        value: The result, or a description of the failure.
        place: Location of the failure: workers that failed at the same location are still in step.
    """

    well: bool
    value: Any
    place: str = ""


@dataclass(frozen=True)
class RemoteException:
    """An exception raised in a worker.

    Attributes:
        traceback: Formatted traceback.
        error: The exception; None if it cannot be pickled.
    """

    traceback: str
    error: BaseException | None

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Capture an exception with its traceback, without the worker's own frame."""
        frames = error.__traceback__ and error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        return cls(text, error if _travels(error) else None)


def place_of(error: BaseException) -> str:
    """Return the location at which an exception was raised: `file:line`."""
    found = traceback.extract_tb(error.__traceback__)
    return f"{found[-1].filename}:{found[-1].lineno}" if found else ""


def _travels(error: BaseException) -> bool:
    # Some exceptions can be pickled but not unpickled.
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


def pack(value: object) -> bytes:
    """Serialize a value with a length prefix."""
    text = pickle.dumps(value)
    return _LENGTH.pack(len(text)) + text


class Unpacker:
    """Reassembles values that arrive in pieces."""

    def __init__(self) -> None:
        self._unread = b""

    def feed(self, text: bytes) -> list[Any]:
        """Return the values completed by these bytes."""
        self._unread += text
        found = []
        while len(self._unread) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._unread)[0]
            if len(self._unread) < end:
                break
            found.append(pickle.loads(self._unread[_LENGTH.size : end]))
            self._unread = self._unread[end:]
        return found


def receive(channel: socket.socket) -> Any:
    """Return the next value.

    Raises:
        EOFError: The peer has closed the connection.
    """
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    return pickle.loads(_exactly(channel, length))


def _exactly(channel: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = channel.recv(min(size - len(found), 1 << 20))
        if not piece:
            raise EOFError  # no-catalogue: caught: the launcher has ended
        found += piece
    return bytes(found)
