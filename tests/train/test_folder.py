import json
import tomllib
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.train.examples import settings
from xlashard.train.curve import running_mean
from xlashard.train.errors import SettingsError
from xlashard.train.folder import RunFolder
from xlashard.train.schema import read
from xlashard.train.settings import Settings


def lines(folder: RunFolder) -> list[dict]:
    text = (folder.path / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_folder_holds_settings_measurements_and_a_curve(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "runs", settings()) as folder:
        for step in range(1, 4):
            folder.record("train", step=step, loss=5.0 - step)
        folder.record("eval", step=3, loss=2.5)
        # A run that is killed leaves what it has measured.
        assert lines(folder)[-1] == {"kind": "eval", "step": 3, "loss": 2.5}
    assert folder.path == tmp_path / "runs" / "small"
    assert [x["kind"] for x in lines(folder)] == ["train"] * 3 + ["eval"]
    document = tomllib.loads((folder.path / "config.toml").read_text())
    assert read(Settings, document) == settings()
    image = matplotlib.image.imread(folder.path / "loss.png")
    assert image.shape[:2] == (540, 960)
    assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 20


def test_nothing_measured_draws_nothing(tmp_path: Path) -> None:
    with RunFolder(tmp_path, settings()) as folder:
        pass
    assert not (folder.path / "loss.png").exists()
    assert lines(folder) == []


def test_the_curve_is_drawn_also_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no more"), RunFolder(tmp_path, settings()) as folder:
        folder.record("train", step=1, loss=5.0)
        raise RuntimeError("no more")
    assert (folder.path / "loss.png").exists()


def test_earlier_results_stay(tmp_path: Path) -> None:
    for name in ("small", "small-2", "small-3"):
        with RunFolder(tmp_path, settings()) as folder:
            assert folder.path.name == name


@pytest.mark.parametrize("name", ["a/b", "..", ".", "/etc"])
def test_a_name_is_one_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match=r"run\.name must be the name of one folder"):
        RunFolder(tmp_path, settings(f"run.name={name}"))


def test_a_place_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"cannot be made: .*--runs FOLDER"):
        RunFolder(tmp_path / "file", settings())


def test_the_running_mean_begins_at_the_first_value() -> None:
    np.testing.assert_allclose(running_mean([4.0, 4.0, 4.0]), 4.0)
    means = running_mean([4.0, 2.0, 2.0])
    assert means[0] == 4.0
    np.testing.assert_allclose(means[1], (0.9 * 0.1 * 4 + 0.1 * 2) / (0.9 * 0.1 + 0.1))
    assert 2 < means[2] < means[1] < 4
