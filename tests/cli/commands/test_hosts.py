"""`xlashard hosts` beside a job of one process; `tests/pods/multihost` has a pod that hangs."""

import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from xlashard import multihost
from xlashard.cli.commands import hosts
from xlashard.cli.main import main
from xlashard.pods.multihost import job_socket


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Empty folder of jobs; the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="jobs-", dir="/tmp") as name:
        path = Path(name) / "jobs"
        for module in (hosts, job_socket):
            monkeypatch.setattr(module, "find_job_folder", lambda: path)
        monkeypatch.setattr(job_socket, "job_socket", job_socket.JobSocket())
        monkeypatch.setattr("xlashard.pods.multihost.watchdog.job_socket", job_socket.job_socket)
        yield path


def test_without_a_job_the_command_names_what_makes_one_visible(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hosts"]) == 1
    error = capsys.readouterr().err
    assert "multihost.initialize()" in error and "multihost.Watchdog" in error
    assert "kubectl exec POD -- xlashard hosts" in error


def test_a_job_of_one_process_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with multihost.Watchdog(timeout=600) as watchdog:
        watchdog.step(41)
        assert main(["hosts"]) == 0
        table = capsys.readouterr().out
        assert main(["hosts", "--json", "--pid", str(os.getpid())]) == 0
        job = json.loads(capsys.readouterr().out)
        assert main(["hosts", "--stacks"]) == 0
        stacks = capsys.readouterr().out
        assert main(["hosts", "--pid", "1"]) == 1
    assert "--pid 1 is no visible process of a job" in capsys.readouterr().err
    assert "process 0 of 1 on this host" in table and f"  {os.getpid()}  41, " in table
    assert "jax 0." in table
    (row,) = job["processes"]
    assert (job["format"], job["count"], row["pid"]) == (1, 1, os.getpid())
    assert row["progress"]["step"] == 41 and row["resident_bytes"] > 1 << 20
    assert "test_hosts.py" in stacks and "process 0, thread 'MainThread':" in stacks
    assert folder.stat().st_mode & 0o777 == 0o700


def test_processes_that_do_not_answer_are_named_and_dead_ones_forgotten(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "_NAME", 0.1)
    folder.mkdir(mode=0o700)
    sleeping, dead = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    listeners = []
    for child in (sleeping, dead):
        listeners.append(socket.socket(socket.AF_UNIX))
        listeners[-1].bind(str(folder / f"{child.pid}.sock"))
        listeners[-1].listen()
    dead.kill()
    dead.wait()
    assert main(["hosts"]) == 1
    error = capsys.readouterr().err
    assert f"process {sleeping.pid} of a job does not answer" in error
    assert f"kill -CONT {sleeping.pid}" in error and str(dead.pid) not in error
    assert [path.stem for path in folder.iterdir()] == [str(sleeping.pid)]
    listeners[0].close()
    assert main(["hosts"]) == 1 and "no job of yours" in capsys.readouterr().err
    sleeping.send_signal(signal.SIGKILL)
    sleeping.wait()
    listeners[1].close()


def test_a_folder_that_others_may_open_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    with multihost.Watchdog(timeout=600):
        assert list(folder.iterdir()) == []
        assert main(["hosts"]) == 1
    assert f"chmod 700 {folder}" in capsys.readouterr().err
