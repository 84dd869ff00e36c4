"""Two real processes save and restore together, and one process restores their checkpoint."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.core.processes import run_many, run_pod
from tests.train.checkpoint.pod_states import COLUMNS, check, metadata, state, state_types, values
from xlashard.pods.testing.launcher import PodSize
from xlashard.pods.testing.supervision import EndingRules
from xlashard.train.checkpoint import Checkpoints
from xlashard.train.checkpoint.manifest import files_in, writer_of

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


def test_checkpoints_are_interchangeable_between_one_and_two_processes(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "given") as checkpoints:
        checkpoints.save(state(7, COLUMNS), metadata(7))
    shutil.copytree(tmp_path / "given", tmp_path / "damaged")
    files = (tmp_path / "damaged" / "00000007" / "arrays").rglob("*")
    biggest = max((file for file in files if file.is_file()), key=lambda file: file.stat().st_size)
    data = bytearray(biggest.read_bytes())
    data[len(data) // 2] ^= 1
    biggest.write_bytes(data)

    for output in run_many(HERE / "pod_saves.py", 2, 2, str(tmp_path)):
        assert "all well" in output, output

    with Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.steps() == [3, 5]
        restored = checkpoints.restore(state_types(COLUMNS))
    check(restored.state, 5, COLUMNS)
    for name, x in values(5).items():
        assert np.asarray(restored.state[name]).tobytes() == x.tobytes()
    # Each process has written, and so digested, its part.
    names = files_in(tmp_path / "run" / "00000005")
    for process in range(2):
        its = sum(names[name] for name in names if writer_of(name) == process)
        assert its > 0.4 * values(5)["w"].nbytes
    assert restored.metadata == replace(metadata(5), processes=2)


def test_kill_during_a_save_leaves_earlier_checkpoints_intact(tmp_path: Path) -> None:
    done = run_pod([str(HERE / "pod_killed.py"), str(tmp_path)], PodSize(2, 2), EndingRules(120))
    for output in done.outputs:
        assert "committed [1, 2]" in output and "never comes" not in output, output
    assert len(list(tmp_path.glob(".saving-00000003-*"))) == 1
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1, 2]
        check(checkpoints.restore(state_types()).state, 2)
        checkpoints.save(state(3), metadata(3))
        checkpoints.wait()
        check(checkpoints.restore(state_types()).state, 3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["00000001", "00000002", "00000003"]
