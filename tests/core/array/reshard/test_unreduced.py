"""Unreduced arrays: every read raises or reduces, and `device_put` sums."""

import copy
import io
import itertools
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, UnreducedKind

from tests.grouped_cases import Together
from tests.message_patterns import naming
from xlashard import (
    Array,
    GSPMDSharding,
    Mesh,
    NamedSharding,
    P,
    Sharding,
    SingleDeviceSharding,
    device_get,
    device_put,
    make_array_from_callback,
    make_array_from_process_local_data,
    make_array_from_single_device_arrays,
    reshard_plan,
    visualize,
    with_sharding_constraint,
)
from xlashard.errors import PlacementError, ShardingError, TilingError, UnreducedError
from xlashard.multihost import assert_equal, broadcast_one_to_all, process_allgather

DEVICES = np.array(jax.devices()[:8], dtype=object)
MESH = Mesh(DEVICES.reshape(2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Explicit,) * 3)
needs_shardy = pytest.mark.skipif(
    not jax.config.jax_use_shardy_partitioner, reason="JAX's own rules fail under GSPMD"
)
V = np.arange(32, dtype=np.float32).reshape(8, 4) - 9


def on(*entries: Any, mesh: Mesh = MESH, **reductions: Any) -> NamedSharding:
    return NamedSharding(mesh, P(*entries, **reductions))


U = on("y", unreduced={"x"})


def partial(*addends: float, sharding: NamedSharding = U, shape: tuple[int, ...] = (2,)) -> Array:
    """Return an array whose devices hold these partial results, in the order of the addends."""
    tiling = sharding.rank_tiling(len(shape))
    ids = tiling.addend_ids().tolist()
    piece = np.ones(tiling.shard_shape(shape), np.float32)
    pieces = [device_put(piece * addends[i], d) for i, d in zip(ids, sharding.devices, strict=True)]
    return make_array_from_single_device_arrays(shape, sharding, pieces)


@pytest.mark.slow
def test_device_put_reduces_partial_sums() -> None:
    x = partial(3, 4)
    targets: dict[str, Any] = {
        "the same cuts": on("y"),
        "replicated": on(),
        "other cuts": on("x"),
        "one of its devices": DEVICES[5],
        "an automatic mesh": NamedSharding(Mesh(DEVICES, ("d",)), P()),
        "the devices in another order": on("x", mesh=Mesh(DEVICES[::-1].reshape(2, 4), ("x", "y"))),
        "half of the devices": NamedSharding(Mesh(DEVICES[:4].reshape(4), ("d",)), P()),
        "bare tiles": GSPMDSharding(
            DEVICES.tolist(), "{devices=[2,4]<=[8] last_tile_dim_replicate}"
        ),
        "pinned memory": on().with_memory_kind("pinned_host"),
        "a layout": Format(Layout((0,)), on()),
    }
    with Together() as together:
        for name, target in targets.items():
            with together.case(name):
                out = device_put(x, target)
                assert np.asarray(out).tolist() == [7, 7]
                assert not x.is_deleted()
        for name, target in {
            "other partial sums": on(unreduced={"y", "z"}),
            "more partial sums": on("y", unreduced={"x", "z"}),
            "another mesh": on(
                unreduced={"a"},
                mesh=Mesh(DEVICES.reshape(4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2),
            ),
            "the same": U,
        }.items():
            with together.case(name):
                out = device_put(x, target)
                assert out.sharding == target
                assert np.asarray(device_put(out, on())).tolist() == [7, 7]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "int8", "bool", "complex64", "bfloat16", "int4"])
def test_device_put_to_unreduced_and_back_keeps_the_value(kind: str) -> None:
    value = np.asarray(jnp.asarray(np.abs(V) % 5, kind))
    for source in (value, device_put(value, on()), jax.device_put(value, DEVICES[3])):
        x = device_put(source, U)
        assert x.sharding is U
        assert jax.typeof(x).sharding.spec.unreduced == {"x"}
        pieces = [np.asarray(shard.data) for shard in x.addressable_shards]
        assert [bool(piece.any()) for piece in pieces] == [True] * 4 + [False] * 4
        back = device_put(x, on())
        assert back.dtype == value.dtype
        assert np.array_equal(np.asarray(back), value)


