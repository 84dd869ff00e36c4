"""The watchdog of one process, and reports from the stacks of several."""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.core.processes import ROOT
from xlashard.core.processes.process_facts import (
    ProcessFacts,
    describe_other_code,
    read_facts,
)
from xlashard.core.processes.stack_dump import (
    ProcessDump,
    StackFrame,
    StepProgress,
    ThreadStack,
    own_stacks,
)
from xlashard.core.processes.wait_graph import HostCollective
from xlashard.multihost import STUCK_EXIT_CODE, Watchdog
from xlashard.pods.multihost.hang_report import HangReport, explain_silence
from xlashard.support.background import listening_to_signals


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


def answer(
    step: int | None,
    *places: tuple[str, str],
    paused: str = "",
    on_device: bool = False,
    collective: HostCollective | None = None,
):
    frames = tuple(StackFrame(f"/a/{file}", 7, "f", "call()", kind) for file, kind in places)
    progress = None if step is None else StepProgress(step, 3.0, paused)
    threads = (ThreadStack("MainThread", True, on_device, frames),)
    return ProcessDump(progress, threads, collective=collective)


EPOCH = HostCollective("barrier 'epoch'", "train.py:7", 3.0, True)
WAITING = answer(42, ("api.py", "runtime"), ("train.py", "user"), collective=EPOCH)
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
        ({0: LOADING, 1: LOADING, 2: LOADING}, (), "processes 0, 1, 2 wait in data.py:7 in f"),
    ],
)
def test_hang_report_identifies_the_culprits(
    answers: dict[int, ProcessDump], culprits: tuple[int, ...], words: str
) -> None:
    report = HangReport(3, answers, {}, {})
    assert report.culprits == culprits
    assert words in str(report)
    waits = any(answers[p] is WAITING for p in answers if p not in culprits)
    assert ("(barrier 'epoch' (train.py:7))" in str(report)) == waits
    # Each stack occurs once, those of the culprits first.
    stacks = str(report).partition("\n\n")[2]
    shown = [process for process in culprits if process in answers]
    assert all(stacks.startswith(f"process {process}, thread") for process in shown)


def test_recent_step_is_not_reported_as_stuck() -> None:
    assert HangReport(2, {0: WAITING, 1: LOADING}, {}, {}, recent=2.0).moving == ()
    report = HangReport(2, {0: WAITING, 1: LOADING}, {}, {}, recent=4.0)
    assert report.moving == (0, 1) and "processes 0, 1 made a step just now" in str(report)


def test_equal_stacks_are_shown_once() -> None:
    text = str(HangReport(8, dict.fromkeys(range(8), WAITING), {}, {}))
    assert text.count("thread 'MainThread'") == 1
    assert "processes 0, 1, 2, 3, 4, 5, 6, 7, thread 'MainThread'" in text


def test_process_dumps_round_trip() -> None:
    progress, lost = StepProgress(3, 1.5, "compiling"), ((2, "is dead"),)
    sent = ProcessDump(progress, own_stacks(), read_facts(), EPOCH, lost)
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


def test_other_versions_and_code_are_named() -> None:
    def facts(jax: str, libtpu: str | None, **code: str) -> ProcessFacts:
        versions = {"jax": jax} | ({"libtpu": libtpu} if libtpu else {})
        return ProcessFacts("host", 1, versions, code)

    by_process = {
        0: facts("0.12.0", "0.0.50", model="aa", plots="cc"),
        1: facts("0.12.0", None, model="aa"),
        2: facts("0.12.0", "0.0.50", model="bb"),
        3: facts("0.11.2", "0.0.50", model="aa"),
    }
    # A module of one process alone, `plots`, is no difference.
    assert describe_other_code(by_process) == {
        1: "libtpu is not installed, and 0.0.50 in processes 0, 2, 3",
        2: "model is bb, and aa in processes 0, 1, 3",
        3: "jax is 0.11.2, and 0.12.0 in processes 0, 1, 2",
    }


def test_ended_and_stopped_processes_have_different_reasons() -> None:
    child = subprocess.Popen(["sleep", "60"])
    facts = ProcessFacts(socket.gethostname(), child.pid, {}, {})
    assert "does not answer" in explain_silence(1, facts, {})
    assert "is gone: it was silent" in explain_silence(1, facts, {1: "is gone: it was silent"})
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert f"is stopped by a signal (SIGSTOP) or a debugger: kill -CONT {child.pid}" in (
        explain_silence(1, facts, {})
    )
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert "is dead: its parent" in explain_silence(1, facts, {})
    child.wait()
    assert "is dead: its host has no such process" in explain_silence(1, facts, {})


def test_watchdog_reports_on_a_signal_and_passes_others_on(log: _LogLines) -> None:
    others: list[int] = []
    with (
        listening_to_signals(lambda *_: None, others.append, numbers=(signal.SIGUSR1,)),
        Watchdog(timeout=600, report_signal=signal.SIGQUIT) as watchdog,
    ):
        watchdog.step(7)
        for number in (signal.SIGUSR1, signal.SIGQUIT):
            os.kill(os.getpid(), number)
        assert log.written.wait(20)
    assert "process 0 of 1: SIGQUIT at step 7:\nthread 'MainThread':" in log.lines[0]
    assert others == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL


def shown_process(
    process: int, source: str, line: int, function: str = "main", awaits: str = "", **more: Any
) -> ProcessDump:
    """Return the answer of a process of the guide."""
    file = source.partition(":")[0]
    text = source.partition(": ")[2]
    frame = StackFrame(f"/home/me/{file}", line, function, text, "user")
    inner = StackFrame("/jax/api.py", 1, "call", "", "runtime")
    frames = (inner, frame) if awaits or "collective" in more else (frame,)
    gib = 1 << 30
    code = {"network (network.py)": "409f619d" if process == 3 else "97c3a485"}
    modules = {"__main__ (train.py)": "5096f3cd", "data (data.py)": "1f0c77a2"}
    versions = {"Python": "3.13.0", "xlashard": "0.2.0", "jax": "0.12.0.1"}
    versions |= {"jaxlib": "0.12.0.1", "libtpu": "0.0.50.1"}
    facts = ProcessFacts(
        f"host-{process}", 4711 + process, versions, modules | code, 3 * gib, 24 * gib, 31 * gib
    )
    first_run = HostCollective("the first run of train_step", "train.py:51", 180.0, False)
    thread = ThreadStack("MainThread", True, False, frames, awaits)
    return ProcessDump(StepProgress(41, 7.0), (thread,), facts, more.get("collective", first_run))


def test_the_guide_shows_what_is_printed() -> None:
    epoch = HostCollective("barrier 'epoch'", "train.py:58", 7.0, True)
    answers = {
        0: shown_process(0, "train.py: float(loss)", 52, awaits="train_step (train.py:51)"),
        1: shown_process(1, "data.py: time.sleep(300)", 31, "next_batch"),
        3: shown_process(
            3, 'train.py: multihost.barrier("epoch", processes=(1, 3))', 58, collective=epoch
        ),
    }
    each = {**answers, 2: shown_process(2, "train.py", 1)}
    facts = {p: answer.facts for p, answer in each.items() if answer.facts}
    silence = {2: "is dead: its connection closed before its end"}
    report = HangReport(4, answers, silence, dict(sorted(facts.items())))
    guide = (ROOT / "docs/guides/pods.md").read_text(encoding="utf-8")
    for text in (str(report).partition("\n\n")[0], report.table()):
        assert f"{text}\n```" in guide, text
