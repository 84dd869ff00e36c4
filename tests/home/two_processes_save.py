"""One of two processes: `python two_processes_save.py PORT NUMBER FOLDER` saves and restores."""

import sys

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests.processes import join_the_other
from xlashard import (
    Array,
    Mesh,
    NamedSharding,
    P,
    device_put,
    make_array_from_callback,
)

join_the_other()

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
    checkpointer.save(sys.argv[3], tree)
    checkpointer.wait_until_finished()
    wanted = {
        "rows": jax.ShapeDtypeStruct(V.shape, V.dtype, sharding=COLUMNS),
        "whole": tree["whole"],
    }
    restored = device_put(checkpointer.restore(sys.argv[3], wanted))
assert type(restored["rows"]) is Array and restored["rows"].sharding == COLUMNS
for x in restored.values():
    for shard in x.addressable_shards:
        assert np.array_equal(shard.data, V[shard.index])
print("both agree")
