"""Runs on a stand-in of Google Cloud Storage: locks, metrics, checkpoints, and what is refused."""

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orbax.checkpoint as ocp
import pytest
from etils import epath

from tests.message_patterns import naming
from tests.train.checkpoint.states import check_same, metadata, restore, save, state, state_types
from tests.train.examples import settings
from tests.train.loop.test_run_folder import lines, measure, opened
from xlashard.cli.main import main
from xlashard.train import stores
from xlashard.train.checkpoint import Checkpoints
from xlashard.train.config.schema import read
from xlashard.train.config.settings import Settings
from xlashard.train.errors import CheckpointError, RunError, SettingsError
from xlashard.train.loop import run_lock
from xlashard.train.loop.run_folder import (
    LogFile,
    RunFolder,
    last_run,
    newest_resumable,
    read_kept,
    read_run,
)
from xlashard.train.loop.run_lock import LOCK, Owner, RunLock, take_lock
from xlashard.train.stores import locate

if TYPE_CHECKING:
    from tests.train.store.server import Bucket

pytestmark = pytest.mark.slow


def fail(error: RunError) -> None:
    raise error


def take(folder: Path) -> RunLock:
    return take_lock(folder, fail, print)


def write_owner(bucket: "Bucket", folder: Path, **changed: object) -> None:
    """Write a lock of this process with other fields."""
    owner = replace(Owner.of_this_process(folder), **changed)
    bucket.put(f"runs/{LOCK}", json.dumps(asdict(owner)).encode())


def test_a_held_folder_is_refused_with_its_owner_until_released(
    bucket: "Bucket", store: Path
) -> None:
    lock = take(store)
    with pytest.raises(SettingsError, match=naming(str(store), f"process {os.getpid()} on ")):
        take(store)
    first = bucket.generation(f"runs/{LOCK}")
    lock._lock.touch(lock._owner, lock.check())
    assert bucket.generation(f"runs/{LOCK}") > first
    del bucket.objects[f"runs/{LOCK}"]
    lock.check()
    lock.check()
    write_owner(bucket, store, host="other", token="another")
    with pytest.raises(RunError, match=naming("taken over", "on other")):
        lock.check()
    lock.release()
    assert "other" in bucket.text(f"runs/{LOCK}")