def test_device_put_honours_may_alias_and_donate() -> None:
    x = device_put(V, on())
    kept = device_put(x, U)
    assert np.array_equal(np.asarray(x), V)
    assert np.array_equal(np.asarray(device_put(kept, on())), V)
    copied = device_put(kept, U, may_alias=False)
    device_put(kept, on(), donate=True)
    assert kept.is_deleted()
    assert np.array_equal(np.asarray(device_put(copied, on())), V)
    used_up = device_put(x, U, donate=True)
    assert x.is_deleted()
    assert np.array_equal(np.asarray(device_put(used_up, on())), V)
    empty = device_put(device_put(np.zeros((0, 4), np.float32), U), on())
    assert empty.shape == (0, 4)


@pytest.mark.parametrize(("kind", "result"), [("max", 4.0), ("min", 3.0)])
def test_maxima_and_minima(kind: str, result: float) -> None:
    there = on("y", unreduced={"x"}, unreduced_kind=UnreducedKind[kind])
    x = partial(3, 4, sharding=there)
    assert np.asarray(device_put(x, on())).tolist() == [result] * 2
    put = device_put(-V, there)
    assert np.array_equal(np.asarray(device_put(put, on())), -V)
    assert there != U
    assert not there.is_equivalent_to(U, 1)


