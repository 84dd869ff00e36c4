import os
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.message_patterns import naming
from tests.train.examples import choose_layout, devices, settings, shallow
from tests.train.loop.test_job import Recorder, records, run
from tests.train.loop.test_run_folder import opened
from xlashard.cli.main import main
from xlashard.train.checkpoint.manifest import Manifest, RunMetadata
from xlashard.train.command import read_location
from xlashard.train.config.schema import to_toml
from xlashard.train.config.settings import Settings
from xlashard.train.errors import DataError, SettingsError
from xlashard.train.loop.job import run_job
from xlashard.train.loop.run_folder import changes, last_run, newest_resumable, read_run
from xlashard.train.loop.steps import Progress


def go_on(folder: Path, *words: str, screen: Recorder | None = None) -> tuple[Recorder, Progress]:
    resumed, screen = read_run(folder, words), screen or Recorder()
    return screen, run_job(resumed.settings, devices(8), screen, folder.parent, resumed)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("model.layers=3", "model.layers = 2"),
        ("model.rope_base=5e4", "parameters"),
        ("run.seed=1", "order"),
        ("run.name=other", "folder"),
    ],
)
def test_resume_refuses_settings_that_change_the_run(tmp_path: Path, word: str, why: str) -> None:
    with opened(tmp_path) as folder:
        pass
    with pytest.raises(SettingsError) as caught:
        read_run(folder.path, [word])
    assert why in str(caught.value)
    assert f"--config {folder.path / 'config.toml'} --set {word.partition('=')[0]}=" in str(
        caught.value
    )


def test_resume_accepts_settings_that_do_not_change_the_run(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        pass
    words = ["training.steps=9", "mesh.data=1", "devices.emulate=4", "model.compute=bfloat16"]
    resumed = read_run(folder.path, words)
    assert resumed.folder == folder.path
    assert resumed.before == settings()
    assert resumed.settings == settings(*words)
    assert changes(resumed.before, resumed.settings) == {
        "devices.emulate": (8, 4),
        "mesh": ({"data": 2, "fsdp": 2, "tensor": 2}, {"data": 1, "fsdp": 2, "tensor": 2}),
        "model.compute": ("float32", "bfloat16"),
        "training.steps": (4, 9),
    }


def save_settings(folder: Path, run: Settings) -> None:
    """Write the manifest of a checkpoint of step 2 with settings."""
    step = folder / "checkpoints" / "00000002"
    step.mkdir(parents=True)
    Manifest(RunMetadata(2, {}, to_toml(run), {}), {}, {}).write(step)


@pytest.mark.parametrize("end", ["[training]", "\n[devices]", "tensor = 2", "mperature = 0.7", ""])
def test_keys_that_a_settings_file_lacks_are_those_of_the_checkpoint(
    tmp_path: Path, end: str
) -> None:
    saved = settings("training.steps=40", "training.batch=16", "generation.temperature=0.7")
    with opened(tmp_path, saved) as folder:
        save_settings(folder.path, saved)
    file = folder.path / "config.toml"
    text = file.read_text()
    file.write_text(text[: text.index(end)])
    resumed = read_run(folder.path, ["training.steps=41"])
    assert resumed.settings == replace(saved, training=replace(saved.training, steps=41))
    cut, changed = resumed.notes
    assert f"{file} is cut off" in cut
    assert "of the checkpoint of step 2" in cut
    assert "training.steps from 40 to 41" in changed


def test_a_value_that_is_cut_off_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    saved = settings("generation.temperature=0.75")
    with opened(tmp_path, saved) as folder:
        save_settings(folder.path, saved)
    file = folder.path / "config.toml"
    whole = to_toml(saved)
    for end in (*range(0, len(whole), 37), *range(len(whole) - 8, len(whole))):
        for tail in ("", "\0" * (len(whole) - end)):  # after a power cut
            file.write_text(whole[:end] + tail)
            resumed = read_run(folder.path, [])
            assert resumed.settings == saved and len(resumed.notes) == 1, end


def test_a_run_in_a_renamed_folder_is_named(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        pass
    assert read_run(folder.path, []).notes == []
    copy = folder.path.rename(tmp_path / "small-2")
    assert read_run(copy, []).notes == []
    (note,) = read_run(copy.rename(tmp_path / "other"), []).notes
    assert "'small'" in note


def test_settings_edited_in_the_file_are_compared_with_the_checkpoint(tmp_path: Path) -> None:
    with opened(tmp_path, settings("training.steps=9")) as folder:
        save_settings(folder.path, settings())
    assert read_run(folder.path, []).before == settings()
    assert "training.steps from 4 to 9" in read_run(folder.path, []).notes[0]
    file = folder.path / "config.toml"
    file.write_text(to_toml(settings("run.seed=1")))
    with pytest.raises(SettingsError, match=r"run\.seed = 0 cannot become 1"):
        read_run(folder.path, [])


def test_the_newest_run_with_a_checkpoint_is_resumed(tmp_path: Path) -> None:
    assert newest_resumable(tmp_path, "small") is None
    for age, name in enumerate(("small", "small-2", "small-3", "smaller")):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "config.toml").touch()
        (tmp_path / name / "metrics.jsonl").touch()
        os.utime(tmp_path / name / "metrics.jsonl", (1000 * age, 1000 * age))
    assert newest_resumable(tmp_path, "small") is None
    for name in ("small", "small-2", "smaller"):
        (tmp_path / name / "checkpoints" / "00000002").mkdir()
    (tmp_path / "small-3" / "checkpoints" / ".saving-00000009").mkdir()
    assert newest_resumable(tmp_path, "small") == tmp_path / "small-2"


def test_a_folder_without_a_run_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"config\.toml"):
        read_run(tmp_path, [])
    with opened(tmp_path) as folder:
        pass
    with pytest.raises(SettingsError, match=f"/smal .* .*: {folder.path}"):
        read_run(tmp_path / "smal", [])
    with pytest.raises(SettingsError, match=r"config\.toml is not a run folder: it is a file"):
        read_run(folder.path / "config.toml", [])
    with pytest.raises(SettingsError, match=naming("/nothing ", "xlashard train --config")):
        last_run(tmp_path / "nothing")
    assert last_run(tmp_path) == folder.path


