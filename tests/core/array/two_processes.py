"""One of two processes with two devices each, started by `run_many`.

It stops with an error where a result is wrong. Both must run the same steps, because programs
over both processes wait for each other.
"""

from typing import Any

import jax
import numpy as np

from tests.core.processes import expect, join_the_others
from xlashard import (
    Array,
    GSPMDSharding,
    Mesh,
    NamedSharding,
    P,
    device_put,
    make_array_from_callback,
    make_array_from_process_local_data,
    make_array_from_single_device_arrays,
    reshard_plan,
    visualize,
)
from xlashard.core.array.reshard import compiled
from xlashard.errors import NotAddressableError, PlacementError

join_the_others()

ME = jax.process_index()
DEVICES = jax.devices()
MESH = Mesh(np.array(DEVICES).reshape(2, 2), ("process", "device"))
V = np.arange(32, dtype=np.float32).reshape(8, 4)


def named(*spec: Any) -> NamedSharding:
    return NamedSharding(MESH, P(*spec))


def rows(sharding: Any = None) -> Array:
    sharding = sharding or named(("process", "device"))
    return make_array_from_callback(V.shape, sharding, lambda index: V[index])


def check_shards(x: Array) -> None:
    indices = x.sharding.devices_indices_map(x.shape)
    assert len(x.addressable_shards) == 2
    for shard in x.addressable_shards:
        assert shard.device.process_index == ME
        assert np.array_equal(shard.data, V[indices[shard.device]])
    assert [shard.data is None for shard in x.global_shards] == [
        device.process_index != ME for device in x.sharding.devices
    ]


def reading() -> None:
    x = rows()
    assert not x.is_fully_addressable and not x.is_fully_replicated
    check_shards(x)
    for read in (np.asarray, lambda x: x.tolist(), lambda x: memoryview(x)):
        expect(
            NotAddressableError,
            r"2 of its 4 pieces.*addressable_shards.*process_allgather",
            lambda read=read: read(x),
        )
    assert (
        repr(x)
        == str(x)
        == (
            "Array(shape=(8, 4), dtype=float32, sharding=P(('process', 'device')) on 4 devices "
            "(process=2, device=2), 2 of 4 pieces here)"
        )
    )
    assert np.array_equal(rows(named()), V)
    # Each process has all columns of both halves.
    assert np.array_equal(rows(named(None, "device")), V)
    x.copy_to_host_async()
    assert float(x.sum()) == V.sum()
    assert len(list(x)) == 8
    assert x[0:2].devices() == x.devices()


def constructing() -> None:
    asked: list[Any] = []
    make_array_from_callback(
        V.shape, named("device"), lambda index: (asked.append(index), V[index])[1]
    )
    assert len(asked) == 2
    mine = V[4 * ME : 4 * ME + 4]
    for shape in (None, V.shape):
        check_shards(make_array_from_process_local_data(named("process"), mine, shape))
        check_shards(make_array_from_process_local_data(named(("process", "device")), mine, shape))
    check_shards(make_array_from_process_local_data(named("process"), V, V.shape))
    # Columns: the second and fourth pair of rows go to the other process.
    crossed = GSPMDSharding(DEVICES, "{devices=[4,1]0,2,1,3}")
    order = [0, 1, 4, 5] if ME == 0 else [2, 3, 6, 7]
    check_shards(make_array_from_process_local_data(crossed, V[order]))
    expect(
        PlacementError,
        r"local_data: dimension 0.*has 3.*accepted: 8 .* or 4 ",
        lambda: make_array_from_process_local_data(named("process"), V[:3], V.shape),
    )
    expect(
        PlacementError,
        r"holds 2 tiles of it.*multiples of 2.*example 4",
        lambda: make_array_from_process_local_data(named(("process", "device")), V[:3]),
    )
    pieces = [
        device_put(V[4 * ME + 2 * i : 4 * ME + 2 * i + 2], d)
        for i, d in enumerate(jax.local_devices())
    ]
    check_shards(make_array_from_single_device_arrays(V.shape, rows().sharding, pieces))
    expect(
        PlacementError,
        r"1 arrays for 2 addressable devices",
        lambda: make_array_from_single_device_arrays(V.shape, rows().sharding, pieces[:1]),
    )
    uneven = NamedSharding(Mesh(np.array([DEVICES[0], *DEVICES[2:]]), ("a",)), P("a"))
    if ME == 0:
        expect(
            PlacementError,
            r"holds \(1, 1\) distinct tiles.*others hold \(2, 1\).*global_shape=",
            lambda: make_array_from_process_local_data(uneven, V[:2]),
        )


def moving_slab_by_slab() -> None:
    """Reshard arrays whose programs would need more memory than a shard, in chunks."""
    whole, compiled._NEGLIGIBLE_BYTES = compiled._NEGLIGIBLE_BYTES, 0
    wide = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    x = make_array_from_callback(
        wide.shape, named(("process", "device")), lambda index: wide[index]
    )
    columns = named(None, ("device", "process"))
    y = device_put(x, columns)
    compiled._NEGLIGIBLE_BYTES = whole
    indices = columns.devices_indices_map(wide.shape)
    for shard in y.addressable_shards:
        assert np.array_equal(shard.data, wide[indices[shard.device]])
    report = reshard_plan(x, columns)
    assert report.route == ("compiled",)
    assert report.bytes_moved == wide.nbytes * 3 // 4


def moving() -> None:
    x = rows()
    for spec in ((None, "device"), ("device", "process"), (), ("process",)):
        y = device_put(x, named(*spec))
        assert y.sharding == named(*spec)
        check_shards(y)
    check_shards(device_put(x, GSPMDSharding(DEVICES, "{devices=[4,1]3,1,2,0}")))
    check_shards(device_put(x, NamedSharding(Mesh(MESH.devices.T, ("a", "b")), P(("a", "b")))))
    check_shards(device_put(V, named("device", "process")))
    moved = device_put(x, named("process"), donate=True)
    assert x.is_deleted()
    check_shards(moved)
    local = device_put(V, NamedSharding(Mesh(jax.local_devices(), ("a",)), P("a")))
    assert local.is_fully_addressable and np.array_equal(local, V)


def drawing() -> None:
    x = rows()
    text, html = str(visualize(x)), x._repr_html_()
    assert "4 CPU devices of 2 hosts" in text
    for device in DEVICES:
        assert f"CPU {device.id}" in text
        assert f"CPU {device.id} on host {device.process_index}" in html
    assert "┣━" in text and "┠─" in text
    copied = rows(named(None, "device"))
    assert str(visualize(copied)).count("hosts 0, 1") == 2
    x.delete()
    assert str(visualize(x)) == text and x._repr_html_() is None


for step in (reading, constructing, moving, moving_slab_by_slab, drawing):
    step()
print("both agree")
