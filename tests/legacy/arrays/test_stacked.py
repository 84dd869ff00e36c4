"""The array constructors of pmap programs."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.array.cases import DEVICES, named, same, value
from tests.core.array.suite import ArraySuite
from tests.core.processes import run_many
from tests.message_patterns import naming
from xlashard import (
    Array,
    Chunked,
    NoSharding,
    PmapSharding,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    SingleDeviceSharding,
    Unstacked,
    device_put,
    device_put_replicated,
    device_put_sharded,
    make_device_array,
    make_sharded_device_array,
    pjit,
    unstacked_shards,
)
from xlashard.errors import (
    ArgumentError,
    DeletedError,
    DivisibilityError,
    PlacementError,
    TransferGuardError,
)

pytestmark = pytest.mark.partitioner

FOUR = DEVICES[2:6]
V = value(np.float32, (4, 3, 2))
ROWS = ShardingSpec((Chunked((4,)), NoSharding()), (ShardedAxis(0),))


def struct(shape: tuple[int, ...], dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


class Pair(NamedTuple):
    a: Any
    b: Any


class TestShardedArray(ArraySuite):
    @pytest.fixture
    def expected(self) -> np.ndarray:
        return V

    @pytest.fixture
    def sharding(self) -> PmapSharding:
        return PmapSharding.default(V.shape, devices=FOUR)

    @pytest.fixture
    def array(self) -> Array:
        return device_put_sharded(list(V), FOUR)


class TestReplicatedArray(TestShardedArray):
    @pytest.fixture
    def expected(self) -> np.ndarray:
        return np.stack([V[0]] * 4)

    @pytest.fixture
    def sharding(self, expected: np.ndarray) -> PmapSharding:
        return PmapSharding.default(expected.shape, devices=FOUR)

    @pytest.fixture
    def array(self) -> Array:
        return device_put_replicated(V[0], FOUR)


@pytest.mark.parametrize(
    "shard",
    [
        lambda n: V[n],
        lambda n: jnp.asarray(V[n]),
        lambda n: device_put(V[n], DEVICES[7 - n]),
        lambda n: device_put(V[n], FOUR[n]),
        lambda n: device_put(V[n], named()),
        lambda n: V.transpose(2, 1, 0)[:, :, n].T,
        lambda n: V[n] if n % 2 else device_put(V[n], DEVICES[n]),
    ],
    ids=["numpy", "jax", "elsewhere", "there", "on all devices", "strided", "mixed"],
)
def test_shards_come_from_anywhere(shard: Any) -> None:
    shards = [shard(n) for n in range(4)]
    out = device_put_sharded(shards, FOUR)
    assert type(out) is Array
    assert out.sharding == PmapSharding.default(V.shape, devices=FOUR)
    assert same(out, V)
    again = device_put_replicated(shards[1], FOUR)
    assert same(again, np.stack([V[1]] * 4))
    # The arrays alias none of their inputs.
    out.delete()
    again.delete()
    assert all(same(s, V[n]) for n, s in enumerate(shards))


def test_inputs_may_be_overwritten_after_the_call() -> None:
    shards = [np.full(1000, n, np.float32) for n in range(4)]
    sharded = device_put_sharded(shards, FOUR)
    replicated = device_put_replicated(shards[2], FOUR)
    for shard in shards:
        shard[:] = -1
    assert same(sharded, np.repeat(np.arange(4, dtype=np.float32), 1000).reshape(4, 1000))
    assert same(replicated, np.full((4, 1000), 2, np.float32))


def test_one_shard_may_be_listed_for_several_devices() -> None:
    one = np.ones(5, np.int32)
    assert same(device_put_sharded([one] * 4, FOUR), np.ones((4, 5), np.int32))


def test_trees_of_values() -> None:
    shards = [{"p": Pair(V[n], n), "q": [None, np.bool_(n % 2)]} for n in range(4)]
    out = device_put_sharded(shards, FOUR)
    assert same(out["p"].a, V)
    assert out["p"].b.weak_type
    assert same(out["p"].b, np.arange(4, dtype=np.int32))
    assert out["q"][0] is None
    assert same(out["q"][1], np.array([False, True, False, True]))
    one = device_put_replicated(shards[1], FOUR)
    assert same(one["p"].a, np.stack([V[1]] * 4))
    assert same(one["p"].b, np.ones(4, np.int32))
    assert device_put_replicated({}, FOUR) == {}
    assert device_put_sharded([()] * 4, FOUR) == ()


@pytest.mark.parametrize("dtype", ["bfloat16", "int4", "float8_e4m3fn", "complex64", "bool"])
def test_every_dtype(dtype: str) -> None:
    v = value(jnp.dtype(dtype), (4, 6))
    assert same(device_put_sharded(list(v), FOUR), v)
    assert same(device_put_replicated(v[1], FOUR), np.stack([v[1]] * 4))


@pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
def test_no_elements_and_no_dimensions(shape: tuple[int, ...]) -> None:
    v = np.ones(shape, np.float32)
    for out in (device_put_sharded([v] * 4, FOUR), device_put_replicated(v, FOUR)):
        assert same(out, np.ones((4, *shape), np.float32))
        assert out.sharding.shard_shape(out.shape) == (1, *shape)


def test_weak_types_where_all_are_weak() -> None:
    assert device_put_sharded([1.0, 2.0], FOUR[:2]).weak_type
    assert not device_put_sharded([1.0, np.float32(2)], FOUR[:2]).weak_type
    assert not device_put_replicated(np.float32(2), FOUR).weak_type


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_stay_keys(impl: str) -> None:
    keys = [jax.random.key(n, impl=impl) for n in range(4)]
    sharded = device_put_sharded(keys, FOUR)
    assert sharded.dtype == keys[0].dtype
    assert sharded.shape == (4,)
    assert sharded.devices() == set(FOUR)
    replicated = device_put_replicated({"k": keys[2]}, FOUR)["k"]
    for n, key in enumerate(keys):
        assert np.array_equal(jax.random.key_data(sharded[n]), jax.random.key_data(key))
        assert np.array_equal(jax.random.key_data(replicated[n]), jax.random.key_data(keys[2]))
    draws = jax.pmap(lambda k: jax.random.normal(k, (3,)), devices=FOUR)(sharded)
    np.testing.assert_allclose(draws[1], jax.random.normal(keys[1], (3,)), rtol=1e-6)


def test_errors_of_device_put_sharded() -> None:
    with pytest.raises(
        PlacementError, match=naming("3 shards", "4 devices", "jax.local_devices()[:3]")
    ):
        device_put_sharded([1, 2, 3], FOUR)
    with pytest.raises(ArgumentError, match=naming("shards ", "ndarray", "[x[0], x[1]")):
        device_put_sharded(V, FOUR)  # type: ignore[arg-type]
    with pytest.raises(PlacementError, match=r"shards\[2\]\['a'\] has shape \(2,\).*\(3,\)"):
        device_put_sharded([{"a": np.ones(3 - n // 2)} for n in range(4)], FOUR)
    with pytest.raises(PlacementError, match=r"shards\[1\] .*dtype int32.*float32"):
        device_put_sharded([np.float32(1), np.int32(1)], FOUR[:2])
    with pytest.raises(PlacementError, match=r"shards\[1\] .*dtype uint32.*key<fry>"):
        key = jax.random.key(0)
        device_put_sharded([key, np.uint32(0)], FOUR[:2])
    with pytest.raises(ArgumentError, match=r"^shards\[1\]\['b'\].* shards\[0\]"):
        device_put_sharded([{"a": 1}, {"a": 1, "b": 2}], FOUR[:2])
    with pytest.raises(ArgumentError, match=r"^shards\[0\]\['b'\].* shards\[1\]"):
        device_put_sharded([{"a": 1, "b": 2}, {"a": 1}], FOUR[:2])
    with pytest.raises(ArgumentError, match=r"shards\[1\] is a .*\[\*, \*\].*shards\[0\].*\(\*"):
        device_put_sharded([(1, 2), [1, 2]], FOUR[:2])
    with pytest.raises(ArgumentError, match=r"shards\[1\]\[0\] .*str"):
        device_put_sharded([(1,), ("a",)], FOUR[:2])
    with pytest.raises(ArgumentError, match=r"shards\[0\].*traced"):
        jax.jit(lambda x: device_put_sharded([x, x], FOUR[:2]))(1.0)


def test_errors_of_both_functions() -> None:
    x = device_put(np.ones(3, np.float32), FOUR[0])
    x.delete()
    with pytest.raises(DeletedError, match=r"^x\['w'\]: .*float32\[3\].*deleted"):
        device_put_replicated({"w": x}, FOUR)
    with pytest.raises(DeletedError, match=r"^shards\[1\]\['w'\]: "):
        device_put_sharded([{"w": np.ones(3, np.float32)}, {"w": x}], FOUR[:2])
    for devices in ([], 3, [0, 1], [FOUR[0], FOUR[0]]):
        with pytest.raises(ValueError, match="the devices of a device_put_replicated"):
            device_put_replicated(1, devices)  # type: ignore[arg-type]


def test_sharded_device_array_shares_its_buffers() -> None:
    buffers = [device_put(V[n : n + 1, :, 0], FOUR[n]) for n in range(4)]
    out = make_sharded_device_array(struct((4, 3)), ROWS, buffers)
    assert out.sharding == PmapSharding(FOUR, ROWS)
    assert same(out, V[:, :, 0])
    for shard, buffer in zip(out.addressable_shards, buffers, strict=True):
        assert shard.data.unsafe_buffer_pointer() == buffer.unsafe_buffer_pointer()
    assert same(make_sharded_device_array(struct((4, 3)), None, buffers), V[:, :, 0])


def test_buffers_without_the_unstacked_dimension() -> None:
    buffers = [jax.device_put(V[n], FOUR[n]) for n in range(4)]
    out = make_sharded_device_array(struct(V.shape), None, buffers)
    assert out.sharding == PmapSharding.default(V.shape, devices=FOUR, unstacked=True)
    assert same(out, V)
    spec = ShardingSpec((NoSharding(), NoSharding(), Unstacked(2)), (Replicated(2), ShardedAxis(0)))
    pieces = [jax.device_put(V[:, :, n % 2], device) for n, device in enumerate(FOUR)]
    assert same(make_sharded_device_array(struct(V.shape), spec, pieces), V)
    keys = [jax.device_put(jax.random.key(n), device) for n, device in enumerate(FOUR)]
    stacked = make_sharded_device_array(struct((4,), keys[0].dtype), None, keys)
    assert np.array_equal(jax.random.key_data(stacked)[3], jax.random.key_data(keys[3]))


def test_avals_of_jax_and_weak_types() -> None:
    buffers = [device_put(2.0, device) for device in FOUR]
    weak = jax.typeof(device_put_replicated(2.0, FOUR))
    assert weak.weak_type
    assert make_sharded_device_array(weak, None, buffers).weak_type
    assert not make_sharded_device_array(struct((4,)), None, buffers).weak_type
    assert make_device_array(jax.typeof(buffers[0]), FOUR[0], buffers[0]).weak_type


def test_indices_are_checked() -> None:
    buffers = [device_put(V[n], FOUR[n]) for n in range(4)]
    aval = struct(V.shape)
    for indices in (
        [(n,) for n in range(4)],
        [(slice(n, n + 1), slice(None), slice(0, 2)) for n in range(4)],
    ):
        assert same(make_sharded_device_array(aval, None, buffers, indices), V)
    with pytest.raises(PlacementError, match=r"indices\[1\] is \(2,\).*device 1 holds \(1, slice"):
        make_sharded_device_array(aval, None, buffers, [(0,), (2,), (1,), (3,)])
    with pytest.raises(PlacementError, match=r"^1 index for 4 devices"):
        make_sharded_device_array(aval, None, buffers, [(0,)])


def test_buffers_that_do_not_fit() -> None:
    buffers = [device_put(V[n, :, 0], FOUR[n]) for n in range(4)]
    with pytest.raises(PlacementError, match=naming("arrays[0]", "shape (3,)", "shape (1, 3)")):
        make_sharded_device_array(struct((4, 3)), ROWS, buffers)
    with pytest.raises(PlacementError, match=r"float32.* int32"):
        make_sharded_device_array(struct((4, 3), np.int32), None, buffers)
    with pytest.raises(ValueError, match=naming("(4,)", "4 devices", " 3", "jax.devices()[:4]")):
        make_sharded_device_array(struct((4, 3)), ROWS, buffers[:3])
    with pytest.raises(DivisibilityError, match=r"size 5.*Unstacked\(4\)"):
        make_sharded_device_array(struct((5, 3)), None, buffers)
    with pytest.raises(ArgumentError, match=naming("device_buffers[1]", "8 devices")):
        make_sharded_device_array(
            struct((4, 3)), ROWS, [buffers[0], device_put(V[0, :, 0], named())]
        )
    with pytest.raises(ArgumentError, match=naming("aval ", "(4, 3)", "jax.ShapeDtypeStruct(")):
        make_sharded_device_array((4, 3), ROWS, buffers)


def test_device_arrays() -> None:
    buffer = device_put(V[0], FOUR[1])
    free = make_device_array(struct((3, 2)), None, buffer)
    bound = make_device_array(struct((3, 2)), FOUR[1], buffer)
    for array, committed in ((free, False), (bound, True)):
        assert array.committed == committed
        assert array.sharding.device_set == {FOUR[1]}
        assert array.unsafe_buffer_pointer() == buffer.unsafe_buffer_pointer()
        assert same(array, V[0])
    other = device_put(V[0], FOUR[2])
    assert (free + other).devices() == {FOUR[2]}
    with pytest.raises(PlacementError, match=naming("1 arrays", "cpu:3", "cpu:4 (arrays[0])")):
        make_device_array(struct((3, 2)), FOUR[1], other)
    with pytest.raises(PlacementError, match=naming("shape (3, 2)", "pieces of shape (6,)")):
        make_device_array(struct((6,)), None, other)
    key = jax.device_put(jax.random.key(3), FOUR[1])
    assert make_device_array(struct((), key.dtype), FOUR[1], key).committed
    loose = make_device_array(struct((), key.dtype), None, key)
    assert not loose.committed
    assert np.array_equal(jax.random.key_data(loose), jax.random.key_data(key))
    kinds = [memory.kind for memory in DEVICES[0].addressable_memories()]
    pinned = device_put(V[0], SingleDeviceSharding(FOUR[0], memory_kind=kinds[-1]))
    assert make_device_array(struct((3, 2)), FOUR[0], pinned).sharding.memory_kind == kinds[-1]


def test_unstacked_shards() -> None:
    x = device_put(V, PmapSharding.default(V.shape, devices=FOUR, unstacked=True))
    for n, shard in enumerate(unstacked_shards(x)):
        assert shard.device == FOUR[n]
        assert shard.index == (n, slice(None), slice(None))
        assert shard.replica_id == 0
        assert same(shard.data, V[n])
        assert repr(shard).startswith(f"Shard(device={FOUR[n]}, index=[{n}, :, :], replica_id=0")
    assert [shard.data.shape for shard in x.addressable_shards] == [(1, 3, 2)] * 4
    by_spec = unstacked_shards(device_put(V, SingleDeviceSharding(FOUR[0])), ROWS_OF_ONE)
    assert by_spec[0].data.shape == (4, 3, 2)
    with pytest.raises(
        ArgumentError, match=naming("x ", "NamedSharding", "unstacked_shards(x, sharding_spec)")
    ):
        unstacked_shards(device_put(np.ones((8, 2)), named("x")))


ROWS_OF_ONE = ShardingSpec((NoSharding(),) * 3, (Replicated(1),))


def test_programs_accept_stacked_arrays() -> None:
    x = device_put_sharded([np.float32(n) for n in range(8)], DEVICES)
    assert same(pjit(lambda v: v * 2)(x), np.arange(8, dtype=np.float32) * 2)
    assert float(x.sum()) == 28
    total = jax.pmap(lambda v: jax.lax.psum(v, "i"), axis_name="i")(x)
    assert same(np.asarray(total), np.full(8, 28, np.float32))
    assert [float(v) for v in x] == list(range(8))
    assert x[3].devices() == {DEVICES[3]}


@pytest.mark.parametrize("size", [3, 100_000])
def test_copies_that_are_donated_do_not_overwrite_each_other(size: int) -> None:
    whole = np.ones(size, np.float32)
    for donate in (
        jax.pmap(lambda v: v + jax.lax.axis_index("i"), axis_name="i", donate_argnums=0),
        pjit(lambda v: v + jnp.arange(8, dtype=v.dtype)[:, None], donate_argnums=0),
    ):
        x = device_put_replicated(whole, DEVICES)
        out = donate(x)
        assert x.is_deleted()
        assert same(
            np.asarray(out), np.repeat(np.arange(1, 9, dtype=np.float32), size).reshape(8, -1)
        )
        assert same(whole, np.ones(size, np.float32))


def test_reshape_merges_the_leading_dimension_on_the_devices() -> None:
    """The reshape that docs/guides/pmap.md shows."""
    x = device_put_sharded(list(value(np.float32, (8, 4, 3))), DEVICES)
    joined = x.reshape(-1, *x.shape[2:])
    assert joined.shape == (32, 3)
    assert joined.sharding.is_equivalent_to(PmapSharding.default((32, 3), devices=DEVICES), 2)


def test_transfer_guards_are_enforced() -> None:
    held = device_put(np.ones(3, np.float32), DEVICES[0])
    for level in ("disallow", "log"):
        with jax.transfer_guard(level):
            # Both are explicit transfers, however they run.
            out = device_put_sharded([np.ones(3, np.float32), held], FOUR[:2])
            assert device_put_replicated({"a": 1.0, "b": held}, FOUR)["b"].shape == (4, 3)
        assert same(out, np.ones((2, 3), np.float32))
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        assert device_put_replicated(held, FOUR).shape == (4, 3)
        with pytest.raises(TransferGuardError, match=r"host-to-device .* x\['a'\]"):
            device_put_replicated({"a": 1.0}, FOUR)
        with pytest.raises(TransferGuardError, match=r"host-to-device .* shards\[1\]\['a'\]"):
            device_put_sharded([{"a": held}, {"a": np.ones(3)}], FOUR[:2])
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        with pytest.raises(TransferGuardError, match=r"device-to-device .* shards\[0\]"):
            device_put_sharded([held, held], FOUR[:2])
        assert device_put_sharded([1, 2], FOUR[:2]).shape == (2,)


def test_views_of_one_array() -> None:
    batch = value(np.float32, (4, 6))
    assert same(device_put_sharded(np.split(batch, 4), FOUR), batch[:, None])
    assert same(device_put_sharded([batch[0]] * 4, FOUR), np.stack([batch[0]] * 4))
    spread = np.broadcast_to(batch[1], (4, 6))
    assert same(device_put_sharded(list(spread), FOUR), spread)
    doubles = [np.broadcast_to(np.float64(2), (3,)) for _ in range(4)]
    assert same(device_put_sharded(doubles, FOUR), np.full((4, 3), 2, np.float32))


def test_64_bit_dtypes_under_x64() -> None:
    doubles = [np.float64(n) / 3 for n in range(4)]
    assert device_put_sharded(doubles, FOUR).dtype == np.float32
    with jax.enable_x64(True):
        assert same(device_put_sharded(doubles, FOUR), np.array(doubles))
        assert same(device_put_replicated(np.arange(3), FOUR), np.stack([np.arange(3)] * 4))


@pytest.mark.integration
def test_constructors_of_pmap_programs_across_two_processes() -> None:
    for output in run_many(Path(__file__).with_name("two_processes_pmap.py"), 2, 2):
        assert "both agree" in output, output