@pytest.mark.parametrize("option", ["--runs", "--resume", "--config", "--data"])
def test_urls_of_object_stores_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "configs/tiny.toml"] if option in ("--runs", "--data") else []
    commands = {
        "s3://bucket/run": "s3fs bucket /mnt/bucket",
        "hdfs://bucket/run": "mount bucket at /mnt/bucket",
    }
    if option == "--data":
        # A shell script that joins paths makes one slash of two.
        for url in ("gs://bucket/run", "gs:/bucket/run"):
            commands[url] = "gcsfuse --implicit-dirs bucket /mnt/bucket"
    for url, command in commands.items():
        assert main(["train", *words, option, url]) == 2
        error = capsys.readouterr().err
        assert f"{option} must be a path" in error and f"not {url}. Mount" in error
        assert error.endswith(f"\n  {command}\n  {option} /mnt/bucket/run\n")
    words = ["--config", "configs/tiny.toml", "--set", 'data.paths=["gs://bucket/text"]']
    assert main(["train", *words]) == 2
    assert "data.paths must be a path" in capsys.readouterr().err
    assert not Path("gs:").exists()


def test_file_urls_are_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path / "a b") as folder:
        pass
    url = folder.path.as_uri()
    assert "%20" in url and read_location("--resume", url) == str(folder.path)
    assert read_location("--runs", url.replace("file://", "file://localhost")) == str(folder.path)
    assert main(["train", "--resume", f"{url}/none"]) == 2
    assert f"{folder.path}/none" in capsys.readouterr().err
    for url in ("file://host/runs", "file:/runs"):
        with pytest.raises(SettingsError, match=naming("--runs", url, "--runs file:///")):
            read_location("--runs", url)
    for path in ("C:/runs", "runs", "/mnt/a:/b", "./gs:/b"):
        assert read_location("--runs", path) == path


