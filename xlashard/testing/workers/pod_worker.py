"""Main loop of a worker, which serves the requests of its launcher."""

import os
import pickle
import socket
import sys
from dataclasses import dataclass
from typing import Any

import jax

from xlashard._jax.runtime.coordination import InitializeOptions, join
from xlashard.config import read_flags
from xlashard.testing.workers.channel import RemoteException, Reply, pack, place_of, receive
from xlashard.testing.workers.function_lookup import FunctionName, find

# Seconds for the other processes to join, and for an unresponsive one.
_JOIN_TIMEOUT, _HEARTBEAT = 300, 100


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
            InitializeOptions(
                at, at, place.processes, place.process_id, None, _JOIN_TIMEOUT, _HEARTBEAT
            )
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
