"""One of two processes with two devices each, started by `run_many`.

The constructors of pmap programs work on a process's own devices, pmap over all devices.
"""

import jax
import numpy as np

from tests.core.processes import expect, join_the_others
from xlashard import (
    Chunked,
    NoSharding,
    PmapSharding,
    ShardedAxis,
    ShardingSpec,
    device_put_replicated,
    device_put_sharded,
    make_array_from_callback,
    make_sharded_device_array,
    pjit,
    unstacked_shards,
)
from xlashard.errors import PlacementError

join_the_others()

ME = jax.process_index()
HERE, DEVICES = jax.local_devices(), jax.devices()
V = np.arange(12, dtype=np.float32).reshape(4, 3)
MINE = V[2 * ME : 2 * ME + 2]


def on_its_own_devices() -> None:
    x = device_put_sharded(list(MINE), HERE)
    assert x.is_fully_addressable and x.shape == (2, 3)
    assert np.array_equal(x, MINE) and np.array_equal(x[1], MINE[1])
    assert PmapSharding.default((2, 3)).devices == tuple(HERE)
    y = device_put_replicated(V[0], HERE)
    assert np.array_equal(y, V[[0, 0]])
    for make in (lambda d: device_put_sharded(list(V), d), lambda d: device_put_replicated(1, d)):
        expect(
            PlacementError,
            rf"this process's devices only, but .* process {1 - ME}: give jax.local_devices\(\)",
            lambda make=make: make(DEVICES),
        )


def pmap_across_processes() -> None:
    x = device_put_sharded(list(MINE), HERE)
    out = jax.pmap(lambda row: jax.lax.psum(row, "i"), axis_name="i")(x)
    assert np.array_equal(out.addressable_shards[0].data[0], V.sum(axis=0))
    assert out.shape == (2, 3)


def spread_over_processes() -> None:
    spec = ShardingSpec((Chunked((4,)), NoSharding()), (ShardedAxis(0),))
    everywhere = PmapSharding(DEVICES, spec)
    assert len(everywhere.addressable_devices_indices_map(V.shape)) == 2
    x = make_array_from_callback(V.shape, everywhere, lambda index: V[index])
    assert x.sharding == everywhere and not x.is_fully_addressable
    assert [shard.index[0] for shard in unstacked_shards(x, spec)] == [
        slice(2 * ME + n, 2 * ME + n + 1) for n in range(2)
    ]
    # Both processes must run the same programs, even where a shard would be the result in one.
    assert x[1].devices() == set(DEVICES)
    assert float(pjit(lambda v: v.sum())(x)) == V.sum()
    buffers = [shard.data for shard in x.addressable_shards]
    local = make_sharded_device_array(jax.ShapeDtypeStruct((2, 3), V.dtype), None, buffers)
    assert np.array_equal(local, MINE)


for step in (on_its_own_devices, pmap_across_processes, spread_over_processes):
    step()
print("both agree")
