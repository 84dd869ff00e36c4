"""Locks of run folders: who holds one, who is refused, and which locks are stale."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.message_patterns import naming
from xlashard.support.documents import write_whole
from xlashard.train.errors import RunError, SettingsError
from xlashard.train.loop import run_lock
from xlashard.train.loop.run_lock import LOCK, Owner, RunLock, take_lock


def fail(error: RunError) -> None:
    raise error


def take(folder: Path, lost: Callable[[RunError], object] = fail) -> RunLock:
    return take_lock(folder, lost, print)


def write_owner(folder: Path, **changed: object) -> Owner:
    """Write a lock of this process with other fields."""
    owner = replace(Owner.of_this_process(folder), **changed)
    # Whole, as launches do: a thread may read the file meanwhile.
    write_whole(folder / LOCK, json.dumps(asdict(owner)))
    return owner


def test_a_held_folder_is_refused_with_its_owner_until_released(tmp_path: Path) -> None:
    lock = take(tmp_path)
    with pytest.raises(SettingsError, match=naming(str(tmp_path), f"process {os.getpid()} on ")):
        take(tmp_path)
    lock.check()
    lock.release()
    assert not list(tmp_path.iterdir())
    take(tmp_path).release()


def test_locks_of_dead_processes_of_this_machine_are_stale(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    # Another process may have got the number.
    for changed in ({"pid": ended.pid}, {"started": "1"}):
        write_owner(tmp_path, **changed)
        take(tmp_path).release()


@pytest.mark.slow
def test_lock_of_a_killed_process_that_is_not_reaped_is_stale(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    started = run_lock._read_start(child.pid) or ""
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    write_owner(tmp_path, pid=child.pid, started=started)
    take(tmp_path).release()
    child.wait()


def test_lock_in_a_copy_of_a_living_runs_folder_is_stale(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "copy").mkdir()
    lock = take(tmp_path / "run")
    (tmp_path / "copy" / LOCK).write_bytes((tmp_path / "run" / LOCK).read_bytes())
    take(tmp_path / "copy").release()
    lock.release()


@pytest.mark.parametrize("text", ["", '{"host": "a', "[]", "\0" * 40])
def test_a_damaged_lock_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    take(tmp_path).release()


def test_silent_owner_of_another_machine_loses_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_lock, "LEASE", 0.02)
    monkeypatch.setattr(run_lock, "_LOOK", 0.001)
    write_owner(tmp_path, machine="another", host="far")
    take(tmp_path).release()
    assert f"sign of process {os.getpid()} on far" in capsys.readouterr().out


def test_owner_of_another_machine_that_touches_its_lock_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = write_owner(tmp_path, machine="another", host="far")
    # The owner touches the lock while this process waits.
    monkeypatch.setattr(run_lock.time, "sleep", lambda _: os.utime(tmp_path / LOCK, (1, 1)))
    with pytest.raises(SettingsError, match="on far"):
        take(tmp_path)
    assert run_lock._read_owner(tmp_path / LOCK) == owner


@pytest.mark.parametrize("links", [True, False])
def test_the_faster_of_two_launches_keeps_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    rival = replace(Owner.of_this_process(tmp_path), host="rival")

    def link(*_: object) -> None:
        (tmp_path / LOCK).write_text(json.dumps(asdict(rival)))
        raise FileExistsError if links else PermissionError

    monkeypatch.setattr(run_lock.os, "link", link)
    with pytest.raises(SettingsError, match="on rival"):
        take(tmp_path)
    assert [x.name for x in tmp_path.iterdir()] == [LOCK]


def test_a_file_system_without_links_has_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(run_lock.os, "link", link)
    lock = take(tmp_path)
    with pytest.raises(SettingsError, match="in use"):
        take(tmp_path)
    lock.release()


def test_lost_folders_are_reported_and_lost_locks_are_restored(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lock = take(folder)
    (folder / LOCK).unlink()
    lock.check()
    lock.check()
    folder.rename(tmp_path / "away")
    with pytest.raises(RunError, match=naming(str(folder), "renamed", "--resume FOLDER")):
        lock.check()
    folder.mkdir()
    with pytest.raises(RunError, match="renamed"):
        lock.check()
    write_owner(folder, host="other")
    with pytest.raises(RunError, match=naming("taken over", "on other")):
        lock.check()
    lock.release()
    assert (folder / LOCK).exists()


def test_loss_of_a_lock_is_reported_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "BEAT", 0.001)
    errors: list[RunError] = []
    lock = take(tmp_path, errors.append)
    write_owner(tmp_path, host="other")
    lock._thread.join(30)
    assert "taken over" in str(errors[0])
    lock.release()


def test_an_unwritable_folder_has_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(run_lock, "write_whole", refuse)
    with pytest.raises(SettingsError, match=naming(str(tmp_path), "Permission denied")):
        take(tmp_path)
