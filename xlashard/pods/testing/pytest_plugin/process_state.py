"""State of a worker that a test may change: restored after the test, or a reason for a new pod."""

import contextlib
import faulthandler
import gc
import logging
import os
import resource
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from xlashard._jax.runtime.coordination import backend_has_started, client
from xlashard._jax.runtime.global_state import changed_settings, entered_meshes, trace_context

# Seconds for threads that a test has started and that are about to end.
_JOIN = 0.1
# Packages whose import changes no setting.
_NEUTRAL = sys.stdlib_module_names | {"_pytest", "jax", "jaxlib", "numpy", "pytest", "xlashard"}
# A function replaced in the private modules of JAX would be found too, in three times the time.
_WATCHED = ("builtins", "jax", "numpy", "os", "time", "xlashard")
_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
_STREAMS = ("stdin", "stdout", "stderr", "excepthook", "displayhook", "breakpointhook")


@dataclass(frozen=True)
class _Setting:
    """Setting of the process that has a function to read it, and one to write it."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]

    def try_read(self) -> Any:
        try:
            return self.read()
        except OSError as error:  # The working directory was deleted.
            return error

    def restore(self, before: Any) -> str:
        """Write the earlier value if it differs; return why that failed, or ""."""
        if self.try_read() == before:
            return ""
        try:
            self.write(before)
        except Exception as error:
            return f"{self.name} cannot be restored ({type(error).__name__}: {error})"
        return ""


def _read_umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _write_items(target: Any, before: Mapping[Any, Any]) -> None:
    """Restore the items of a mapping that differ."""
    for name in target.keys() - before.keys():
        del target[name]
    for name, value in before.items():
        if name not in target or (target[name] is not value and target[name] != value):
            target[name] = value


def _write_limits(before: Mapping[int, tuple[int, int]]) -> None:
    for number, limits in before.items():
        if resource.getrlimit(number) != limits:
            resource.setrlimit(number, limits)


def _read_handlers() -> dict[signal.Signals, Any]:
    return {number: signal.getsignal(number) for number in signal.Signals}


def _write_handlers(before: Mapping[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _write_jax_settings(before: Mapping[str, Any]) -> None:
    for name, value in before.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)


def _read_logging() -> tuple[Any, ...]:
    return logging.root.level, logging.root.manager.disable, list(logging.root.handlers)


def _write_logging(before: tuple[Any, ...]) -> None:
    level, disabled, logging.root.handlers[:] = before
    logging.root.setLevel(level)
    logging.disable(disabled)


def _write_streams(before: tuple[Any, ...]) -> None:
    for name, value in zip(_STREAMS, before, strict=True):
        setattr(sys, name, value)


_JAX_SETTINGS = "the settings of JAX"
_SETTINGS = (
    # First, since a handler may run at any time.
    _Setting(
        "the timer",
        partial(signal.getitimer, signal.ITIMER_REAL),
        lambda before: signal.setitimer(signal.ITIMER_REAL, *before),
    ),
    _Setting("the signal handlers", _read_handlers, _write_handlers),
    _Setting(
        "the signal mask",
        partial(signal.pthread_sigmask, signal.SIG_BLOCK, ()),
        partial(signal.pthread_sigmask, signal.SIG_SETMASK),
    ),
    _Setting("the working directory", os.getcwd, os.chdir),
    _Setting("the environment", lambda: dict(os.environ), partial(_write_items, os.environ)),
    _Setting("the umask", _read_umask, os.umask),
    _Setting(
        "the resource limits",
        lambda: {number: resource.getrlimit(number) for number in _LIMITS},
        _write_limits,
    ),
    _Setting("sys.path", lambda: list(sys.path), lambda before: setattr(sys, "path", before)),
    _Setting(
        "sys.meta_path",
        lambda: list(sys.meta_path),
        lambda before: setattr(sys, "meta_path", before),
    ),
    _Setting("the trace function", sys.gettrace, sys.settrace),
    _Setting("sys.argv", lambda: list(sys.argv), lambda before: setattr(sys, "argv", before)),
    _Setting(
        "the streams and hooks of sys",
        lambda: tuple(getattr(sys, name) for name in _STREAMS),
        _write_streams,
    ),
    _Setting("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    _Setting("the garbage collector", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    _Setting("the root logger", _read_logging, _write_logging),
    _Setting("NumPy's error handling", np.geterr, lambda before: np.seterr(**before)),
    _Setting(
        "NumPy's print options",
        np.get_printoptions,
        lambda before: np.set_printoptions(**before),
    ),
    _Setting(_JAX_SETTINGS, lambda: dict(jax.config.values), _write_jax_settings),
    _Setting("the mesh", jax.sharding.get_mesh, jax.set_mesh),
)


class ProcessState:
    """State of this process, which the tests of a pod run in one after the other.

    A test whose changes can't be undone is a reason to end the process. Imports, caches and global
    variables of modules, random generators, daemon threads and idle threads of executors stay.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._forks = 0
        self._client = client()
        self._devices = jax.devices()
        # A test may close the standard descriptors; the next file that is opened takes their place.
        self._streams = [os.dup(number) for number in range(3)]
        self._descriptors = {
            number: identity for number in range(256) if (identity := _identify(number))
        }
        self._functions: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        os.register_at_fork(after_in_parent=self._count_fork)

    def _count_fork(self) -> None:
        self._forks += 1

    def watch_functions(self) -> None:
        """Record the functions of JAX and other modules, which conftest.py may have replaced."""
        self._functions = [
            (name, vars(module), {key: v for key, v in vars(module).items() if callable(v)})
            for name, module in list(sys.modules.items())
            if isinstance(module, types.ModuleType) and _is_watched(name)
        ]

    @contextlib.contextmanager
    def restoring(self) -> Iterator[list[str]]:
        """Restore the state after a test.

        Yields:
            A list, to which the reasons are added why no other test should run in this process.
        """
        reasons: list[str] = []
        values = [setting.try_read() for setting in _SETTINGS]
        modules, threads = dict(sys.modules), set(threading.enumerate())
        context, self._forks = trace_context(), 0
        try:
            with warnings.catch_warnings():
                yield reasons
        finally:
            if os.getpid() != self._pid:
                os._exit(0)  # A forked child, which has returned from the test.
            faulthandler.cancel_dump_traceback_later()
            self._restore_streams()
            imports = _restore_modules(modules)
            for setting, value in zip(_SETTINGS, values, strict=True):
                if imports and setting.name == "sys.meta_path":
                    continue  # Packages such as six find their modules by it.
                # A package that was imported may need the settings that it has changed.
                if imports and setting.name == _JAX_SETTINGS and setting.try_read() != value:
                    reasons.append(f"{setting.name} changed during the import of {imports[0]}")
                reasons.append(setting.restore(value))
            reasons += [*self._find_damage(), *_find_changed_context(context)]
            reasons += _find_threads(threads)
            reasons[:] = [reason for reason in reasons if reason]

    def _restore_streams(self) -> None:
        for number, saved in enumerate(self._streams):
            if (identity := _identify(saved)) and _identify(number) != identity:
                os.dup2(saved, number)

    def _find_damage(self) -> Iterator[str]:
        """Return what the test has broken for good."""
        if any(getattr(stream, "closed", False) for stream in (sys.stdout, sys.stderr)):
            yield "sys.stdout or sys.stderr was closed"
        closed = [n for n, before in self._descriptors.items() if _identify(n) != before]
        if closed:
            yield f"file descriptor {closed[0]} was closed"
        if self._forks and _has_children():
            yield "a forked child still runs"
        if client() is not self._client:
            yield "jax.distributed was shut down or initialized"
        if not backend_has_started() or jax.devices()[0] is not self._devices[0]:
            yield "the backend of JAX was replaced"
        for module, now, before in self._functions:
            for name, function in before.items():
                if now.get(name) is not function and not _is_registered(now.get(name)):
                    yield f"{module}.{name} was replaced"
                    return

    def run_collective(self) -> None:
        """Run a collective of all devices, as a test of whether the pod still works."""
        self._collective().block_until_ready()

    @cached_property
    def _collective(self) -> Any:
        mesh = jax.sharding.Mesh(np.array(self._devices), ("all",))
        # Without arguments and kept results, no array remains that a test could see.
        everywhere = jax.shard_map(
            lambda: jax.lax.psum(jax.lax.axis_index("all"), "all"),
            mesh=mesh,
            in_specs=(),
            out_specs=jax.P(),
        )
        return jax.jit(everywhere).lower().compile()


