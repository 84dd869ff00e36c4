"""One of two processes: `python two_processes_save.py PORT NUMBER FOLDER` saves and restores."""

import sys

import jax
import numpy as np

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))

import orbax.checkpoint as ocp  # noqa: E402

from xlashard import (  # noqa: E402
    Array,
    Mesh,
    NamedSharding,
    P,
    device_put,
    make_array_from_callback,
)

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
