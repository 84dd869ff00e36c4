"""One of two processes, of which the second is killed in its part of a save: `... FOLDER`."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax

from tests.train.checkpoint.pod_states import metadata, state
from xlashard.train.checkpoint import Checkpoints

jax.distributed.initialize()
FOLDER = Path(sys.argv[1])


def at_its_digests(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and str(args[0]).endswith("parts/1"):
        os.kill(os.getpid(), signal.SIGKILL)


with Checkpoints(FOLDER, timeout=60) as checkpoints:
    for step in (1, 2):
        checkpoints.save(state(step), metadata(step))
    checkpoints.wait()
    print("committed", checkpoints.steps(), flush=True)
    if jax.process_index() == 1:
        sys.addaudithook(at_its_digests)
    checkpoints.save(state(3), metadata(3))
    checkpoints.wait()
print("never comes here")
