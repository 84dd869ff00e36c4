"""Main loop of a worker, which serves pickled requests of its launcher over a socket.

Functions are sent by module and qualified name, and found by them in the worker.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import pickle
import runpy
import socket
import struct
import sys
import traceback
import types
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import jax

from xlashard._jax.runtime.coordination import join
from xlashard.config import read_flags
from xlashard.errors import ArgumentError
from xlashard.support.background import flush_output

_MAIN = "__main__"
# Module name under which a worker runs the main program: only its definitions run.
_MAIN_IN_WORKER = "__mp_main__"
# File that is being imported to look up a function.
_SEARCHED: ContextVar[str | None] = ContextVar("_SEARCHED", default=None)


@dataclass(frozen=True)
class FunctionName:
    """Location of a function.

    Attributes:
        module: Name of its module.
        name: Qualified name in the module.
        file: File of the module, if it has one.
    """

    module: str
    name: str
    file: str | None


def name_of(function: Callable[..., Any]) -> FunctionName:
    """Return the name by which workers find a function.

    Args:
        function: Any callable defined in a module.

    Raises:
        ArgumentError: The function cannot be found by a name.
    """
    # Some wrappers carry the name only on the wrapped function.
    named = function if hasattr(function, "__qualname__") else inspect.unwrap(function)
    module_name = getattr(named, "__module__", None)
    name = getattr(named, "__qualname__", None)
    if not callable(function) or not isinstance(module_name, str) or not isinstance(name, str):
        raise ArgumentError(
            f"pod.run takes a function, not {_an(type(function).__name__)}; write "
            "pod.run(work, 3), with `def work(x):` in a module"
        )
    _check_is_no_piece_of_another(function, name)
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    if module_name == _MAIN and (file is None or not Path(file).is_file()):
        raise ArgumentError(
            f"{name} is defined in an interactive session, which the processes of a pod cannot "
            "import; move it to a file, such as work.py, and write: from work import " + name
        )
    if _find(module, name) is not function:
        raise ArgumentError(
            f"{module_name}.{name} is not the function passed to pod.run (it has been decorated "
            "or replaced since), but the processes of a pod find functions by name; pass the "
            f"function of that name: pod.run({name})"
        )
    return FunctionName(module_name, name, file)


def _check_is_no_piece_of_another(function: Callable[..., Any], name: str) -> None:
    if inspect.ismethod(function):
        raise ArgumentError(
            f"{name} is a bound method, but the processes of a pod do not have the object; define "
            "a module-level function that creates the object, and pass that function: "
            "pod.run(work)"
        )
    if "<locals>" not in name and "<lambda>" not in name:
        return
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f" (in {code.co_filename}, line {code.co_firstlineno})" if code else ""
    kind = "a lambda" if "<lambda>" in name else f"{name.rpartition('.')[2]}, defined in a function"
    free = ", ".join(getattr(code, "co_freevars", ()))
    raise ArgumentError(
        f"pod.run was given {kind}{place}. The processes of a pod find functions by their name in "
        "their module; write it with `def work(...)` at the top of the module, and pass "
        + (f"what it takes from around ({free}) as arguments: " if free else "that: ")
        + f"pod.run(work{', ' + free if free else ''})"
    )


def _an(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def _find(module: types.ModuleType | None, name: str) -> Any:
    try:
        return attrgetter(name)(module)
    except AttributeError:
        return None


def unwrap_partial(
    function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the function inside a `functools.partial`, with all arguments."""
    while isinstance(function, functools.partial):
        args, keywords = (*function.args, *args), {**function.keywords, **keywords}
        function = function.func
    return function, args, keywords


def find(name: FunctionName) -> Callable[..., Any]:
    """Return the function of a name; runs in a worker."""
    token = _SEARCHED.set(name.file or name.module)
    try:
        module = _module(name)
    finally:
        _SEARCHED.reset(token)
    return attrgetter(name.name)(module)


def check_is_no_import(what: str) -> None:
    """Check that a worker is not importing the module that starts its pod.

    The import would start another pod, whose workers import the module again, without end.

    Args:
        what: Name of the function that is about to start a pod.

    Raises:
        ArgumentError: A worker is importing the module.
    """
    file = _SEARCHED.get()
    if file is None:
        return
    raise ArgumentError(  # no-catalogue: needs processes that fail
        f"{what} was called while a process of a pod imports {Path(file).name} to find a function "
        "in it, and would start pods without end; start the pod in a function, or below if "
        "__name__ == '__main__':, such as:\n"
        "  if __name__ == '__main__':\n"
        f"      {what}(...)"
    )


def _module(name: FunctionName) -> types.ModuleType:
    if name.module == _MAIN:
        return _main_program(str(name.file))
    try:
        module = importlib.import_module(name.module)
    except ImportError:
        module = None
    if name.file is None and module is not None:
        return module
    origin = getattr(module, "__file__", None)
    if module is not None and origin is not None and Path(origin) == Path(str(name.file)):
        return module
    # A test module, or another module that its folder does not make importable by name.
    return _load(name.module, str(name.file))


def _load(name: str, file: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        # no-catalogue: needs a module that only the parent can import
        raise ImportError(f"no module {name} in {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _main_program(file: str) -> types.ModuleType:
    """Return the program that started the pod as a module; pickles refer to it as `__main__`."""
    known = sys.modules.get(_MAIN_IN_WORKER)
    if known is not None:
        return known
    module = types.ModuleType(_MAIN_IN_WORKER)
    vars(module).update(runpy.run_path(file, run_name=_MAIN_IN_WORKER))
    sys.modules[_MAIN_IN_WORKER] = sys.modules[_MAIN] = module
    return module


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
        damage: Reasons why the worker should serve no other request.
    """

    well: bool
    value: Any
    place: str = ""
    damage: tuple[str, ...] = ()


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
        self._unread = bytearray()

    def feed(self, text: bytes) -> list[Any]:
        """Return the values completed by these bytes."""
        self._unread += text
        values = []
        while len(self._unread) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._unread)[0]
            if len(self._unread) < end:
                break
            values.append(pickle.loads(self._unread[_LENGTH.size : end]))
            del self._unread[:end]
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
        flush_output()


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
