"""What every `Array` answers, however it was made: inherit it and say how to make one."""

import copy
import pickle
from typing import Any

import jax
import numpy as np

from tests.array.cases import same
from xlashard import Array, GSPMDSharding, XLACompatibleSharding, device_put
from xlashard.sharding import from_jax


class ArraySuite:
    """Give it fixtures `array`, `expected` (its value) and `sharding` (None: uncommitted)."""

    def test_its_value_reads_back(self, array: Array, expected: np.ndarray) -> None:
        assert type(array) is Array
        assert same(array, expected)
        assert not np.asarray(array).flags.writeable
        assert array.tobytes() == expected.tobytes()
        assert array.tolist() == expected.tolist()

    def test_its_attributes_agree(self, array: Array, expected: np.ndarray) -> None:
        assert array.shape == expected.shape
        assert array.dtype == expected.dtype
        assert array.ndim == expected.ndim
        assert array.size == expected.size
        assert array.itemsize == array.to_jax().itemsize
        assert array.nbytes == array.to_jax().nbytes
        assert array.aval.shape == expected.shape
        assert not array.weak_type
        assert array.is_fully_addressable
        assert not array.is_deleted()
        assert array.block_until_ready() is array
        assert array.is_ready()

    def test_it_is_where_it_was_put(self, array: Array, sharding: Any) -> None:
        if sharding is None:
            assert not array.committed
            assert array.device == jax.devices()[0]
            return
        wanted = from_jax(sharding)
        if not isinstance(wanted, XLACompatibleSharding):
            # JAX, which looks at it too, could not read a class that a user wrote.
            tiles = wanted.tiling(array.shape).to_tile_assignment()
            wanted = GSPMDSharding(wanted.devices, tiles)
        assert array.committed
        assert array.sharding == wanted
        assert array.devices() == set(wanted.devices)
        assert array.is_fully_replicated == wanted.tiling(array.shape).is_replicated
        (expected_device,) = wanted.devices if len(wanted.devices) == 1 else (wanted,)
        assert array.device == expected_device
        assert array.format.layout == array.layout
        per_device = array.addressable_data(0).on_device_size_in_bytes()
        assert array.on_device_size_in_bytes() == per_device * len(wanted.devices)

    def test_its_shards_are_the_pieces(self, array: Array, expected: np.ndarray) -> None:
        sharding = array.sharding
        indices = sharding.devices_indices_map(expected.shape)
        shards = array.addressable_shards
        assert [shard.device for shard in shards] == list(sharding.devices)
        tiles = sharding.tiling(expected.shape).tile_ids().tolist()
        copies: dict[int, list[int]] = {}
        for number, shard in enumerate(shards):
            assert type(shard.data) is Array
            assert shard.data.devices() == {shard.device}
            piece = expected[indices[shard.device]]
            assert same(shard.data, piece)
            assert same(expected[shard.index], piece)
            assert same(array.addressable_data(number), piece)
            copies.setdefault(tiles[number], []).append(shard.replica_id)
        assert all(ids == list(range(len(ids))) for ids in copies.values())
        assert [s.device for s in array.global_shards] == list(sharding.devices)

    def test_it_travels_as_a_value(self, array: Array, expected: np.ndarray) -> None:
        back = pickle.loads(pickle.dumps(array))
        assert type(back) is Array
        assert same(back, expected)
        assert not back.committed
        assert back.weak_type == array.weak_type

    def test_a_copy_is_another_array(self, array: Array, expected: np.ndarray) -> None:
        for other in (copy.copy(array), copy.deepcopy(array)):
            assert type(other) is Array
            assert same(other, expected)
            other.delete()
        assert same(array, expected)

    def test_its_text_shows_value_and_dtype(self, array: Array, expected: np.ndarray) -> None:
        assert repr(array).startswith("Array(")
        assert repr(array).endswith(f"dtype={expected.dtype.name})")
        assert str(array) == str(expected) or array.size == 0

    def test_it_is_jax_s_without_a_copy(self, array: Array) -> None:
        handle = array.to_jax()
        assert isinstance(array, jax.Array)
        assert Array.from_jax(handle).to_jax() is handle
        assert jax.typeof(array) == jax.typeof(handle)

    def test_it_moves_there_and_back(self, array: Array, expected: np.ndarray) -> None:
        there = device_put(array, jax.devices()[5])
        assert there.devices() == {jax.devices()[5]}
        assert same(there, expected)
        assert same(device_put(there, array.sharding), expected)
