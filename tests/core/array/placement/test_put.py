"""From the host to devices: split into blocks, by several threads, or left to jaxlib."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.array.cases import DEVICES, DTYPES, MESH, SHARDINGS, named, same, value
from xlashard import Array, device_put, make_array_from_callback
from xlashard.core.array.placement import copying, put
from xlashard.errors import DeletedError, PlacementError

ON_HOST = DEVICES[0].platform == "cpu"


@pytest.fixture(params=["jaxlib", "pool", "blocks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All transfer paths, for values of every size."""
    if request.param == "jaxlib":
        monkeypatch.setattr(put, "_LEFT_TO_JAXLIB", 1 << 60)
    else:
        monkeypatch.setattr(put, "_LEFT_TO_JAXLIB", -1)
        monkeypatch.setattr(copying, "_LARGEST_POOLED", 1 << 20 if request.param == "pool" else -1)
        monkeypatch.setattr(copying, "_POOL", 256)
        monkeypatch.setattr(copying, "_BYTES_PER_THREAD", 1)
    return request.param


def shards_agree(x: Array, v: np.ndarray, sharding: Any) -> bool:
    indices = sharding.devices_indices_map(v.shape)
    return all(same(shard.data, v[indices[shard.device]]) for shard in x.addressable_shards)


@pytest.mark.usefixtures("way")
class TestEveryWay:
    @pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)
    def test_every_shard_is_the_right_piece(self, sharding: Any) -> None:
        v = value(np.float32)
        assert shards_agree(device_put(v, sharding), v, sharding)

    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
    def test_every_dtype(self, dtype: Any) -> None:
        v = value(dtype)
        for sharding in (named("x", "y"), named("y"), named()):
            assert same(device_put(v, sharding), v)

    @pytest.mark.parametrize("shape", [(), (0,), (0, 4), (8,), (2, 3, 4), (4, 1, 8, 2)])
    def test_every_rank(self, shape: tuple[int, ...]) -> None:
        v = value(np.float32, shape)
        spec = ["x" if n % 2 == 0 else None for n in shape[:1]]
        for sharding in (named(*spec), named(), SHARDINGS["single"]):
            assert shards_agree(device_put(v, sharding), v, sharding)

    def test_three_dimensions_cut_two_ways(self) -> None:
        v = value(np.int32, (4, 6, 8))
        for spec in (("x", None, "y"), ("y", None, "x"), (None, "x", "y"), (None, None, "x")):
            assert shards_agree(device_put(v, named(*spec)), v, named(*spec))

    @pytest.mark.parametrize(
        "view",
        [
            value(np.float32)[::-1],
            value(np.float32).T,
            np.broadcast_to(np.float32(3), (8, 16)),
            value(np.float32, (16, 32))[::2, ::2],
            np.asfortranarray(value(np.float32)),
        ],
        ids=["backwards", "transposed", "broadcast", "strided", "by columns"],
    )
    def test_noncontiguous_values(self, view: np.ndarray) -> None:
        for sharding in (named("x", "y"), named("y"), named()):
            x = device_put(view, sharding)
            assert same(x, np.ascontiguousarray(view, np.float32))

    def test_dtype_equals_that_of_jnp_asarray(self) -> None:
        for v in (np.arange(16.0), np.arange(16) - 5, np.arange(16) * 1j):
            x = device_put(v, named("y"))
            assert x.dtype == jnp.asarray(v).dtype and same(x, np.asarray(jnp.asarray(v)))
        with jax.enable_x64(True):
            assert device_put(np.arange(16.0), named("y")).dtype == np.float64

    def test_how_overflow_is_handled_is_the_callers_choice(self) -> None:
        too_large = np.full(16, 1e300)
        with np.errstate(over="raise"), pytest.raises(FloatingPointError):
            device_put(too_large, named("y"))
        with np.errstate(over="ignore"):
            assert np.isinf(np.asarray(device_put(too_large, named("y")))).all()

    def test_value_may_be_overwritten_after_the_call(self) -> None:
        for sharding in (named("x", "y"), named("y"), named(), SHARDINGS["single"], None):
            v = value(np.float32)
            x = device_put(v, sharding)
            v[:] = -1
            assert same(x, value(np.float32))

    def test_one_call_places_a_mixed_tree(self) -> None:
        tree = {
            "w": [value(np.float32, (8, n)) for n in (1, 5, 64)],
            "b": (np.float32(2), 3, value(np.int32, (16,))),
            "done": device_put(value(np.float32)),
        }
        placed = device_put(tree, {"w": named("y"), "b": None, "done": named("x")})
        assert jax.tree.all(
            jax.tree.map(lambda x, v: same(x, np.asarray(v, x.dtype)), placed, tree)
        )
        assert placed["w"][2].sharding == named("y") and not placed["b"][0].committed