@pytest.mark.devices(8)
def test_a_file_of_a_run_that_cannot_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", str(tmp_path / ("a" * 300))]) == 2
    error = capsys.readouterr().err
    assert re.match(naming("config.toml can't be", "File name too long"), error), error
    with opened(tmp_path, shallow()) as folder:
        (folder.path / "metrics.jsonl").unlink()
    (folder.path / "metrics.jsonl").mkdir()
    assert main(["train", "--resume", str(folder.path)]) == 1
    error = capsys.readouterr().err
    assert re.match(naming("metrics.jsonl can't be", "Is a directory"), error), error


@pytest.mark.devices(8)
def test_run_without_a_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        pass
    with pytest.raises(SettingsError, match="/small/checkpoints") as caught:
        go_on(folder.path)
    assert f"xlashard train --config {folder.path / 'config.toml'}" in str(caught.value)


@pytest.mark.integration
def test_a_finished_run_is_reported_and_accepts_more_steps(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four " * 60)
    outcome = run(Recorder(), tmp_path, shallow("training.steps=2", f"data.paths=['{text}']"))
    before = records(outcome)

    screen, again = go_on(outcome.folder)
    assert again.signal == ""
    assert f"The run in {outcome.folder} is finished: 2 steps" in screen.text
    assert f"xlashard train --resume {outcome.folder} --steps N" in screen.text
    assert records(outcome) == before

    with pytest.raises(SettingsError, match="of step 2, and training.steps = 1 ends before that"):
        go_on(outcome.folder, "training.steps=1")

    screen, again = go_on(outcome.folder, "training.steps=3")
    assert (screen.done, screen.total) == (2, 3)
    assert [done for done, _ in screen.steps] == [3]
    assert (again.steps, again.checkpoint) == (3, 3)
    kept = [x for x in records(outcome) if x["kind"] in ("train", "resume")]
    assert [x.get("step", x.get("steps")) for x in kept] == [1, 2, 2, 3]
    assert kept[2]["changed"] == {"training.steps": [2, 3]}

    text.write_text("one two three five " * 60)
    with pytest.raises(DataError, match=naming("text", "--data PATH")):
        go_on(outcome.folder, "training.steps=4")
    other = tmp_path / "other.txt"
    other.write_text("one two three five " * 60)
    _, again = go_on(outcome.folder, "training.steps=4", f"data.paths=['{other}']")
    assert again.steps == 4


@pytest.mark.integration
def test_run_resumes_in_an_automatic_layout_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    six = shallow("training.steps=6")
    whole = run(Recorder(), tmp_path / "whole", six)
    choose_layout(monkeypatch, "data: fsdp, fsdp: fsdp, tensor: tensor")
    first = run(stopping_after(1), tmp_path / "parts", six)
    screen, second = go_on(first.folder, "sharding=auto", screen=stopping_after(3))
    assert f"Resuming after step {first.checkpoint}" in screen.text
    assert any("parameters" in x and "'fsdp'" in x for x in screen.text.splitlines())
    assert re.search(r"^ +batch +P\(None, .*'data'", screen.text, re.MULTILINE)
    assert 1 <= first.steps < second.steps < 6
    _, last = go_on(first.folder, "sharding=rules")
    assert last.held_out == pytest.approx(whole.held_out, rel=1e-4)
    measured = {(x["kind"], x["step"]): x["loss"] for x in records(last) if "loss" in x}
    expected = {(x["kind"], x["step"]): x["loss"] for x in records(whole) if "loss" in x}
    assert measured == pytest.approx(expected, rel=1e-4)


def stopping_after(step: int) -> Recorder:
    return Recorder(step, lambda: os.kill(os.getpid(), signal.SIGINT))


@pytest.mark.devices(8)
def test_a_failure_ends_no_process_for_threads_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waiting(threading.Thread):
        pass

    Waiting.__module__ = "orbax.checkpoint"
    done = threading.Event()
    threads = [Waiting(target=done.wait), threading.Thread(target=done.wait, name="compiling")]
    monkeypatch.setattr("xlashard.train.command.leave", lambda *_: pytest.fail("left"))
    for thread in threads:
        thread.start()
    try:
        with opened(tmp_path, shallow()) as folder:
            (folder.path / "metrics.jsonl").unlink()
        (folder.path / "metrics.jsonl").mkdir()
        assert main(["train", "--resume", str(folder.path)]) == 1
    finally:
        done.set()
