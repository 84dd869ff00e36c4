"""Import JAX once, then fork a process for each client: `server.py ADDRESS`.

Ends, and kills its forked processes, when its standard input does. It never starts a JAX backend
and has one thread, so that its forks are safe.
"""

import array
import atexit
import contextlib
import faulthandler
import gc
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
from pathlib import Path
from typing import Any, NoReturn

# Third-party imports of xlashard. Not xlashard itself, which reads its environment at import.
PRELOADED = (
    "jax",
    "jax.experimental.layout",
    "jax.experimental.multihost_utils",
    "rich.console",
)
# Variables that Python and JAX read when they start, and that a forked process reads again.
OPTIONS_OF_PYTHON = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER")
OPTIONS_OF_JAX = {
    "JAX_COMPILATION_CACHE_DIR": str,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": float,
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": int,
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": str,
}
_MOST_DESCRIPTORS = 64


class Server:
    """Server that forks a process for each client, and reports its end.

    Args:
        address: The path of the socket to listen on.
    """

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)
        # By the descriptor that becomes readable when the process ends.
        self._running: dict[int, tuple[int, socket.socket]] = {}

    def run(self) -> dict[str, Any] | None:
        """Serve until standard input ends.

        Returns:
            In a forked process its request; in the server None, when all is over.
        """
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    request = self._fork()
                    if request is not None:
                        return request
                elif key.fd == 0:
                    for pid, _ in self._running.values():
                        _signal_group(pid, signal.SIGKILL)
                    return None
                elif key.fd in self._running:
                    self._report_end(key.fd)
                elif key.data in self._running:
                    self._pass_on(key.fileobj, self._running[key.data][0])

    def _fork(self) -> dict[str, Any] | None:
        client, _ = self._listener.accept()
        request = _receive(client)
        if request is None:
            client.close()
            return None
        pid = os.fork()
        if not pid:
            client.close()
            self._close()
            return request
        for number in request["received"]:
            os.close(number)
        end = os.pidfd_open(pid)
        self._running[end] = (pid, client)
        self._selector.register(end, selectors.EVENT_READ)
        self._selector.register(client, selectors.EVENT_READ, end)
        return None

    def _close(self) -> None:
        self._selector.close()
        self._listener.close()
        for end, (_, client) in self._running.items():
            os.close(end)
            client.close()

    def _report_end(self, end: int) -> None:
        pid, client = self._running.pop(end)
        self._selector.unregister(end)
        os.close(end)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        with contextlib.suppress(KeyError):  # A killed client is no longer listened to.
            self._selector.unregister(client)
        client.close()

    def _pass_on(self, client: Any, pid: int) -> None:
        try:
            signals = client.recv(64)
        except ConnectionResetError:
            signals = b""
        if not signals:  # The client was killed.
            self._selector.unregister(client)
            signals = bytes([signal.SIGKILL])
        for number in signals:
            _signal_group(pid, number)


def _receive(client: socket.socket) -> dict[str, Any] | None:
    size = client.recv(8, socket.MSG_WAITALL)
    if not size:
        return None  # A probe.
    space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
    _, ancillary, _, _ = client.recvmsg(1, space)
    received = array.array("i")
    for _, _, data in ancillary:
        received.frombytes(data)
    request = json.loads(client.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL))
    return {**request, "received": list(received)}


def become(request: dict[str, Any]) -> NoReturn:
    """Take over the client's request, and run its program."""
    os.setsid()
    _take_descriptors(request["received"], request["descriptors"])
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(request["environment"])
    _open_streams()
    os.chdir(request["folder"])
    _read_options()
    status, interrupted = 0, False
    try:
        _run(*request["words"])
    except SystemExit as end:
        status = _status(end.code)
    except KeyboardInterrupt:
        _show_error()
        interrupted = True
    except Exception:
        _show_error()
        status = 1
    _end(status, interrupted=interrupted)


def _status(code: object) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _end(status: int, *, interrupted: bool) -> NoReturn:
    """End as Python does, but for its last step, in which it takes the interpreter apart.

    Before Python 3.14 a daemon thread that comes back from C++ in that step can abort the process.
    """
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def _take_descriptors(received: list[int], numbers: list[int]) -> None:
    # First out of the way of the numbers that they are to have.
    spare = max([*numbers, *received]) + 1
    for number in received:
        os.dup2(number, spare + number)
        os.close(number)
    for source, number in zip(received, numbers, strict=True):
        os.dup2(spare + source, number)
        os.close(spare + source)


def _open_streams() -> None:
    """Replace the standard streams, which have cached properties of the server's descriptors."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),
            errors=errors,
            line_buffering=number == 2 or raw.isatty(),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _read_options() -> None:
    """Apply the environment variables that Python and JAX read at the start."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [os.path.abspath(folder) for folder in folders if folder]
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    for name in OPTIONS_OF_JAX.keys() & os.environ.keys():
        sys.modules["jax"].config.update(name.lower(), OPTIONS_OF_JAX[name](os.environ[name]))


def _run(option: str, *rest: str) -> None:
    sys.orig_argv[:] = [sys.executable, option, *rest]
    # It stays the main module to the end, for threads and exit handlers.
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if option == "-m":
        sys.argv[:] = rest
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(rest[0])  # pyright: ignore[reportAttributeAccessIssue]
    elif option == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path[0] = ""
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif option.startswith("-"):
        sys.exit(f"tests.fork_server runs no Python with the option {option}")
    else:
        sys.argv[:] = [option, *rest]
        sys.path[0] = os.path.dirname(os.path.abspath(option))
        vars(main)["__file__"] = option
        exec(compile(Path(option).read_bytes(), option, "exec"), vars(main))


def _show_error() -> None:
    """Print the error as Python does at the end of a program, without the frames of this file."""
    kind, error, frames = sys.exc_info()
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        frames = frames.tb_next
    assert kind is not None and error is not None
    sys.excepthook(kind, error.with_traceback(frames), frames)


def _signal_group(pid: int, number: int) -> None:
    # Until it leads a group of its own, a process that was just forked is alone.
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    for _name in PRELOADED:
        __import__(_name)
    gc.freeze()
    _request = Server(sys.argv[1]).run()
    if _request is not None:
        become(_request)
