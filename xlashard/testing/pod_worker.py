"""Main loop of a worker, which serves pickled requests of its launcher over a socket."""

import os
import pickle
import socket
import struct
import sys
import traceback
from dataclasses import dataclass
from typing import Any, Self

import jax

from xlashard._jax.runtime.coordination import join
from xlashard.config import read_flags
from xlashard.testing.function_lookup import FunctionName, find

# Seconds for the other processes to join, and for an unresponsive one.
_JOIN_TIMEOUT, _HEARTBEAT = 300, 100


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
        return cls(text, error if travels(error) else None)


def place_of(error: BaseException) -> str:
    """Return the location at which an exception was raised: `file:line`."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def travels(value: object) -> bool:
    """Return True if a value can be pickled and unpickled; some exceptions cannot be unpickled."""
    try:
        pickle.loads(pickle.dumps(value))
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
        values = []
        while len(self._unread) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._unread)[0]
            if len(self._unread) < end:
                break
            values.append(pickle.loads(self._unread[_LENGTH.size : end]))
            self._unread = self._unread[end:]
        return values


def receive(channel: socket.socket) -> Any:
    """Return the next value.

    Raises:
        EOFError: The peer has closed the connection.
    """
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    return pickle.loads(_exactly(channel, length))


def _exactly(channel: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        piece = channel.recv(min(size - len(received), 1 << 20))
        if not piece:
            raise EOFError  # no-catalogue: caught: the launcher has ended
        received += piece
    return bytes(received)


@dataclass(frozen=True)
class FunctionCall:
    """Request to call a function and return its result.

    Attributes:
        function: The function.
        arguments: Pickled positional and keyword arguments, unpickled after the module is imported.
    """

    function: FunctionName
    arguments: bytes


@dataclass(frozen=True)
class ChannelHandover:
    """Request to hand the channel over to a function for good: `function(channel, setup)`."""

    function: FunctionName
    setup: Any


def main(channel: socket.socket) -> None:
    """Join the pod, then serve requests until the launcher exits."""
    channel.sendall(pack(_join()))
    try:
        while True:
            request = receive(channel)
            if isinstance(request, ChannelHandover):
                find(request.function)(channel, request.setup)
            else:
                channel.sendall(_packed(_call(request)))
    except EOFError:
        # Skip the normal shutdown, in which JAX would wait for the other processes.
        os._exit(0)


def _join() -> Reply:
    try:
        place = read_flags(os.environ).pod
        assert place is not None, "the launcher sets the pod variables"
        at = place.coordinator
        join(
            at,
            bind=at,
            processes=place.processes,
            process_id=place.process_id,
            timeout=_JOIN_TIMEOUT,
            heartbeat=_HEARTBEAT,
        )
        jax.devices()
    except Exception as error:
        return Reply(False, RemoteException.of(error))
    return Reply(True, None)


def _call(request: FunctionCall) -> Reply:
    try:
        function = find(request.function)
        args, keywords = pickle.loads(request.arguments)
        return Reply(True, function(*args, **keywords))
    except BaseException as error:
        return Reply(False, RemoteException.of(error), place_of(error))
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def _packed(reply: Reply) -> bytes:
    try:
        return pack(reply)
    except Exception as error:
        kind = type(reply.value)
        return pack(
            Reply(
                False,
                f"returned {kind.__module__}.{kind.__qualname__}, which cannot be pickled "
                f"({type(error).__name__}: {error}); return Python values or NumPy arrays of "
                "local data: np.asarray(x.addressable_data(0))",
            )
        )
