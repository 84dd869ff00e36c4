"""One of several processes: arrays of safetensors, of which it reads the bytes of its devices.

It stops with an error where a result is wrong.
"""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tests.core.processes import join_the_others
from xlashard import Mesh, NamedSharding, P, load_safetensors

join_the_others()

FILE = sys.argv[1]
N = jax.process_count()
MESH = Mesh(np.array(jax.devices()).reshape(N, -1), ("process", "device"))
WHOLE = np.arange(64 * 8192, dtype=np.float32).reshape(64, 8192)
# The header, and the few files of the kernel that are read here.
SLACK = 32 * 1024


def count_read_bytes() -> int:
    """Return the bytes that system calls of this process have read."""
    match = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    assert match is not None
    return int(match[1])


def load(spec: P, share: float, dtype: str | None = None) -> None:
    """Load the array, and compare the values of this process and the bytes that it has read."""
    before = count_read_bytes()
    array = load_safetensors(FILE, NamedSharding(MESH, spec), dtype=dtype)["wide"]
    read = count_read_bytes() - before
    own = WHOLE.nbytes * share
    assert own <= read <= own + SLACK, (spec, read, own)
    for shard in array.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), WHOLE[shard.index].astype(array.dtype))


load(P("process"), 1 / N)  # Loads what the first call imports.
load(P("process", "device"), 1 / N)
load(P("device", "process"), 1 / N)
load(P(None, ("process", "device")), 1 / N)
load(P("process"), 1 / N, "bfloat16")
load(P(None, "device"), 1)
load(P(), 1)
assert load_safetensors(FILE, [("wide", NamedSharding(MESH, P()))])["wide"].dtype == jnp.float32
