import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.message_patterns import naming
from tests.train.examples import settings
from xlashard.train.config.schema import read
from xlashard.train.config.settings import Settings
from xlashard.train.errors import RunError, SettingsError
from xlashard.train.loop.console import Screen, log_console
from xlashard.train.loop.run_folder import (
    LogFile,
    RunFolder,
    is_finished,
    new_folder,
    read_kept,
    run_folders,
    running_mean,
)


def opened(runs: Path, run: Settings | None = None) -> RunFolder:
    """Return the open folder of a new run."""
    run = run or settings()
    return RunFolder(new_folder(runs, run.run.name), run)


def lines(folder: RunFolder) -> list[dict]:
    text = (folder.path / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_run_folder_holds_settings_measurements_and_a_curve(tmp_path: Path) -> None:
    with opened(tmp_path / "runs") as folder:
        for step in range(1, 4):
            folder.record("train", step=step, loss=5.0 - step)
        folder.record("eval", step=3, loss=2.5)
        # A killed run keeps its measurements.
        assert lines(folder)[-1] == {"kind": "eval", "step": 3, "loss": 2.5}
    assert folder.path == tmp_path / "runs" / "small"
    assert [x["kind"] for x in lines(folder)] == ["train"] * 3 + ["eval"]
    document = tomllib.loads((folder.path / "config.toml").read_text())
    assert read(Settings, document) == settings()
    image = matplotlib.image.imread(folder.path / "loss.png")
    assert image.shape[:2] == (540, 960)
    assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 20


def test_run_without_metrics_draws_no_plot(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        pass
    assert not (folder.path / "loss.png").exists()
    assert lines(folder) == []


def test_the_curve_is_drawn_also_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no more"), opened(tmp_path) as folder:
        folder.record("train", step=1, loss=5.0)
        raise RuntimeError("no more")
    assert (folder.path / "loss.png").exists()


def test_existing_run_folders_are_not_overwritten(tmp_path: Path) -> None:
    for name in ("small", "small-2", "small-3"):
        with opened(tmp_path) as folder:
            assert folder.path.name == name


@pytest.mark.parametrize("name", ["a/b", "..", ".", "/etc", "a\0b", "\x1b[31m", "a\nb", "\ud800"])
def test_invalid_folder_name_as_run_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match=naming("run.name ", "--name ")):
        opened(tmp_path, settings(f"run.name={name}"))


def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"/file/small.*--runs FOLDER"):
        opened(tmp_path / "file")
    with pytest.raises(SettingsError, match="too long.*a shorter --name"):
        opened(tmp_path, settings(f"run.name={'a' * 300}"))


