"""Checkpoints that were saved before a test."""

import shutil
from pathlib import Path

import pytest

from tests.train.checkpoint.states import save


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps; tests only read them."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    save(folder, 10, 20)
    return folder


@pytest.fixture
def own(saved: Path, tmp_path: Path) -> Path:
    """The two steps in a folder that a test may change."""
    folder = tmp_path / "run" / "checkpoints"
    return Path(shutil.copytree(saved, folder))