def test_locks_of_the_dead_and_damaged_locks_are_stale(
    bucket: "Bucket", store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    write_owner(bucket, store, pid=ended.pid)
    take(store).release()
    assert not bucket.objects
    bucket.put(f"runs/{LOCK}", b'{"host": "a')
    take(store).release()
    monkeypatch.setattr(run_lock, "LEASE", 0.02)
    monkeypatch.setattr(run_lock, "_LOOK", 0.001)
    write_owner(bucket, store, machine="another", host="far")
    take(store).release()


def test_the_faster_of_two_launches_keeps_the_lock(
    bucket: "Bucket", store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_object = stores.replace_object

    def overtaken(*args: Any) -> bool:
        write_owner(bucket, store, host="rival", token="another")
        return replace_object(*args)

    monkeypatch.setattr(run_lock, "replace_object", overtaken)
    with pytest.raises(SettingsError, match="on rival"):
        take(store)
    assert "rival" in bucket.text(f"runs/{LOCK}")


def test_a_lock_whose_answer_was_lost_is_held(
    bucket: "Bucket", store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_object = stores.replace_object

    def repeated(*args: Any) -> bool:
        # As TensorStore repeats a write of which it heard nothing.
        assert replace_object(*args)
        return replace_object(*args)

    monkeypatch.setattr(run_lock, "replace_object", repeated)
    take(store).check()


def test_run_folder_holds_settings_measurements_and_a_curve(bucket: "Bucket", store: Path) -> None:
    with opened(store) as folder:
        measure(folder, 3)
        # The first record is written at once, later ones together.
        assert len(lines(folder)) == 1
        folder.flush()
        assert len(lines(folder)) == 3
        folder.record("eval", step=3, loss=2.5)
    assert str(folder.path) == "gs://bucket/runs/small"
    assert [x["kind"] for x in lines(folder)] == ["train"] * 3 + ["eval"]
    assert read(Settings, tomllib.loads(bucket.text("runs/small/config.toml"))) == settings()
    assert bucket.objects["runs/small/loss.png"].data.startswith(b"\x89PNG")
    assert opened(store).path.name == "small-2"

    bucket.put("runs/small/checkpoints/00000002/checkpoint.json", b"{}")
    assert newest_resumable(store, "small") == folder.path
    assert last_run(store).parent == store
    resumed = read_run(folder.path, ["training.steps=9"])
    kept = read_kept(folder.path, 2, evaluated_again=True)
    with RunFolder(folder.path, resumed.settings, kept.lines) as again:
        again.record("train", step=3, loss=1.5)
    assert [x["step"] for x in lines(again)] == [1, 2, 3]
    assert "steps = 9" in bucket.text("runs/small/config.toml")
    with pytest.raises(SettingsError, match="smal is not a run folder: it does not exist"):
        read_run(store / "smal", [])


def test_logs_are_appended_to(bucket: "Bucket", store: Path) -> None:
    for word in ("first\n", "second\n"):
        with LogFile(store / "log-1.txt") as file:
            file.write(word)
    assert bucket.text("runs/log-1.txt") == "first\nsecond\n"
    bucket.faults.refused = "."
    with pytest.raises(RunError, match=naming("log-1.txt can't be written", "no access")):
        LogFile(store / "log-1.txt")


@pytest.mark.devices(8)
def test_steps_are_saved_kept_and_restored(bucket: "Bucket", store: Path) -> None:
    bucket.put("runs/metrics.jsonl", b"{}\n")
    # A killed process has left a step without its last object; another one was damaged so.
    bucket.put("runs/checkpoints/00000001/arrays/manifest.ocdbt", b"half")
    with Checkpoints(store / "checkpoints", keep=2) as checkpoints:
        assert checkpoints.steps() == []
        for step in (1, 2, 3):
            checkpoints.save(state(step), metadata(step), [store / "metrics.jsonl"])
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
        with pytest.raises(CheckpointError, match="gcloud storage mv gs://bucket/runs/"):
            checkpoints.save(state(3), metadata(2))
    assert not [name for name in bucket.objects if "00000001" in name]
    assert bucket.text("runs/checkpoints/00000003/metrics.jsonl") == "{}\n"
    manifest = json.loads(bucket.text("runs/checkpoints/00000003/checkpoint.json"))
    assert set(manifest["files"]["arrays/manifest.ocdbt"]) == {"bytes", "crc32c"}
    check_same(restore(store / "checkpoints").state, 3)
    check_same(restore(store / "checkpoints", state_types(), 2).state, 2)


@pytest.mark.devices(8)
def test_damage_is_named_with_the_last_intact_step(bucket: "Bucket", store: Path) -> None:
    save(store / "checkpoints", 1, 2)
    folder = "runs/checkpoints/00000002/"
    name = f"{folder}arrays/manifest.ocdbt"
    whole = bucket.objects[name].data
    for data, text in (
        (whole[:-1], "is truncated: it has"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), "was altered: its CRC-32C is not"),
        (None, "is missing"),
    ):
        if data is None:
            del bucket.objects[name]
        else:
            bucket.put(name, data)
        with pytest.raises(CheckpointError, match=naming("arrays/manifest.ocdbt", text)) as caught:
            restore(store / "checkpoints")
        assert "The checkpoint of step 1 is intact" in str(caught.value)
        assert "gcloud storage mv gs://bucket/runs/checkpoints/00000002 " in str(caught.value)
    bucket.put(name, whole)
    bucket.put(f"{folder}arrays/other", b"x")
    with pytest.raises(CheckpointError, match="arrays/other is foreign"):
        restore(store / "checkpoints")


@pytest.mark.devices(8)
def test_a_step_copied_between_a_bucket_and_a_disk_is_restored(
    bucket: "Bucket", store: Path, tmp_path: Path
) -> None:
    save(store, 1)
    save(tmp_path / "there", 2)
    for name, stored in bucket.objects.items():
        copy = tmp_path / "here" / name.removeprefix("runs/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(stored.data)
    check_same(restore(tmp_path / "here").state, 1)
    for path in (tmp_path / "there").rglob("*"):
        if path.is_file():
            bucket.put(f"runs/{path.relative_to(tmp_path / 'there')}", path.read_bytes())
    check_same(restore(store).state, 2)


@pytest.mark.devices(8)
def test_a_refused_save_commits_nothing_and_names_the_step(bucket: "Bucket", store: Path) -> None:
    save(store, 1)
    # Arrays, then the last object.
    for refused in ("ocdbt", r"POST .*checkpoint\.json"):
        bucket.faults.refused = refused
        with Checkpoints(store) as checkpoints:
            checkpoints.save(state(2), metadata(2))
            with pytest.raises(CheckpointError, match=naming("of step 2 could not be written")):
                checkpoints.wait()
            assert checkpoints.steps() == [1]
    bucket.faults.refused = ""
    assert not [name for name in bucket.objects if "00000002" in name]
    save(store, 2)
    check_same(restore(store).state, 2)


@pytest.mark.devices(8)
def test_slow_failing_and_reset_requests_are_repeated(bucket: "Bucket", store: Path) -> None:
    bucket.faults = replace(bucket.faults, failed=0.03, reset=0.04, delay=0.01)
    bucket.injected = 0
    save(store, 1, 2, keep=1)
    check_same(restore(store).state, 2)
    assert bucket.injected >= 3


@pytest.mark.parametrize("option", ["--runs", "--resume", "--config"])
def test_missing_package_is_named_before_the_run_starts(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", "configs/tiny.toml"] if option == "--runs" else []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for url in ("gs://bucket/run", "gs:/bucket/run"):
        assert main(["train", *words, option, url]) == 2
        error = capsys.readouterr().err
        assert f"{option} is gs://bucket/run, and gcsfs" in error
        assert error.endswith("  pip install 'xlashard[gcs]'\n")
    assert main(["train", *words, option, "gs://"]) == 2
    assert f"{option} must be a path" in capsys.readouterr().err
    assert not Path("gs:").exists()


def test_a_bucket_without_access_is_refused_before_the_run_starts(
    bucket: "Bucket", capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.faults.refused = "."
    words = ["--config", "configs/tiny.toml", "--runs", "gs://bucket/runs"]
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert "--runs is gs://bucket/runs, which cannot be read: " in error and "no access" in error
    assert "gcloud storage ls gs://bucket/runs" in error


def test_orbax_writes_arrays_to_no_other_object_store() -> None:
    """Once this fails, orbax has a way to `s3://`, which is refused until then."""
    handlers, drivers = ocp.type_handlers, {}
    for scheme in ("gs", "s3"):
        folder = epath.Path(f"{scheme}://bucket/run")
        info = handlers.ParamInfo(name="a", parent_dir=folder, is_ocdbt_checkpoint=False)
        spec = handlers.get_json_tspec_read(info, use_ocdbt=False)
        drivers[scheme] = spec["kvstore"]["driver"]
        if scheme == "s3":
            with pytest.raises(ValueError, match="s3:/bucket/run"):
                handlers.get_json_tspec_read(info, use_ocdbt=True)
    assert drivers == {"gs": "gcs", "s3": "file"}


def test_urls_are_paths_with_the_same_methods() -> None:
    path = locate("gs://bucket/a") / "b"
    assert (str(path), path.name, str(path.parent)) == ("gs://bucket/a/b", "b", "gs://bucket/a")
    assert locate("runs") == Path("runs") and type(locate("runs")) is type(Path())
