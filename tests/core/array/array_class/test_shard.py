"""Shards of an array: the kept list ends with the array, and keeps nothing alive."""

import contextlib
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest

from tests.core.array.cases import DEVICES, named
from xlashard import device_put, pjit
from xlashard.errors import DeletedError

V = np.arange(32, dtype=np.float32).reshape(8, 4)
ROWS, COLUMNS = named(("x", "y")), named(None, "y")


@pytest.mark.devices(8)
def test_shards_are_kept_until_the_array_ends():
    x = device_put(V, ROWS)
    kept = x.addressable_shards
    assert x.addressable_shards is kept
    assert [shard.data.tolist() for shard in kept] == [V[shard.index].tolist() for shard in kept]
    assert x.addressable_data(0) is kept[0].data
    assert x.addressable_data(-1).tolist() == kept[-1].data.tolist()
    with pytest.raises(IndexError):
        x.addressable_data(len(kept))
    part = weakref.ref(kept[0].data)
    del kept
    x.delete()
    assert part() is None
    with pytest.raises(DeletedError, match="delete"):
        x.addressable_shards  # noqa: B018
    x.delete()


def test_kept_shards_keep_no_array_alive():
    gc.collect()
    gc.disable()
    try:
        for where in (ROWS, jax.devices()[0]):
            x = device_put(V, where)
            ends = [weakref.ref(y) for y in (x, x.addressable_shards[0].data)]
            del x
            assert [end() for end in ends] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["program", "device_put", "shard", "shard of a program", "jax"])
def test_kept_shards_do_not_outlive_the_buffers(end: str):
    double = pjit(lambda x: x * 2, donate_argnums=0)
    double(device_put(V, ROWS))  # the next call has no part in Python
    double(device_put(V[:1], jax.devices()[0]))
    x = device_put(V, ROWS)
    part = x.addressable_shards[0].data
    if end == "program":
        double(x)
    elif end == "device_put":
        device_put(x, COLUMNS, donate=True)
    elif end == "shard":
        part.delete()
    elif end == "shard of a program":
        double(part)
    else:
        x.to_jax().delete()
    assert x.is_deleted()
    with pytest.raises(DeletedError):
        x.addressable_shards  # noqa: B018
    assert part.is_deleted()
    with pytest.raises(DeletedError):
        np.asarray(part)


@pytest.mark.slow
def test_shards_read_in_threads_end_with_the_array():
    for how in ("delete", "donate", "shard") * 3:
        x = device_put(V, ROWS)
        barrier = threading.Barrier(8)

        def read(x: Any = x, barrier: Any = barrier) -> int:
            barrier.wait()
            count = 0
            with contextlib.suppress(DeletedError):
                while True:
                    count += len(x.addressable_shards) == len(DEVICES)
            return count

        def end(x: Any = x, barrier: Any = barrier, how: str = how) -> int:
            barrier.wait()
            if how == "delete":
                x.delete()
            elif how == "donate":
                device_put(x, COLUMNS, donate=True)
            else:
                x.addressable_shards[-1].data.delete()
            return 0

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(f) for f in (*[read] * 7, end)]:
                done.result()
        with pytest.raises(DeletedError):
            x.addressable_shards  # noqa: B018
        assert type(x._shards_or_cause) is not list