READS: dict[str, Callable[[Array], Any]] = {
    "asarray": np.asarray,
    "array": lambda x: np.array([x, x]),
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "tobytes": lambda x: x.tobytes(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "complex": lambda x: complex(x.sum()),
    "bool": lambda x: bool(x.sum()),
    "index": lambda x: operator.index(x.sum().astype(int)),
    "math": lambda x: math.sqrt(x.sum()),
    "iteration": list,
    "reversed": lambda x: list(reversed(x)),
    "an element": lambda x: x[0],
    "a slice": lambda x: x[:1],
    "all of it": lambda x: x[...],
    "bytes": bytes,
    "memoryview": memoryview,
    "device_get": lambda x: device_get({"a": x}),
    "jax.device_get": lambda x: jax.device_get([x]),
    "to_host": lambda x: x.to_host(),
    "to_host local": lambda x: x.to_host("local"),
    "to_host gather": lambda x: x.to_host("gather"),
    "an early read": lambda x: x.copy_to_host_async(),
    "pickle": pickle.dumps,
    "process_allgather": lambda x: process_allgather(x, tiled=True),
    "broadcast_one_to_all": broadcast_one_to_all,
    "assert_equal": assert_equal,
    "np.add": lambda x: np.add(x, 1),
    "np.copyto": lambda x: np.copyto(np.zeros(2), x),
    "assignment": lambda x: np.zeros(2).__setitem__(slice(None), x),
    "np.concatenate": lambda x: np.concatenate([x, x]),
    "np.save": lambda x: np.save(io.BytesIO(), x),
    "np.testing": lambda x: np.testing.assert_allclose(x, x),
}


@pytest.mark.slow
def test_reading_an_unreduced_array_is_an_error() -> None:
    with Together() as together:
        for name, read in READS.items():
            with (
                together.case(name),
                pytest.raises(UnreducedError, match="2 partial results|GSPMD"),
            ):
                read(partial(3, 4))
    with pytest.raises(BufferError, match=r"x\.addressable_shards\[i\]\.data"):
        np.from_dlpack(partial(3, 4))


def test_texts_show_no_partial_sum() -> None:
    x = partial(3, 4)
    text = (
        "Array(shape=(2,), dtype=float32, sharding=P('y', unreduced={'x'}) on 8 devices "
        "(x=2, y=2, z=2))"
    )
    assert {repr(x), str(x), f"{x}", "%s" % x} == {text}  # noqa: UP031
    scalar = partial(3, 4, sharding=on(unreduced={"x"}), shape=())
    assert f"{scalar:.2f}".startswith("Array(shape=(), dtype=float32, sharding=P(unreduced={'x'})")
    picture = str(visualize(x))
    assert "each device holds one of 2 partial results of a sum, along x=2" in picture
    assert "each partial result on 2 devices, along z=2" in picture
    assert "CPU 0, 1, 4, 5" in picture
    assert x._repr_html_() is not None


def test_shards_of_unreduced_arrays_are_partial_results() -> None:
    x = partial(3, 4)
    assert [float(shard.data[0]) for shard in x.addressable_shards] == [3.0] * 4 + [4.0] * 4
    assert float(x.addressable_data(0)[0]) == 3
    shard = x.addressable_shards[0]
    assert "unreduced, data=Array([3.]" in repr(shard)
    for read in (
        lambda: shard.index,
        lambda: shard.replica_id,
        lambda: U.devices_indices_map((8,)),
        lambda: U.addressable_devices_indices_map((8,)),
    ):
        with pytest.raises(
            TilingError, match=naming("2 partial results", "device_put(x, sharding)")
        ):
            read()
    assert U.shard_shape((8, 4)) == (4, 4)
    assert not x.is_fully_replicated
    assert not on(unreduced={"x"}).is_fully_replicated


ENTRIES = (None, "x", "y", ("x", "y"), ("y", "x"))


def list_axes(*entries: Any) -> set[str]:
    return {axis for entry in entries for axis in entry or ()}


SQUARE = Mesh(DEVICES[:4].reshape(2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
CUTS = [
    pair
    for pair in itertools.product(ENTRIES, repeat=2)
    if not list_axes(pair[0]) & list_axes(pair[1])
]
PARTIAL = [
    P(*pair, unreduced=axes)
    for pair in CUTS
    for axes in ({"x"}, {"y"}, {"x", "y"})
    if not list_axes(*pair) & axes
]


@pytest.mark.slow
@needs_shardy
@pytest.mark.parametrize("source", CUTS, ids=str)
def test_partial_results_are_those_of_jax(source: tuple[Any, ...], way: str) -> None:
    x = device_put(V[:4], on(*source, mesh=SQUARE))
    with jax.set_mesh(SQUARE), Together() as together:
        for target in PARTIAL:
            with together.case(str(target)):
                sharding = NamedSharding(SQUARE, target)
                out, wanted = device_put(x, sharding), jax.device_put(x.to_jax(), sharding)
                assert out.sharding == sharding
                shards = (array.addressable_shards for array in (out, wanted))
                for own, other in zip(*shards, strict=True):
                    assert np.array_equal(own.data, other.data)
                assert np.array_equal(device_put(out, on(mesh=SQUARE)), V[:4])


def test_tiles_over_unreduced_axes_stay_on_their_devices() -> None:
    x = device_put(V, on("y", ("z", "x")))
    report = reshard_plan(x, on("y", "z", unreduced={"x"}))
    assert (report.bytes_moved, report.route) == (0, ("split",))
    largest = on("y", unreduced={"x"})
    assert np.array_equal(np.asarray(device_put(device_put(x, largest), on())), V)


def test_arrays_move_between_devices_under_a_mesh(way: str) -> None:
    x = device_put(V, NamedSharding(Mesh(DEVICES[:2], ("d",)), P("d")))
    with jax.set_mesh(MESH):
        moved = device_put(x, NamedSharding(Mesh(DEVICES[2:6], ("d",)), P(None, "d")))
    assert np.array_equal(np.asarray(moved), V)


@needs_shardy
def test_operations_keep_partial_sums() -> None:
    x = partial(3, 4)
    with Together() as together:
        for name, made, expected in [
            ("+", x + x, 14),
            ("sum", x.sum(), 14),
            ("copy", x.copy(), 7),
            ("deepcopy", copy.deepcopy(x), 7),
            ("reshard", jax.sharding.reshard(x, on()), 7),
            ("constraint", with_sharding_constraint(x, on()), 7),
        ]:
            with together.case(name):
                assert np.all(np.asarray(device_put(made, on())) == expected)
    with pytest.raises(Exception, match="lhs is unreduced while rhs is not"):
        x + 1


@pytest.mark.slow
def test_shardings_with_reductions() -> None:
    assert pickle.loads(pickle.dumps(U)) == U
    assert hash(on("y", unreduced={"x"})) == hash(U)
    assert on("y") != U
    assert not U.is_equivalent_to(on("y"), 1)
    assert U.is_equivalent_to(jax.sharding.NamedSharding(MESH, P("y", None, unreduced={"x"})), 2)
    reduced = on("y", reduced={"x"})
    assert reduced != on("y")
    assert reduced.is_equivalent_to(on("y"), 1)
    assert U.reduced_sharding == on("y")
    assert reduced.reduced_sharding is reduced
    flat = Mesh(DEVICES[:2].reshape(1, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    alone = on("y", unreduced={"x"}, mesh=flat)
    assert not alone.is_unreduced
    assert np.array_equal(np.asarray(device_put(V, alone)), V)
    x = device_put(V, reduced)
    assert x.sharding is reduced
    assert jax.typeof(x).sharding.spec.reduced == {"x"}
    assert np.array_equal(np.asarray(x), V)
    assert [float(row[0]) for row in x] == V[:, 0].tolist()


def test_unreduced_shardings_are_refused_where_unsupported() -> None:
    for make in (make_array_from_callback, make_array_from_process_local_data):
        args = ((8, 4), U, lambda i: V[i]) if make is make_array_from_callback else (U, V)
        with pytest.raises(PlacementError, match=naming("sharding of ", "unreduced={'x'}")):
            make(*args)
    bare = GSPMDSharding(DEVICES.tolist(), "{unreduced}")
    assert bare.is_unreduced
    with pytest.raises(
        ShardingError,
        match=naming("x: {unreduced}", "NamedSharding(mesh, P(..., unreduced={...}))"),
    ):
        device_put(V, bare)
    with pytest.raises(UnreducedError, match=naming("x: ", "key")):
        device_put(jax.random.key(0), on(unreduced={"x"}))
    with pytest.raises(UnreducedError):
        device_get(device_put(V, U))


def test_transfer_guards_permit_partial_sums_in_place() -> None:
    x = partial(3, 4)
    with jax.transfer_guard("disallow_explicit"):
        assert device_put(x, on("y", unreduced={"x"})).sharding == U


def test_a_sharding_of_a_users_own_is_never_unreduced() -> None:
    class Own(Sharding):
        devices = (DEVICES[0],)

    assert not Own().is_unreduced
    assert not SingleDeviceSharding(DEVICES[0]).is_unreduced


class TestPlans:
    """Reshards of an array on 8 devices: two hold each partial result of each of two tiles."""

    @pytest.mark.parametrize(
        ("target", "moved", "kept"),
        [
            # Each device receives the other partial result of its tile, or both of the other tile.
            (on("y"), 8 * 16, 8 * 16),
            (on(), 8 * 48, 8 * 16),
            (U, 0, 8 * 16),
            # Half of the devices hold a partial result of their tile, the other half none.
            (on("x"), 4 * 16 + 4 * 32, 4 * 16),
        ],
    )
    def test_bytes_of_a_sum(self, target, moved, kept):
        report = reshard_plan(partial(1, 2, shape=(8,)), target)
        assert (report.bytes_moved, report.bytes_kept) == (moved, kept)
        assert sum(pair.nbytes for pair in report.pairs) == moved
        assert report.source_shard_bytes == 16

    def test_whole_tiles_become_the_first_partial_results(self):
        x = device_put(np.ones(8, np.float32), on("z"))
        report = reshard_plan(x, U)
        assert report.bytes_moved + report.bytes_kept == 4 * 16
        assert report.route[-1] == "split"
        assert {pair.destination for pair in report.pairs} <= {0, 1, 2, 3}
