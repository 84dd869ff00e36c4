"""One of two processes of two devices: `python pod_saves.py FOLDER`; FOLDER/given holds step 7."""

import resource
import signal
import sys
from pathlib import Path

import jax

from tests.core.processes import expect
from tests.train.checkpoint.pod_states import COLUMNS, ROWS, check, metadata, state, state_types
from xlashard import P
from xlashard.train.checkpoint import Checkpoints
from xlashard.train.errors import CheckpointError

jax.distributed.initialize()
ME = jax.process_index()
FOLDER = Path(sys.argv[1])

with Checkpoints(FOLDER / "run", keep=2, timeout=60) as checkpoints:
    for step in (1, 2, 3):
        checkpoints.save(state(step), metadata(step))
    checkpoints.wait()
    assert checkpoints.steps() == [2, 3]
    for spec in (ROWS, COLUMNS, P()):
        restored = checkpoints.restore(state_types(spec))
        check(restored.state, 3, spec)
        assert restored.metadata == metadata(3) and restored.metadata.processes == 2
    print("saved and restored")

    # One process has no more room; the other raises at once, too.
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if ME == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, limit[1]))
    checkpoints.save(state(4), metadata(4))
    failed = expect(CheckpointError, "process 1: .*File too large", checkpoints.wait)
    assert failed.step == 4 and "the last one is of step 3" in str(failed)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    print("one had no room")

    # The first one cannot copy a file of the run, while the others have only arrays to write.
    expect(
        CheckpointError,
        "step 6 could not .*process 0: Is a directory",
        lambda: checkpoints.save(state(6), metadata(6), [FOLDER]),
    )
    # Of this save: orbax may still write late parts of step 4 into a folder that it makes again.
    assert not list((FOLDER / "run").glob(".saving-00000006-*"))
    print("one could not copy")

    # They are not at the same step.
    expect(
        CheckpointError,
        "not in step: process 0: save step 8; process 1: save step 9",
        lambda: checkpoints.save(state(8), metadata(8 + ME)),
    )
    checkpoints.save(state(5), metadata(5))
    checkpoints.wait()
    check(checkpoints.restore(state_types()).state, 5, ROWS)
    print("went on")

with Checkpoints(FOLDER / "given") as checkpoints:
    check(checkpoints.restore(state_types()).state, 7, ROWS)
    print("restored what one process had saved")

with Checkpoints(FOLDER / "damaged") as checkpoints:
    damaged = expect(CheckpointError, "was altered", lambda: checkpoints.restore(state_types()))
    assert damaged.file and damaged.file.startswith("arrays/"), damaged.file
    print("refused an altered file")

with Checkpoints(FOLDER / f"disk {ME}", timeout=60) as checkpoints:
    expect(
        CheckpointError,
        r"process 1: .*disk 1/\.saving.*, created by process 0, is not visible.*processes share",
        lambda: checkpoints.save(state(6), metadata(6)),
    )
with Checkpoints(FOLDER / ("nothing" if ME else "given"), timeout=60) as checkpoints:
    text = "^process 1: .*nothing has no checkpoint: it does not exist$"
    expect(CheckpointError, text, lambda: checkpoints.restore(state_types()))
with Checkpoints(FOLDER / "nothing", timeout=60) as checkpoints:
    text = "^.*nothing has no checkpoint: it does not exist$"
    expect(CheckpointError, text, lambda: checkpoints.restore(state_types()))
print("saw that a folder is not shared")

with Checkpoints(FOLDER / "late", timeout=2) as checkpoints:
    if ME == 0:
        text = "save step 1.*process 1 "
        expect(CheckpointError, text, lambda: checkpoints.save({}, metadata(1)))
print("all well")