@pytest.mark.skipif(not ON_HOST, reason="these devices have memories of their own")
class TestSharing:
    @pytest.mark.devices(8)
    def test_devices_with_equal_tiles_share_one_buffer(self) -> None:
        x = device_put(value(np.float32, (64, 1024)), named("x"))
        pointers = [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
        assert len(set(pointers)) == 2

    @pytest.mark.devices(8)
    def test_donating_one_shared_replica_keeps_the_other_replicas(self) -> None:
        v = value(np.float32, (64, 1024))
        x = device_put(v, named())
        added = jax.jit(lambda a: a + 1, donate_argnums=0)(x)
        with pytest.raises((DeletedError, RuntimeError)):
            np.asarray(x)
        y = device_put(v, named())
        kept = y.addressable_shards[3].data
        jax.jit(lambda a: a * 0, donate_argnums=0)(y.addressable_shards[2].data)
        assert same(kept, v) and same(np.asarray(added), v + 1)

    def test_may_alias_takes_the_memory_itself(self) -> None:
        v = copying.private_copy(value(np.float32, (64, 1024)))
        x = device_put(v, SHARDINGS["single"], may_alias=True)
        assert x.unsafe_buffer_pointer() == v.ctypes.data
        assert device_put(v, may_alias=True).unsafe_buffer_pointer() == v.ctypes.data
        copied = device_put(v, SHARDINGS["single"])
        assert copied.unsafe_buffer_pointer() != v.ctypes.data

    @pytest.mark.slow
    def test_deleted_memory_is_given_back_at_once(self) -> None:
        def resident() -> int:
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096

        v = np.ones((16, 1 << 20), np.float32)
        x = device_put(v, named("x"))
        before = resident()
        x.delete()
        assert before - resident() > v.nbytes // 2


class TestMistakes:
    @pytest.mark.devices(8)
    def test_invalid_host_leaf_leaves_donated_leaves_alive(self) -> None:
        x = device_put(value(np.float32))
        tree = [x, np.zeros(7)]
        with pytest.raises(PlacementError, match=r"x\[1\]: .*7"):
            device_put(tree, named("x"), donate=True)
        assert same(x, value(np.float32))

    @pytest.mark.devices(8)
    def test_invalid_array_leaf_leaves_donated_leaves_alive(self) -> None:
        x, y = device_put(value(np.float32)), device_put(np.zeros(7))
        with pytest.raises(PlacementError, match=r"x\['b'\]: .*7"):
            device_put({"a": x, "b": y}, named("x"), donate=True)
        assert not x.is_deleted() and not y.is_deleted()


@pytest.fixture
def one_buffer() -> Iterator[np.ndarray]:
    buffer = np.empty((4, 16), np.float32)
    yield buffer
    buffer[:] = np.nan


@pytest.mark.devices(8)
def test_callback_may_reuse_one_buffer(one_buffer: np.ndarray) -> None:
    v = value(np.float32)

    def piece(index: Any) -> np.ndarray:
        one_buffer[:] = v[index]
        return one_buffer

    x = make_array_from_callback((8, 16), named("x"), piece)
    one_buffer[:] = -1
    assert same(x, v)


@pytest.mark.devices(8)
@pytest.mark.slow
def test_jax_clear_caches_clears_the_route_cache() -> None:
    device_put(value(np.float32), named("x"))
    assert put.host_route.cache_info().currsize > 0
    jax.clear_caches()
    assert put.host_route.cache_info().currsize == 0
    assert same(device_put(value(np.float32), named("x")), value(np.float32))
    assert MESH.size == 8
