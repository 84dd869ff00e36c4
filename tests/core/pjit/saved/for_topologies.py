"""Load programs that were saved for topologies, in a process without compiling or unpickling.

    python -m tests.core.pjit.saved.for_topologies FOLDER

`tpu.program` is loaded for the devices of an equal topology; `cpu.program`, also compiled for a
topology, runs on the local devices. Their facts are written to `facts.json`.
"""

import json
import pickle
import sys
from pathlib import Path

import numpy as np

from xlashard import Compiled
from xlashard.tpu import topology


def forbid_pickle():
    def refuse(*_, **__):
        raise AssertionError("something is pickled")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        setattr(pickle, name, refuse)
    # For code that imported the functions before.
    sys.addaudithook(lambda event, _: refuse() if event == "pickle.find_class" else None)


def main(folder: Path) -> None:
    forbid_pickle()
    data = (folder / "tpu.program").read_bytes()
    there = Compiled.deserialize(data, devices=topology("v5e:4x4").devices)
    here = Compiled.deserialize((folder / "cpu.program").read_bytes())
    total, rows = here(np.ones((8, 4), np.float32), np.ones((8, 64), np.float32))
    facts = {
        "text": there.as_text(),
        "cost": there.cost_analysis(),
        "memory": vars(there.memory_analysis()),
        "same again": there.serialize() == data,
        "result": [float(np.sum(total)), np.asarray(rows["y"]).tolist()],
        "devices": len(rows["y"].devices()),
    }
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
