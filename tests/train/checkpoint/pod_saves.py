"""One of two processes of two devices: `python pod_saves.py FOLDER`; FOLDER/given holds step 7."""

import resource
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.processes import expect
from xlashard import Array, Mesh, NamedSharding, P, make_array_from_callback
from xlashard.train.checkpoint import About, Checkpoints
from xlashard.train.errors import CheckpointError

jax.distributed.initialize()
ME = jax.process_index()
FOLDER = Path(sys.argv[1])
MESH = Mesh(np.array(jax.devices()).reshape(2, 2), ("process", "device"))
ROWS, COLUMNS = P(("process", "device")), P(None, "process")


def values(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "w": rng.standard_normal((8, 4096), np.float32),
        "b": rng.standard_normal(8).astype(jax.numpy.bfloat16),
        "step": np.asarray(step, np.int32),
    }


def place(name: str, spec: Any) -> NamedSharding:
    return NamedSharding(MESH, spec if name == "w" else P())


def state(step: int, spec: Any = ROWS) -> dict[str, Array]:
    return {
        name: make_array_from_callback(x.shape, place(name, spec), lambda index, x=x: x[index])
        for name, x in values(step).items()
    }


def wanted(spec: Any = ROWS) -> dict[str, Any]:
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(name, spec))
        for name, x in values(0).items()
    }


def check(got: dict[str, Array], step: int, spec: Any) -> None:
    for name, x in values(step).items():
        assert type(got[name]) is Array and got[name].sharding == place(name, spec)
        for shard in got[name].addressable_shards:
            assert np.asarray(shard.data).tobytes() == x[shard.index].tobytes(), name


def about(step: int) -> About:
    return About(step, {"next": step}, "", {"process": 2, "device": 2})


with Checkpoints(FOLDER / "run", keep=2, timeout=60) as checkpoints:
    for step in (1, 2, 3):
        checkpoints.save(state(step), about(step))
    checkpoints.wait()
    assert checkpoints.steps() == [2, 3]
    for spec in (ROWS, COLUMNS, P()):
        restored = checkpoints.restore(wanted(spec))
        check(restored.state, 3, spec)
        assert restored.about == about(3) and restored.about.processes == 2
    print("saved and restored")

    # One process has no more room; the other hears of it at once.
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if ME == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, limit[1]))
    checkpoints.save(state(4), about(4))
    failed = expect(CheckpointError, "process 1: .*File too large", checkpoints.wait)
    assert failed.step == 4 and "the last one is of step 3" in str(failed)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    print("one had no room")

    # They are not at the same step.
    expect(
        CheckpointError,
        r"not in step: save step 8 \(process 0\); save step 9 \(process 1\)",
        lambda: checkpoints.save(state(8), about(8 + ME)),
    )
    checkpoints.save(state(5), about(5))
    checkpoints.wait()
    check(checkpoints.restore(wanted()).state, 5, ROWS)
    print("went on")

with Checkpoints(FOLDER / "given") as checkpoints:
    check(checkpoints.restore(wanted()).state, 7, ROWS)
    print("restored what one process had saved")

with Checkpoints(FOLDER / "damaged") as checkpoints:
    damaged = expect(CheckpointError, "was altered", lambda: checkpoints.restore(wanted()))
    assert damaged.file and damaged.file.startswith("arrays/"), damaged.file
    print("refused an altered file")

with Checkpoints(FOLDER / f"disk {ME}", timeout=60) as checkpoints:
    expect(
        CheckpointError,
        r"process 1: .*disk 1/\.saving.*, which process 0 made, is not there.* all processes share",
        lambda: checkpoints.save(state(6), about(6)),
    )
with Checkpoints(FOLDER / ("nothing" if ME else "given"), timeout=60) as checkpoints:
    text = "^process 1: there is no checkpoint in .*nothing: there is no such folder$"
    expect(CheckpointError, text, lambda: checkpoints.restore(wanted()))
with Checkpoints(FOLDER / "nothing", timeout=60) as checkpoints:
    text = "^there is no checkpoint in .*nothing: there is no such folder$"
    expect(CheckpointError, text, lambda: checkpoints.restore(wanted()))
print("saw that a folder is not shared")

with Checkpoints(FOLDER / "late", timeout=2) as checkpoints:
    if ME == 0:
        text = "save step 1.*process 1 "
        expect(CheckpointError, text, lambda: checkpoints.save({}, about(1)))
print("all well")
