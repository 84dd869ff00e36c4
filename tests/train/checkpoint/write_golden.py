"""Write the checkpoint that later releases must read: `python -m` with the name of this module.

Run it only for a new format, in an environment of the oldest versions.
"""

import shutil
from pathlib import Path

import tests.conftest  # noqa: F401  (eight devices)
from tests.train.checkpoint.states import metadata, state
from xlashard.train.checkpoint import Checkpoints

GOLDENS = Path(__file__).with_name("goldens")

if __name__ == "__main__":
    shutil.rmtree(GOLDENS, ignore_errors=True)
    with Checkpoints(GOLDENS) as checkpoints:
        checkpoints.save(state(7), metadata(7))
