"""Load saved programs in a process that has traced and compiled nothing.

    python -m tests.core.pjit.saved.load FOLDER

For each `NAME.program` in the folder it calls the program on the arguments in `NAME.npz` and writes
the facts of the program to `NAME.json`.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax  # noqa: F401  the trees of one program have nodes of its classes

from tests.core.pjit.saved import cases
from xlashard import Compiled


def main(folder: Path) -> None:
    for path in sorted(folder.glob("*.program")):
        compiled = Compiled.deserialize(path.read_bytes())
        stored = np.load(path.with_suffix(".npz"))
        leaves = [stored[f"arr_{i}"] for i in range(len(stored.files))]
        avals = jax.tree.leaves(compiled.in_avals)
        leaves = [restored(leaf, aval) for leaf, aval in zip(leaves, avals, strict=True)]
        args, kwargs = compiled.in_tree.unflatten(leaves)
        again = Compiled.deserialize(compiled.serialize())
        found = [cases.facts(program, args, kwargs) for program in (compiled, again)]
        path.with_suffix(".json").write_text(json.dumps(found))


def restored(leaf, aval):
    """Return a restored argument: keys from their integers, bfloat16 from its bytes."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(leaf)
    return leaf.astype(aval.dtype)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
