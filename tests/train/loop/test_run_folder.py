import json
import os
import tomllib
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.message_patterns import naming
from tests.train.examples import settings
from xlashard.train.config.schema import read
from xlashard.train.config.settings import Settings
from xlashard.train.errors import SettingsError
from xlashard.train.loop.run_folder import (
    RunFolder,
    is_finished,
    measured_until,
    new_folder,
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
    kept = measured_until(folder.path, 4, evaluated_again=True)
    with RunFolder(folder.path, settings("training.steps=9"), kept) as again:
        again.record("train", step=5, loss=1.5)
    records = [(x["kind"], x["step"]) for x in lines(again)]
    steps = [("train", step) for step in (1, 2, 3, 4, 5)]
    assert records == [*steps[:2], ("eval", 2), *steps[2:]]
    assert again._curves["train"] == ([1, 2, 3, 4, 5], [5.0, 4.0, 3.0, 2.0, 1.5])
    assert "steps = 9" in (folder.path / "config.toml").read_text()


def test_evaluation_that_is_not_repeated_stays_recorded(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.record("eval", step=4, loss=9.0)
    assert len(measured_until(folder.path, 4, evaluated_again=False)) == 1
    assert measured_until(folder.path, 4, evaluated_again=True) == []
    assert measured_until(folder.path, 3, evaluated_again=False) == []


def test_a_run_is_finished_at_its_last_step(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        assert not is_finished(folder.path, 3)
        folder.record("end", interrupted=True, steps=3)
        assert not is_finished(folder.path, 3)
        folder.record("end", interrupted=False, steps=3)
    assert is_finished(folder.path, 3)
    assert not is_finished(folder.path, 4)


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
