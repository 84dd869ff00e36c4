"""One of two processes with two devices each: arrays of which it addresses a part, or nothing."""

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import AxisType

from tests.core.processes import expect, join_the_others

join_the_others()

import xlashard  # noqa: E402
from tests.core.array.across_processes import (  # noqa: E402
    DEVICES,
    FIRST,
    ME,
    MESH,
    ROWS,
    SECOND,
    WHOLE,
    V,
)
from xlashard import (  # noqa: E402
    Array,
    Mesh,
    NamedSharding,
    P,
    Sharding,
    SingleDeviceSharding,
    device_get,
    device_put,
    from_dlpack,
    live_arrays,
    make_array_from_callback,
    make_array_from_process_local_data,
    make_array_from_single_device_arrays,
    reshard_plan,
    with_sharding_constraint,
)
from xlashard.core.array.reshard import execute  # noqa: E402
from xlashard.errors import (  # noqa: E402
    ArgumentError,
    DeletedError,
    DLPackError,
    NotAddressableError,
    PlacementError,
)

NARROW = ("int2", "float6_e2m3fn", *(["int1"] if hasattr(ml_dtypes, "int1") else []))
"""Dtypes that XLA can't send between CPU devices."""


def make(sharding: Sharding, v: np.ndarray = V) -> Array:
    return make_array_from_callback(v.shape, sharding, lambda index: v[index], dtype=v.dtype)


def check(x: Any, v: np.ndarray) -> None:
    for shard in x.addressable_shards:
        assert shard.device.process_index == ME
        got = np.asarray(shard.data)
        assert got.dtype == v.dtype and got.tobytes() == v[shard.index].tobytes()


READS: list[Callable[[Any], Any]] = [
    np.asarray,
    memoryview,
    device_get,
    pickle.dumps,
    np.sin,
    lambda x: x.tolist(),
    lambda x: x.tobytes(),
    lambda x: x.item(),
    lambda x: x.to_host(),
]


def a_part() -> None:
    x = make(ROWS)
    for read in READS:
        expect(NotAddressableError, "2 of its 4.*to_host.*allgather", lambda read=read: read(x))
    for other in (copy.copy(x), copy.deepcopy(x), x.clone(), x.copy()):
        assert other.sharding == x.sharding
        check(other, V)
    check(device_put(x, may_alias=False), V)
    check(device_put(x, ROWS, may_alias=False), V)
    expect(DLPackError, r"addressable_shards\[i\]", lambda: from_dlpack(x))
    with_shape = "shape=(8, 4), dtype=float32, sharding=P(('process', 'device')) on 4 devices"
    assert with_shape in repr(x) and "2 of 4 pieces here" in f"{x}" == str(x)
    assert np.array_equal(x.addressable_data(-1), V[4 * ME + 2 : 4 * ME + 4])
    expect(IndexError, "from 0 to 1", lambda: x.addressable_data(2))
    assert any(y.sharding == x.sharding and y.shape == x.shape for y in live_arrays())
    assert x.on_device_size_in_bytes() == V.nbytes
    if ME == 0:
        x.delete()
        expect(DeletedError, "delete", lambda: x.addressable_shards)
    else:
        check(x.block_until_ready(), V)


def operators() -> None:
    x, whole = make(ROWS), make(WHOLE)
    for got, right in (
        (x + whole, V + V),
        (2 - x, 2 - V),
        (x @ whole.T, V @ V.T),
        (x.at[3].set(7), np.concatenate([V[:3], np.full((1, 4), 7, np.float32), V[4:]])),
        (x.T.reshape(16, 2), V.T.reshape(16, 2)),
        (xlashard.numpy.where(x > 3, x, 0), np.where(V > 3, V, 0)),
        (jnp.cumsum(x, 0), np.cumsum(V, 0)),
        (xlashard.numpy.linalg.norm(x, axis=1), np.linalg.norm(V, axis=1)),
        (x[::-1, 1], V[::-1, 1]),
    ):
        check(got if isinstance(got, Array) else Array.from_jax(got), np.asarray(right))
    for target in (FIRST, WHOLE, NamedSharding(MESH, P(None, "device"))):
        moved = with_sharding_constraint(x, target)
        assert moved.sharding == target
        check(moved, V)
    constrained = with_sharding_constraint(jnp.asarray(V), ROWS)
    assert constrained.sharding == ROWS
    check(constrained, V)
    total = x.sum()
    assert float(total) == int(total) == V.sum() and bool(total) and f"{total:.1f}" == "496.0"
    assert [float(row[0]) for row in x] == V[:, 0].tolist()
    assert np.array_equal(pickle.loads(pickle.dumps(whole)), V)
    assert repr(make(WHOLE, V[0])) == "Array([0., 1., 2., 3.], dtype=float32)"


