"""Background threads end before the interpreter finalizes."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.device_counts import emulate_devices
from tests.fork_server import python_command
from xlashard.support.background import end_thread, handling_signals, repeating, start_background

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "xlashard"
EMULATED = emulate_devices(8)

# The thread holds the lock of stderr most of the time, and prints after its stop.
_PRINTING = """
import sys, threading
from xlashard.support.background import start_background
stopped, started = threading.Event(), threading.Event()
def work():
    while not stopped.is_set():
        print("working", file=sys.stderr)
        started.set()
    print("ended", file=sys.stderr, flush=True)
start_background(work, stopped.set, "printer")
started.wait()
"""

_WATCHING = """
from xlashard import multihost
watchdog = multihost.Watchdog(timeout=0.05)
watchdog.__enter__()
"""


def test_a_thread_that_is_being_started_is_only_stopped() -> None:
    stopped = threading.Event()
    end_thread(threading.Thread(target=stopped.wait), stopped.set)
    assert stopped.is_set()


def test_background_thread_ends_by_itself_or_when_stopped() -> None:
    done = threading.Event()
    thread = start_background(done.wait, done.set, "waiting")
    assert thread.is_alive() and thread.name == "waiting"
    end_thread(thread, done.set)
    assert not thread.is_alive()
    errors: list[BaseException] = []
    own = start_background(lambda: end_thread(threading.current_thread(), int), int, "own")
    own.join(10)
    assert not own.is_alive() and not errors


def test_work_is_repeated_inside_a_block_until_it_is_stopped() -> None:
    calls: list[str] = []
    again = threading.Event()

    def act() -> None:
        calls.append(threading.current_thread().name)
        if len(calls) > 1:
            again.set()

    with repeating(act, 0.001, "counting") as stop:
        assert again.wait(60)
        stop()
    made = len(calls)
    assert set(calls) == {"counting"}
    with repeating(act, 3600, "counting"):
        pass
    assert len(calls) == made
    assert "counting" not in {thread.name for thread in threading.enumerate()}


def test_signals_have_their_handlers_back_after_a_block() -> None:
    came: list[int] = []
    before = signal.getsignal(signal.SIGHUP)
    with handling_signals(lambda number, _: came.append(number), [signal.SIGHUP]):
        signal.raise_signal(signal.SIGHUP)
    assert came == [signal.SIGHUP] and signal.getsignal(signal.SIGHUP) is before


@pytest.mark.slow
@pytest.mark.parametrize("program", [_PRINTING, _WATCHING], ids=["printing", "watching"])
def test_a_process_with_threads_exits_normally(tmp_path, program: str) -> None:
    done = subprocess.run(
        [*python_command(), "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Fatal Python error" not in done.stderr
    if program is _PRINTING:
        assert done.stderr.endswith("ended\n")


@pytest.mark.integration
def test_features_work_after_the_fork_of_a_child() -> None:
    """The children end normally, at once, and by an error; the parent goes on."""
    script = Path(__file__).with_name("forked_features.py")
    environment = {**os.environ, **EMULATED, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0 and done.stdout.endswith("the end\n"), done.stdout + done.stderr


@pytest.mark.slow
def test_exit_handlers_run_in_the_process_that_registered_them_and_nowhere_else() -> None:
    program = (
        "import os, sys\n"
        "from xlashard.support.background import at_exit\n"
        "at_exit(print, 'of the parent')\n"
        "at_exit(print, 'cancelled')()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    at_exit(print, 'of the child')\n"
        "    sys.exit()\n"
        "os.waitpid(child, 0)\n"
    )
    done = subprocess.run(
        [*python_command(), "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n") == ["of the child", "of the parent", ""], done


def test_exit_handlers_are_registered_in_one_place() -> None:
    registering = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\batexit\.register\(", path.read_text())
    ]
    assert registering == ["support/background.py"]
