"""Python values through the socket between a launcher and a worker, both of one user."""

import pickle
import socket
import struct
import traceback
from dataclasses import dataclass
from typing import Any, Self

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Reply:
    """What a worker answers to a request.

    Attributes:
        well: Whether it is as it should be; else the others have little time left.
        value: What was asked for, or what is said of the failure.
        place: Where it ended, if not as it should: where all end at the same place, they are still
            in step.
    """

    well: bool
    value: Any
    place: str = ""


@dataclass(frozen=True)
class RemoteException:
    """An exception of a worker.

    Attributes:
        traceback: As text.
        error: The exception; None where it can't be sent.
    """

    traceback: str
    error: BaseException | None

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """An exception with its traceback, without the frame of the worker that caught it."""
        frames = error.__traceback__ and error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        return cls(text, error if _travels(error) else None)


def place_of(error: BaseException) -> str:
    """Where an exception was raised: `file:line`."""
    found = traceback.extract_tb(error.__traceback__)
    return f"{found[-1].filename}:{found[-1].lineno}" if found else ""


def _travels(error: BaseException) -> bool:
    # Some exceptions can be pickled and not be read again.
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


def pack(value: object) -> bytes:
    """A value as bytes that say where they end."""
    text = pickle.dumps(value)
    return _LENGTH.pack(len(text)) + text


class Unpacker:
    """Puts together what arrives in pieces."""

    def __init__(self) -> None:
        self._unread = b""

    def feed(self, text: bytes) -> list[Any]:
        """The values that are complete with these bytes."""
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
    """The next value.

    Raises:
        EOFError: The other end is gone.
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
