"""A worker: one process of a pod that does what its launcher asks, as all the others do."""

import os
import pickle
import socket
import sys
from dataclasses import dataclass
from typing import Any

import jax

from xlashard._jax.coordination import Joining, join
from xlashard.config import read_flags
from xlashard.testing.workers.channel import RemoteException, Reply, pack, place_of, receive
from xlashard.testing.workers.function_lookup import FunctionName, find

# Seconds for the other processes to come, and for one that doesn't answer.
_PATIENCE, _HEARTBEAT = 300, 100


@dataclass(frozen=True)
class FunctionCall:
    """A request to call a function and send back what it returns.

    Attributes:
        function: Which one.
        arguments: Its arguments and keyword arguments, pickled; read after its module.
    """

    function: FunctionName
    arguments: bytes


@dataclass(frozen=True)
class ChannelHandover:
    """A request to let a function have the channel for good: `function(channel, setup)`."""

    function: FunctionName
    setup: Any


def main(channel: socket.socket) -> None:
    """Joins the pod, then serves requests until the launcher is gone."""
    channel.sendall(pack(_join()))
    try:
        while True:
            request = receive(channel)
            if isinstance(request, ChannelHandover):
                find(request.function)(channel, request.setup)
            else:
                channel.sendall(_packed(_call(request)))
    except EOFError:
        # Not the ordinary end: JAX would wait there for the other processes.
        os._exit(0)


def _join() -> Reply:
    try:
        place = read_flags(os.environ).pod
        assert place is not None, "the launcher says where this is"
        at = place.coordinator
        join(Joining(at, at, place.processes, place.process_id, None, _PATIENCE, _HEARTBEAT))
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
                f"returned {kind.__module__}.{kind.__qualname__}, which can't be sent from "
                f"process to process ({type(error).__name__}: {error}); return Python values or "
                "NumPy arrays, of what this process holds: np.asarray(x.addressable_data(0))",
            )
        )
