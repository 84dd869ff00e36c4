"""One of two processes, started by `run_many` with a folder in which it saves and restores."""

import sys

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests.core.processes import join_the_others
from xlashard import (
    Array,
    Mesh,
    NamedSharding,
    P,
    device_put,
    make_array_from_callback,
)

join_the_others()

V = np.arange(128, dtype=np.float32).reshape(8, 16)
MESH = Mesh(np.array(jax.devices()).reshape(2, 2), ("process", "device"))
ROWS, COLUMNS = (
    NamedSharding(MESH, P(("process", "device"))),
    NamedSharding(MESH, P(None, "device")),
)

tree = {
    "rows": make_array_from_callback(V.shape, ROWS, lambda index: V[index]),
    "whole": make_array_from_callback(V.shape, NamedSharding(MESH, P()), lambda index: V[index]),
}
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(sys.argv[1], tree)
    checkpointer.wait_until_finished()
    wanted = {
        "rows": jax.ShapeDtypeStruct(V.shape, V.dtype, sharding=COLUMNS),
        "whole": tree["whole"],
    }
    restored = device_put(checkpointer.restore(sys.argv[1], wanted))
assert type(restored["rows"]) is Array and restored["rows"].sharding == COLUMNS
for x in restored.values():
    for shard in x.addressable_shards:
        assert np.array_equal(shard.data, V[shard.index])
print("both agree")
