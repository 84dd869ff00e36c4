"""Two real processes save and restore together, and one process what they saved."""

import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.array.cases import DEVICES
from tests.processes import run_many
from xlashard import Mesh, NamedSharding, P, device_put
from xlashard.train.checkpoint import About, Checkpoints

SCRIPT = Path(__file__).with_name("pod_saves.py")
MESH = Mesh(np.array(DEVICES), ("all",))


def values(step: int) -> dict[str, np.ndarray]:
    """As in the script."""
    rng = np.random.default_rng(step)
    return {
        "w": rng.standard_normal((8, 4096), np.float32),
        "b": rng.standard_normal(8).astype(jax.numpy.bfloat16),
        "step": np.asarray(step, np.int32),
    }


@pytest.mark.slow
@pytest.mark.skipif("cpu" not in os.environ["JAX_PLATFORMS"], reason="emulated processes")
def test_two_processes_and_one(tmp_path: Path) -> None:
    rows, whole = NamedSharding(MESH, P("all")), NamedSharding(MESH, P())
    with Checkpoints(tmp_path / "given") as checkpoints:
        state = {name: device_put(x, whole) for name, x in values(7).items()}
        checkpoints.save(state, About(7, {}, "", {"all": 8}))
    shutil.copytree(tmp_path / "given", tmp_path / "damaged")
    files = (tmp_path / "damaged" / "00000007" / "arrays").rglob("*")
    biggest = max((file for file in files if file.is_file()), key=lambda file: file.stat().st_size)
    data = bytearray(biggest.read_bytes())
    data[len(data) // 2] ^= 1
    biggest.write_bytes(data)

    for output in run_many(SCRIPT, 2, 2, str(tmp_path)):
        assert "all well" in output, output

    like = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows if x.ndim else whole)
        for name, x in values(0).items()
    }
    with Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.steps() == [3, 5]
        restored = checkpoints.restore(like)
    for name, x in values(5).items():
        assert np.asarray(restored.state[name]).tobytes() == x.tobytes()
    assert restored.about.processes == 2
    assert restored.about.changes(About(5, {}, "", {"all": 8})) == [
        "the mesh, {'process': 2, 'device': 2}, is {'all': 8} now",
        "the number of processes, 2, is 1 now",
    ]