@pytest.mark.slow
def test_resumed_run_has_one_record_per_step(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        for step in range(1, 7):
            folder.record("train", step=step, loss=6.0 - step)
            if step % 2 == 0:
                folder.record("eval", step=step, loss=9.0)
        folder.record("text", text="gone")
    metrics = folder.path / "metrics.jsonl"
    # A killed process may leave half a line.
    metrics.write_text(metrics.read_text() + '{"kind": "train", "st')
    kept = read_kept(folder.path, 4, evaluated_again=True)
    assert kept.note == ""
    with RunFolder(folder.path, settings("training.steps=9"), kept.lines) as again:
        again.record("train", step=5, loss=1.5)
    records = [(x["kind"], x["step"]) for x in lines(again)]
    steps = [("train", step) for step in (1, 2, 3, 4, 5)]
    assert records == [*steps[:2], ("eval", 2), *steps[2:]]
    assert again._curves["train"] == ([1, 2, 3, 4, 5], [5.0, 4.0, 3.0, 2.0, 1.5])
    assert "steps = 9" in (folder.path / "config.toml").read_text()


def test_evaluation_that_is_not_repeated_stays_recorded(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.record("eval", step=4, loss=9.0)
    assert len(read_kept(folder.path, 4, evaluated_again=False).lines) == 1
    assert read_kept(folder.path, 4, evaluated_again=True).lines == []
    assert read_kept(folder.path, 3, evaluated_again=False).lines == []


def measure(folder: RunFolder, steps: int) -> None:
    for step in range(1, steps + 1):
        folder.record("train", step=step, loss=6.0 - step)


def keep_copy(folder: Path, step: int) -> None:
    """Copy the records to where a checkpoint has them."""
    saved = folder / "checkpoints" / f"{step:08d}"
    saved.mkdir(parents=True)
    (saved / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes())


@pytest.mark.parametrize(
    ("damage", "note"),
    [
        (lambda text: "".join(text.splitlines(keepends=True)[:3]), "lacks steps 4 to 6: "),
        (lambda text: "", "lacks steps 1 to 6: "),
        (lambda text: text.replace('"step": 2', '"sxep": 2'), "lacks steps 2: "),
        (lambda text: text.replace('"loss": 4.0', '"loss": 7.0'), "was altered"),
    ],
)
def test_damaged_metrics_are_restored_from_the_checkpoint(
    tmp_path: Path, damage: Callable[[str], str], note: str
) -> None:
    folder = opened(tmp_path)
    measure(folder, 6)
    folder.record("eval", step=5, loss=2.0)
    keep_copy(folder.path, 6)
    metrics = folder.path / "metrics.jsonl"
    whole = lines(folder)
    folder.record("eval", step=6, loss=1.0)
    # An evaluation after the checkpoint is no damage.
    assert read_kept(folder.path, 6, evaluated_again=False).lines == lines(folder)
    metrics.write_text(damage(metrics.read_text()))
    kept = read_kept(folder.path, 6, evaluated_again=True)
    assert kept.note.startswith(f"{metrics} {note}")
    assert kept.lines == whole


def test_a_gap_in_the_metrics_that_no_checkpoint_fills_is_named(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    measure(folder, 3)
    assert "lacks steps 4 to 5, " in read_kept(folder.path, 5, evaluated_again=True).note


def test_a_run_is_finished_at_its_last_step_with_its_checkpoint(tmp_path: Path) -> None:
    three = settings("training.steps=3")
    with opened(tmp_path) as folder:
        folder.record("end", interrupted=True, steps=3)
        (folder.path / "checkpoints" / "00000003").mkdir(parents=True)
        assert not is_finished(folder.path, three)
        folder.record("end", interrupted=False, steps=3)
    assert is_finished(folder.path, three)
    assert not is_finished(folder.path, settings("training.steps=4"))
    (folder.path / "checkpoints" / "00000003").rename(folder.path / "checkpoints" / "00000002")
    assert not is_finished(folder.path, three)
    assert is_finished(folder.path, settings("training.steps=3", "checkpoint.keep=0"))


def test_records_that_cannot_be_written_name_the_file(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder._metrics.close()
    with Path("/dev/full").open("a", encoding="utf-8") as folder._metrics:
        facts = naming(f"{folder.path}/metrics.jsonl ", "No space left")
        with pytest.raises(RunError, match=facts):
            measure(folder, 1)
        folder.close()


def test_a_log_that_cannot_be_written_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "log-1.txt").symlink_to("/dev/full")
    facts = naming(f"{tmp_path}/log-1.txt ", "No space left")
    log = LogFile(tmp_path / "log-1.txt")
    screen = Screen(log_console(log), 1)
    for write in (lambda: screen.show("a line"), log.flush, log.close):
        with pytest.raises(RunError, match=facts):
            write()
    log.close()
    with LogFile(tmp_path / "run" / "log-1.txt") as log:
        Screen(log_console(log), 1).show("a line")
    assert (tmp_path / "run" / "log-1.txt").read_text() == "a line\n"


def test_run_folders_are_ordered_by_modification_time(tmp_path: Path) -> None:
    assert run_folders(tmp_path) == []
    first, second = opened(tmp_path), opened(tmp_path)
    for folder, time in ((first, 2000), (second, 1000)):
        folder.close()
        os.utime(folder.path / "metrics.jsonl", (time, time))
    (tmp_path / "something else").mkdir()
    assert run_folders(tmp_path) == [second.path, first.path]


def test_running_mean_starts_at_the_first_value() -> None:
    np.testing.assert_allclose(running_mean([4.0, 4.0, 4.0]), 4.0)
    means = running_mean([4.0, 2.0, 2.0])
    assert means[0] == 4.0
    np.testing.assert_allclose(means[1], (0.9 * 0.1 * 4 + 0.1 * 2) / (0.9 * 0.1 + 0.1))
    assert 2 < means[2] < means[1] < 4