def _is_watched(name: str) -> bool:
    return name.partition(".")[0] in _WATCHED and "._" not in name


def _is_registered(function: Any) -> bool:
    """Return True for a function by which the first use of an `Array` replaces JAX's own."""
    namespace = getattr(function, "__globals__", {})
    return namespace.get("__name__", "").startswith("xlashard._jax.")


def _identify(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _restore_modules(before: dict[str, types.ModuleType]) -> list[str]:
    """Restore removed and replaced modules; return the packages that were imported since."""
    added = {name: module for name, module in list(sys.modules.items()) if name not in before}
    imports = [
        name
        for name, module in added.items()
        if getattr(module, "__spec__", None) and name.partition(".")[0] not in _NEUTRAL
    ]
    for name, module in added.items():
        # A stand-in for a module, or None, which refuses its import. Imported packages make some.
        if module is None or (not imports and _is_handmade(name, module)):
            del sys.modules[name]
    for name, module in before.items():
        if sys.modules.get(name) is not module:
            sys.modules[name] = module
    return imports


def _is_handmade(name: str, module: Any) -> bool:
    return "." not in name and getattr(module, "__spec__", None) is None


def _find_changed_context(before: Any) -> Iterator[str]:
    """Return settings of JAX that are still changed, such as those of contexts that are open."""
    now = trace_context()
    for name, *_ in changed_settings(before, now):
        yield f"{name} remains set in this thread"
    if entered_meshes(now) != entered_meshes(before):
        yield "a mesh remains entered"


def _find_threads(before: set[threading.Thread]) -> Iterator[str]:
    for thread in threading.enumerate():
        if thread in before or thread.daemon:
            continue
        thread.join(_JOIN)
        if thread.is_alive() and not _is_idle(thread):
            yield f"the thread {thread.name} still runs"


def _is_idle(thread: threading.Thread) -> bool:
    """Return True for a thread of an executor that waits for work."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_globals.get("__name__") == "concurrent.futures.thread"
