"""Restoration of what tests on a pod change in their process, or the reason for another pod."""

import gc
import json
import logging
import os
import resource
import signal
import sys
import threading
import types
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlashard.pods.testing.pytest_plugin.process_state import ProcessState

HERE = os.getcwd()


@pytest.fixture(scope="module")
def state() -> ProcessState:
    state = ProcessState()
    state.watch_functions()
    return state


@pytest.fixture(autouse=True)
def end_threads() -> Iterator[None]:
    RELEASED.clear()
    yield
    RELEASED.set()


RELEASED = threading.Event()


def leave(state: ProcessState, act: Callable[[], object]) -> list[str]:
    """Return the reasons for another process after a test that does something."""
    with state.restoring() as reasons:
        act()
    return reasons


def facts() -> dict[str, object]:
    """Return what the acts below change."""
    mask = os.umask(0)
    os.umask(mask)
    return {
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "paths": [*sys.path, *sys.argv, *map(id, sys.meta_path)],
        "modules": [sys.modules.get(name) for name in ("json", "wave", "not_there")],
        "signals": [signal.getsignal(number) for number in signal.Signals],
        # That of pytest-timeout.
        "timer": signal.getitimer(signal.ITIMER_REAL)[0] < 500,
        "mask": [mask, signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "files": [resource.getrlimit(resource.RLIMIT_NOFILE), os.fstat(0).st_ino],
        "python": [sys.getrecursionlimit(), gc.isenabled(), sys.stdout, sys.excepthook],
        "trace": sys.gettrace(),
        "logging": [logging.root.level, logging.root.manager.disable, [*logging.root.handlers]],
        "numpy": [np.geterr(), np.get_printoptions()],
        "jax": [jax.config.jax_enable_x64, jax.config.jax_default_device, jnp.ones(1).dtype],
        "meshes": jax.sharding.get_mesh().empty,
    }


def lower_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))


class Blocker:
    def find_spec(self, *_: object) -> None:
        raise ImportError


@pytest.mark.parametrize(
    "act",
    [
        lambda: os.chdir("/"),
        os.environ.clear,
        lambda: os.environ.update(NOT_THERE="1", PATH=""),
        sys.path.clear,
        lambda: setattr(sys, "argv", []),
        lambda: sys.meta_path.insert(0, Blocker()),
        lambda: sys.modules.update(json=types.ModuleType("json"), not_there=None),  # pyright: ignore
        lambda: sys.modules.pop("wave"),
        lambda: sys.modules.setdefault("not_there", types.ModuleType("not_there")),
        lambda: [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGINT)],
        lambda: signal.alarm(1000),
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
        lambda: os.umask(0o777),
        lower_limit,
        lambda: os.close(0),
        lambda: setattr(sys, "stdout", None),
        lambda: setattr(sys, "excepthook", print),
        lambda: sys.setrecursionlimit(500),
        lambda: sys.settrace(lambda *_: None),
        gc.disable,
        lambda: logging.disable(logging.CRITICAL),
        lambda: (logging.root.setLevel(1), logging.root.addHandler(logging.NullHandler())),
        lambda: (np.seterr(all="raise"), np.set_printoptions(precision=2)),
        lambda: jax.config.update("jax_enable_x64", True),
        lambda: jax.config.update("jax_default_device", jax.devices()[-1]),
        lambda: jax.set_mesh(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])),
        jax.clear_caches,
    ],
)
def test_settings_are_restored(state: ProcessState, act: Callable[[], object]) -> None:
    before = facts()
    assert leave(state, act) == []
    assert facts() == before
    assert (sys.modules["json"], sys.modules["wave"]) == (json, wave)


def test_deleted_working_directory_is_left(
    state: ProcessState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    assert leave(state, lambda: (os.chdir(inside), inside.rmdir())) == []
    assert os.getcwd() == HERE
    inside.mkdir()
    monkeypatch.chdir(inside)
    [reason] = leave(state, inside.rmdir)
    assert "the working directory" in reason and "FileNotFoundError" in reason


def test_replaced_function_is_a_reason(
    state: ProcessState, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((jax, "jit"), (jnp, "sum"), (os, "getcwd"), (np, "ones")):
        original = getattr(module, name)
        with monkeypatch.context() as patch:
            reasons = leave(
                state,
                lambda: patch.setattr(module, name, lambda *_: original(*_)),  # noqa: B023
            )
            assert reasons == [f"{module.__name__}.{name} was replaced"]
    assert leave(state, lambda: None) == []


def test_open_context_of_jax_is_a_reason(state: ProcessState) -> None:
    wide, mesh = jax.enable_x64(True), jax.sharding.Mesh(np.array(jax.devices()), "x")
    assert leave(state, wide.__enter__) == ["jax_enable_x64 remains set in this thread"]
    wide.__exit__(None, None, None)
    assert leave(state, mesh.__enter__) == ["a mesh remains entered"]
    mesh.__exit__(None, None, None)


def test_running_thread_is_a_reason(state: ProcessState) -> None:
    waiting = threading.Thread(target=RELEASED.wait, name="waiting")
    assert leave(state, waiting.start) == ["the thread waiting still runs"]
    RELEASED.set()
    waiting.join()
    assert leave(state, threading.Thread(target=int).start) == []
    with ThreadPoolExecutor(1) as idle:
        assert leave(state, lambda: idle.submit(int).result()) == []
    RELEASED.clear()
    assert leave(state, threading.Thread(target=RELEASED.wait, daemon=True).start) == []


def test_import_that_changes_jax_is_a_reason(
    state: ProcessState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wide_package.py").write_text(
        "import jax\njax.config.update('jax_enable_x64', True)\n"
    )
    (tmp_path / "other_package.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert leave(state, lambda: __import__("other_package")) == []
    [reason] = leave(state, lambda: __import__("wide_package"))
    assert "wide_package" in reason and not jax.config.jax_enable_x64
    for name in ("wide_package", "other_package"):
        del sys.modules[name]


def test_collective_leaves_no_array(state: ProcessState) -> None:
    gc.collect()
    before = len(jax.live_arrays())
    state.run_collective()
    assert len(jax.live_arrays()) == before
