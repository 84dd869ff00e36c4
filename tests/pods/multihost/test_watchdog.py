"""The watchdog of one process, and reports from the stacks of several."""

import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.processes import ROOT
from xlashard.core.processes.stack_dump import (
    ProcessDump,
    StackFrame,
    StepProgress,
    ThreadStack,
    own_stacks,
)
from xlashard.multihost import STUCK_EXIT_CODE, Watchdog
from xlashard.pods.multihost.watchdog import HangReport


class _LogLines(logging.Handler):
    """Handler that records the watchdog's messages, and sets an event for each."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.written = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.written.set()


@pytest.fixture
def log() -> Iterator[_LogLines]:
    handler = _LogLines()
    logger = logging.getLogger("xlashard.watchdog")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.mark.slow
def test_watchdog_writes_the_stacks_of_all_threads(log: _LogLines, tmp_path: Path) -> None:
    held = threading.Event()
    waiting = threading.Thread(target=held.wait, name="loader", daemon=True)
    waiting.start()
    with Watchdog(timeout=0.2, folder=tmp_path) as watchdog:
        watchdog.step(41)
        assert log.written.wait(20)
        log.written.clear()
        # The next step is reported, too.
        watchdog.step()
        assert log.written.wait(20)
    held.set()
    report, again = log.lines[:2]
    assert re.search(r"process 0 of 1: no step for \d+ s, since step 41", report), report
    assert "thread 'MainThread'" in report and "assert log.written.wait(20)" in report
    assert "thread 'loader'" in report and "xlashard-watchdog" not in report
    assert report in (tmp_path / "watchdog-0-1.txt").read_text()
    assert "steps resumed" in again


@pytest.mark.slow
def test_watchdog_ignores_pauses_and_stops_with_its_block(log: _LogLines) -> None:
    with Watchdog(timeout=0.1) as watchdog, watchdog.paused("a"), watchdog.paused("b"):
        assert not log.written.wait(0.5)
    assert not log.written.wait(0.3)


@pytest.mark.slow
def test_watchdog_crash_exit_code() -> None:
    script = (
        "import threading; from xlashard import multihost\n"
        "with multihost.Watchdog(timeout=0.2, crash=True): threading.Event().wait(60)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == STUCK_EXIT_CODE
    assert "xlashard: the watchdog ends process 0 of 1" in done.stderr
    assert "threading.Event().wait(60)" in done.stderr or "<string>" in done.stderr


def answer(step: int | None, *places: tuple[str, str], paused: str = "", on_device: bool = False):
    frames = tuple(StackFrame(f"/a/{file}", 7, "f", "call()", kind) for file, kind in places)
    progress = None if step is None else StepProgress(step, 3.0, paused)
    return ProcessDump(progress, (ThreadStack("MainThread", True, on_device, frames),))


WAITING = answer(42, ("api.py", "runtime"), ("train.py", "user"))
CALLING = answer(42, ("train.py", "user"), on_device=True)
LOADING = answer(42, ("queue.py", "library"), ("data.py", "user"), ("train.py", "user"))
BEHIND = answer(41, ("api.py", "runtime"), ("other.py", "user"))
BUSY = answer(42, ("save.py", "user"), paused="a checkpoint")


@pytest.mark.parametrize(
    ("answers", "culprits", "words"),
    [
        (
            {0: WAITING, 1: LOADING, 2: CALLING},
            (1,),
            "process 1 is stuck in data.py:7 in f: call()",
        ),
        ({0: WAITING, 1: WAITING}, (2,), "process 2 does not answer"),
        (
            {0: WAITING, 1: BEHIND, 2: WAITING},
            (1,),
            "stuck at step 41, behind the others at step 42",
        ),
        ({0: WAITING, 1: BUSY, 2: WAITING}, (1,), "process 1 is busy with a checkpoint: save.py:7"),
        ({0: WAITING, 1: WAITING, 2: WAITING}, (), "no process is behind"),
        ({0: LOADING, 1: LOADING, 2: LOADING}, (), "processes 1, 2 wait in data.py:7 in f"),
    ],
)
def test_hang_report_identifies_the_culprits(
    answers: dict[int, ProcessDump], culprits: tuple[int, ...], words: str
) -> None:
    report = HangReport(3, answers, {0: "barrier 'epoch' (train.py:7)"})
    assert report.culprits == culprits
    assert words in str(report)
    assert ("(barrier 'epoch' (train.py:7))" in str(report)) == (0 not in culprits)
    # Each stack occurs once, those of the culprits first.
    stacks = str(report).partition("\n\n")[2]
    shown = [process for process in culprits if process in answers]
    assert all(stacks.startswith(f"process {process}, thread") for process in shown)


def test_recent_step_is_not_reported_as_stuck() -> None:
    assert HangReport(2, {0: WAITING, 1: LOADING}, {}, recent=2.0).moving == ()
    report = HangReport(2, {0: WAITING, 1: LOADING}, {}, recent=4.0)
    assert report.moving == (0, 1) and "processes 0, 1 made a step just now" in str(report)


def test_equal_stacks_are_shown_once() -> None:
    text = str(HangReport(8, dict.fromkeys(range(8), WAITING), {}))
    assert text.count("thread 'MainThread'") == 1
    assert "processes 0, 1, 2, 3, 4, 5, 6, 7, thread 'MainThread'" in text


def test_process_dumps_round_trip() -> None:
    sent = ProcessDump(StepProgress(3, 1.5, "compiling"), own_stacks())
    assert ProcessDump.from_json(sent.to_json()) == sent
    assert ProcessDump.from_json(LOADING.to_json()) == LOADING
    assert answer(None).main is not None and answer(None).main.user_frame is None


def test_runtime_frames_are_abbreviated() -> None:
    inside = tuple(StackFrame(f"/a/inner{n}.py", n, "g", "", "runtime") for n in range(5))
    user = StackFrame("/a/train.py", 7, "main", "float(loss)", "user")
    text = ThreadStack("MainThread", True, False, (*inside, user)).text()
    assert [line.strip() for line in text.split("\n")] == [
        "thread 'MainThread':",
        'File "/a/train.py", line 7, in main',
        "float(loss)",
        'File "/a/inner4.py", line 4, in g',
        "[3 more inside]",
        'File "/a/inner0.py", line 0, in g',
    ]
    assert "more" not in ThreadStack("MainThread", True, False, (*inside[:2], user)).text()