def nothing() -> None:
    x = make(SECOND if ME == 0 else FIRST)
    y = make(FIRST if ME == 0 else SECOND)
    assert np.array_equal(y, V) and y.is_fully_addressable
    for read in READS:
        expect(NotAddressableError, "no device of an Array.*device_put", lambda read=read: read(x))
    assert x.addressable_shards == [] and [s.data for s in x.global_shards] == [None, None]
    assert "P('d') on 2 devices (d=2), 0 of 2 pieces here" in repr(x)
    assert not x.is_fully_addressable and x.is_ready() and x.block_until_ready() is x
    expect(IndexError, "0 of.*device_put", lambda: x.addressable_data(0))
    expect(NotAddressableError, "x.nbytes", x.on_device_size_in_bytes)
    x.copy_to_host_async()
    for again in (x + 1, x.T, x.sum(), x[0], x.clone(), copy.deepcopy(x), next(iter(x))):
        assert again.devices() == x.devices() and not again.addressable_shards
    assert device_put(x, x.sharding) is x
    check(device_put(x, may_alias=False), V)
    x.delete()
    assert x.is_deleted() and "deleted" in repr(x)


def making() -> None:
    def never(index: Any) -> Any:
        raise AssertionError(index)

    elsewhere = SECOND if ME == 0 else FIRST
    x = make_array_from_callback(V.shape, elsewhere, never, dtype="float32")
    assert x.dtype == np.float32 and not x.addressable_shards
    expect(ArgumentError, "dtype=", lambda: make_array_from_callback(V.shape, elsewhere, never))
    empty = make_array_from_single_device_arrays(V.shape, elsewhere, [], dtype="float32")
    assert empty.shape == V.shape and not empty.addressable_shards
    expect(
        ArgumentError,
        "dtype=",
        lambda: make_array_from_single_device_arrays(V.shape, elsewhere, []),
    )
    own, other = (device_put(V[:2], d) for d in jax.local_devices())
    expect(
        PlacementError,
        rf"none is on {jax.local_devices()[1]}",
        lambda: make_array_from_single_device_arrays(V.shape, ROWS, [own]),
    )
    far = device_put(np.zeros((2, 4), np.float32), SingleDeviceSharding(DEVICES[2 - 2 * ME]))
    expect(
        PlacementError,
        rf"{DEVICES[2 - 2 * ME]} \(arrays\[2\]\)",
        lambda: make_array_from_single_device_arrays(V.shape, ROWS, [own, other, far]),
    )
    whole, parts = make(WHOLE), make(ROWS)
    check(make_array_from_callback(V.shape, ROWS, lambda index: whole[index]), V)
    check(make_array_from_callback(V.shape, WHOLE, lambda index: whole), V)
    expect(
        NotAddressableError,
        "2 of its 4 pieces",
        lambda: make_array_from_callback(V.shape, WHOLE, lambda index: parts),
    )
    batch = make_array_from_process_local_data(ROWS, {"a": V[:4] + ME, "b": V[:4, 0]})
    check(batch["a"], np.concatenate([V[:4], V[:4] + 1]))
    assert batch["b"].shape == (8,)


