"""One of two processes that use JAX's multihost_utils, started by `run_many`."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental.multihost_utils import (
    assert_equal,
    broadcast_one_to_all,
    global_array_to_host_local_array,
    host_local_array_to_global_array,
    process_allgather,
    sync_global_devices,
)

from tests.core.processes import expect, join_the_others
from xlashard import (
    Array,
    Mesh,
    NamedSharding,
    P,
    device_put,
    make_array_from_callback,
)

join_the_others()

ME = jax.process_index()
MESH = Mesh(np.array(jax.devices()).reshape(2, 2), ("process", "device"))
V = np.arange(32, dtype=np.float32).reshape(8, 4)
EVERY = P(("process", "device"))


def spread(*spec: Any) -> Array:
    return make_array_from_callback(V.shape, NamedSharding(MESH, P(*spec)), lambda index: V[index])


rows, whole, own = spread(*EVERY), spread(), device_put(V + ME)
both = np.stack([V, V + 1])

gathered = process_allgather({"rows": rows, "whole": whole}, tiled=True)
assert np.array_equal(gathered["rows"], V) and np.array_equal(gathered["whole"], V)
assert np.array_equal(process_allgather(own), both)
assert np.array_equal(process_allgather(own, tiled=True), both.reshape(16, 4))
for x in (rows, whole):
    expect(ValueError, "tiled=True", lambda x=x: process_allgather(x))
assert np.array_equal(broadcast_one_to_all({"own": own})["own"], V)
multihost_utils.assert_equal({"whole": whole, "number": 3})
expect(AssertionError, "they differ", lambda: assert_equal(own, "they differ"))
sync_global_devices("half way")

together = host_local_array_to_global_array(own, MESH, EVERY)
assert np.array_equal(process_allgather(together, tiled=True), both.reshape(16, 4))
assert host_local_array_to_global_array(rows, MESH, EVERY).shape == V.shape
mine = global_array_to_host_local_array(rows, MESH, EVERY)
assert np.array_equal(mine, V[4 * ME : 4 * ME + 4])
assert np.array_equal(Array.from_jax(mine) * 2, 2 * V[4 * ME : 4 * ME + 4])
print("both agree")
