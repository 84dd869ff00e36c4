"""Processes of a launcher end with it, however it ends."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.pods.testing.helpers import families, family, plan, python, ran, start
from tests.waiting import Watched, all_gone
from xlashard.pods.testing.launcher import Launch, OutputChunk

POD = [sys.executable, "-m", "xlashard", "pod", "-n", "2", "--"]


def find_guard(launcher: int) -> int:
    """Return the process id of a launcher's guard, its only child."""
    return int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_end_with_the_command(number: int) -> None:
    launcher = start([*POD, *family()])
    assert launcher.stdout is not None
    processes = Watched(families(launcher.stdout, 2))
    launcher.send_signal(number)
    assert processes.all_gone()
    code = launcher.wait(30)
    assert code == (-number if number == signal.SIGKILL else 128 + number)


@pytest.mark.slow
def test_second_ctrl_c_kills() -> None:
    launcher = start([*POD, *family(signal.SIGINT)])
    assert launcher.stdout is not None
    processes = Watched(families(launcher.stdout, 2))
    launcher.send_signal(signal.SIGINT)
    assert any("repeat to kill them" in line for line in launcher.stdout)
    assert not processes.all_gone(0)
    launcher.send_signal(signal.SIGINT)
    assert processes.all_gone()
    assert launcher.wait(30) == 128 + signal.SIGKILL


@pytest.mark.slow
def test_processes_end_when_the_guard_is_killed() -> None:
    with Launch(plan(family(), one_stream=True)) as launch:
        processes = Watched(families(lines_of(launch), 2))
        os.kill(launch._guard.pid, signal.SIGKILL)
        while launch.running:
            assert launch.events(30)
        assert processes.all_gone()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("also_launcher", [False, True])
def test_processes_may_save_after_a_signal_to_the_guard(number: int, also_launcher: bool) -> None:
    source = f"""
import signal, sys
def save(number, frame):
    print("saved", flush=True)
    sys.exit(128 + number)
signal.signal({number:d}, save)
print("ready", flush=True)
signal.pause()
"""
    launcher = start([*POD, *python(source)])
    assert launcher.stdout is not None
    lines = iter(launcher.stdout)
    assert {next(lines), next(lines)} == {"[0] ready\n", "[1] ready\n"}
    for pid in (find_guard(launcher.pid), *[launcher.pid] * also_launcher):
        os.kill(pid, number)
    assert "".join(lines).count("saved") == 2
    assert launcher.wait(30) == 128 + number


@pytest.mark.slow
def test_second_signal_to_the_guard_kills() -> None:
    launcher = start([*POD, *family(signal.SIGTERM)])
    assert launcher.stdout is not None
    processes, guard = Watched(families(launcher.stdout, 2)), find_guard(launcher.pid)
    os.kill(guard, signal.SIGTERM)
    assert any("repeat to kill them" in line for line in launcher.stdout)
    os.kill(guard, signal.SIGTERM)
    assert processes.all_gone()
    assert launcher.wait(30) == 128 + signal.SIGKILL


@pytest.mark.slow
def test_processes_end_with_the_command_although_the_guard_is_stopped() -> None:
    launcher = start([*POD, *family()])
    assert launcher.stdout is not None
    processes = Watched(families(launcher.stdout, 2))
    os.kill(find_guard(launcher.pid), signal.SIGSTOP)
    launcher.kill()
    assert processes.all_gone()
    launcher.wait(30)


@pytest.mark.slow
def test_a_stopped_guard_continues() -> None:
    with Launch(plan(python("print('done')"), one_stream=True)) as launch:
        os.kill(launch._guard.pid, signal.SIGSTOP)
        while launch.running:
            launch.events(1)


@pytest.mark.slow
def test_processes_end_after_a_timeout() -> None:
    done = ran(family(signal.SIGTERM), timeout=1)
    assert done.verdict.timed_out == (0, 1)
    assert all_gone(families("".join(done.outputs).splitlines(), 2), 0)


@pytest.mark.slow
def test_detached_processes_end_with_the_last_process() -> None:
    leave = "subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    done = ran(python(f"import subprocess; print({leave}.pid)"))
    assert done.verdict.well
    left_behind = [int(output) for output in done.outputs]
    assert all_gone(left_behind, 0)


def lines_of(launch: Launch):
    """Yield the lines that processes write, as they arrive."""
    unread = {number: b"" for number in range(2)}
    while launch.running:
        for event in launch.events(30):
            if isinstance(event, OutputChunk):
                *lines, unread[event.process] = (unread[event.process] + event.text).split(b"\n")
                yield from (line.decode() for line in lines)


HANGING = """
import os, signal, subprocess
import pytest

@pytest.mark.pod(processes=2)
def test_hangs():
    left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(os.environ["REPORT"], "w") as report:
        print("family", os.getpid(), os.getppid(), left.pid, file=report)
    signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "number"),
    [((), signal.SIGINT), ((), signal.SIGKILL), (("-n", "1"), signal.SIGKILL)],
)
def test_processes_end_with_pytest(tmp_path: Path, options: tuple[str, ...], number: int) -> None:
    (tmp_path / "test_it.py").write_text(HANGING)
    pipe = tmp_path / "reported"
    os.mkfifo(pipe)
    words = ["-p", "xlashard_pytest", f"--rootdir={tmp_path}", "-p", "no:cacheprovider", *options]
    # It is open for writing too, so it never reaches its end.
    with os.fdopen(os.open(pipe, os.O_RDWR), buffering=1) as lines:
        outside = start([sys.executable, "-m", "pytest", *words, str(tmp_path)], REPORT=str(pipe))
        processes = Watched(families(lines, 2))
    outside.send_signal(number)
    outside.communicate(timeout=60)
    assert processes.all_gone()