def moving_everything() -> None:
    """Reshard dtypes that XLA can't send between processes, other memories, and keys."""
    for name in (*NARROW, "uint2", "int4", "float8_e4m3fn", "bool", "complex64"):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        v = (np.arange(32) % 2).astype(dtype).reshape(8, 4)
        for source, target in ((FIRST, SECOND), (ROWS, SECOND)):
            check(device_put(make(source, v), target), v)
        check(device_put(make(ROWS, v), NamedSharding(MESH, P(None, "device"))), v)
    host = ROWS.with_memory_kind("pinned_host")
    for source, target in ((FIRST, host), (host, SECOND), (host, ROWS), (ROWS, host)):
        y = device_put(make(source), target)
        assert y.sharding == target
        check(y, V)
    keys = jax.random.split(jax.random.key(3), 4)
    spread = make_array_from_callback((4,), ROWS, lambda index: keys[index], dtype=keys.dtype)
    there: Any = device_put(spread, SECOND)
    for shard in there.addressable_shards:
        assert np.array_equal(
            jax.random.key_data(shard.data), jax.random.key_data(keys)[shard.index]
        )
    scalar = make(SingleDeviceSharding(DEVICES[3]), np.array(2.5, np.float32))
    assert float(device_put(scalar, WHOLE)) == 2.5
    assert device_put(make(FIRST, V[:0]), SECOND).shape == (0, 4)


def plans() -> None:
    """Reports of reshards are the same in both processes."""
    x = jax.ShapeDtypeStruct((8, 8), np.float32)
    columns = NamedSharding(MESH, P(None, ("process", "device")))
    one = SingleDeviceSharding(DEVICES[0])
    for source, target, route, moved in (
        (FIRST, SECOND, ["permute"], 256),
        (FIRST, ROWS, ["permute"], 192),
        (one, ROWS, ["permute"], 192),
        (one, WHOLE, ["permute", "compiled"], 768),
        (ROWS, columns, ["compiled"], 192),
        (columns, one, ["permute"], 192),
    ):
        report = reshard_plan(x, target, source=source)
        assert [str(way) for way in report.route] == route, (source, target, report.route)
        assert report.bytes_moved == moved
        assert "MiB" not in str(report)


def routes_of_narrow_elements() -> None:
    """The report names the copies of elements as bytes that are made."""
    columns = NamedSharding(MESH, P(None, ("process", "device")))
    routes = ((ROWS, SECOND, ["permute"]), (ROWS, columns, ["compiled"]))
    for name in (*NARROW, "int4"):
        v = np.zeros((8, 4), getattr(ml_dtypes, name))
        for source, target, route in routes:
            x = make(source, v)
            report = reshard_plan(x, target)
            peak = reshard_plan(np.zeros((8, 4), np.int8), target, source=source).peak_bytes
            if name in NARROW:
                route = ["to bytes", *route, "from bytes"]
                peak += max(report.source_shard_bytes, report.target_shard_bytes)
            assert list(map(str, report.route)) == route, (name, report.route)
            assert report.peak_bytes == peak
            with (
                patch.object(execute, "_run", wraps=execute._run) as run,
                patch.object(execute, "_with_dtype", wraps=execute._with_dtype) as converted,
            ):
                check(device_put(x, target), v)
            assert [str(call.args[0]) for call in run.call_args_list] == [
                step for step in route if step not in ("to bytes", "from bytes")
            ]
            assert converted.call_count == (2 if name in NARROW else 0)
            assert not x.is_deleted()
        assert reshard_plan(make(ROWS, v), ROWS).route == ("keep",)
    here = list(MESH.devices[0])
    one_process = [NamedSharding(Mesh(here, ("device",)), P(*axes)) for axes in (("device",), ())]
    for source, target in (one_process, one_process[::-1]):
        route = reshard_plan(np.zeros((8, 4), ml_dtypes.int2), target, source=source).route
        assert "to bytes" not in route, route


def empty_narrow_elements() -> None:
    """Partial results without elements, in less than a byte, are reduced without a program."""
    explicit = (AxisType.Explicit,) * 2
    mesh = Mesh(MESH.devices, ("process", "device"), axis_types=explicit)
    v = np.zeros((0, 12), ml_dtypes.int2)
    whole = make(NamedSharding(mesh, P()), v)
    partial = device_put(whole, NamedSharding(mesh, P(unreduced={"process"})))
    for spec in (P(), P("process"), P(None, "device")):
        assert device_put(partial, NamedSharding(mesh, spec)).shape == v.shape
    assert not partial.is_deleted()


for step in (
    a_part,
    operators,
    nothing,
    making,
    moving_everything,
    plans,
    routes_of_narrow_elements,
    empty_narrow_elements,
):
    step()
    sync_global_devices(step.__name__)
print("all agree")
