"""A program over two processes, saved by one of them and loaded by both.

Started by `run_many`, with the file.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from tests.core.processes import expect, join_the_others
from xlashard import Compiled, Mesh, NamedSharding, P, device_put, make_array_from_callback, pjit
from xlashard.errors import SavedProgramError


def spread(count, sharding):
    """Return the numbers from 0 on, `[count]`."""
    return make_array_from_callback((count,), sharding, lambda i: np.arange(count, dtype="f4")[i])


def main(file: Path) -> None:
    join_the_others()
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = NamedSharding(mesh, P("x"))
    x = spread(8, rows)
    table = device_put(np.arange(20_000, dtype=np.float32), NamedSharding(mesh, P()))
    compiled = pjit(lambda x: (x * 2, x.sum() + table[3])).lower(x).compile()
    if jax.process_index() == 0:
        file.write_bytes(compiled.serialize())
    multihost_utils.sync_global_devices("saved")
    loaded = Compiled.deserialize(file.read_bytes())
    doubled, total = loaded(x)
    assert float(total) == 31.0
    assert loaded.input_shardings[0][0] == rows
    for mine, given in zip(doubled.addressable_shards, x.addressable_shards, strict=True):
        np.testing.assert_array_equal(mine.data, np.asarray(given.data) * 2)
    large = spread(40_000, rows)
    expect(
        SavedProgramError,
        "sharded over several processes",
        pjit(lambda x: x + large[3]).lower(x).compile().serialize,
    )
    print("both ran it")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
