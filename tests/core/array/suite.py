"""Suite for every `Array`, independent of its constructor: subclass it and define fixtures."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.array.cases import same
from xlashard import Array, GSPMDSharding, XLACompatibleSharding, device_get, device_put
from xlashard.core.sharding import from_jax
from xlashard.errors import ArgumentError, DeletedError


class ArraySuite:
    """Suite on fixtures `array`, `expected` (its value) and `sharding` (None: uncommitted).

    Or, by `at_once(ArraySuite)`, on a fixture `subjects` of many (`tests/grouped_cases.py`).
    """

    def test_value_reads_back(self, array: Array, expected: np.ndarray) -> None:
        assert type(array) is Array
        assert same(array, expected)
        assert not np.asarray(array).flags.writeable
        assert array.tobytes() == expected.tobytes()
        assert array.tolist() == expected.tolist()

    def test_attributes_agree_with_numpy_and_jax(self, array: Array, expected: np.ndarray) -> None:
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

    def test_sharding_is_the_requested_one(self, array: Array, sharding: Any) -> None:
        if sharding is None:
            assert not array.committed
            assert array.device == jax.devices()[0]
            return
        wanted = from_jax(sharding)
        if not isinstance(wanted, XLACompatibleSharding):
            # JAX, which inspects it too, could not read a user-defined class.
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

    def test_shards_equal_the_indexed_value(self, array: Array, expected: np.ndarray) -> None:
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

    def test_pickle_keeps_the_value_uncommitted(self, array: Array, expected: np.ndarray) -> None:
        back = pickle.loads(pickle.dumps(array))
        assert type(back) is Array
        assert same(back, expected)
        assert not back.committed
        assert back.weak_type == array.weak_type

    @pytest.mark.slow
    def test_copies_are_independent_arrays(self, array: Array, expected: np.ndarray) -> None:
        for other in (copy.copy(array), copy.deepcopy(array)):
            assert type(other) is Array
            assert same(other, expected)
            other.delete()
        assert same(array, expected)

    def test_repr_shows_value_and_dtype(self, array: Array, expected: np.ndarray) -> None:
        assert repr(array).startswith("Array(")
        assert repr(array).endswith(f"dtype={expected.dtype.name})")
        assert str(array) == str(expected) or array.size == 0

    def test_converts_to_jax_without_a_copy(self, array: Array) -> None:
        handle = array.to_jax()
        assert isinstance(array, jax.Array)
        assert Array.from_jax(handle).to_jax() is handle
        assert jax.typeof(array) == jax.typeof(handle)

    @pytest.mark.devices(8)
    @pytest.mark.slow
    def test_device_put_round_trip(self, array: Array, expected: np.ndarray) -> None:
        there = device_put(array, jax.devices()[5])
        assert there.devices() == {jax.devices()[5]}
        assert same(there, expected)
        assert same(device_put(there, array.sharding), expected)

    def test_arrays_are_unhashable(self, array: Array) -> None:
        with pytest.raises(TypeError, match="unhashable"):
            hash(array)
        assert (array == None) is False  # noqa: E711
        assert array.aval.weak_type is array.weak_type is False

    def test_python_protocols(self, array: Array, expected: np.ndarray) -> None:
        if not expected.ndim:
            with pytest.raises(ArgumentError, match="without dimensions"):
                len(array)
            return
        assert len(array) == len(expected)
        if expected.size:
            assert array.item(expected.size - 1) == expected.item(expected.size - 1)
        if expected.size != 1:
            with pytest.raises(ValueError, match=r"x\.any\(\), x\.all\(\)"):
                bool(array)

    def test_numpy_protocols(self, array: Array, expected: np.ndarray) -> None:
        own = np.array(array)
        assert own.flags.writeable and same(own, expected)
        assert same(np.stack([array, array]), np.stack([expected, expected]))
        with pytest.raises(ValueError, match="without a copy"):
            array.__array__(np.float64, copy=False)

    def test_dlpack_exports_single_shards_only(self, array: Array, expected: np.ndarray) -> None:
        several = len(array.devices()) > 1
        if several:
            with pytest.raises(BufferError, match=r"addressable_shards\[i\]\.data"):
                array.__dlpack__()
            with pytest.raises(ValueError, match="unsafe_buffer_pointer"):
                array.unsafe_buffer_pointer()
        if array.dtype.kind not in "biufc" or array.dtype.name.startswith(("int4", "uint4")):
            return
        for shard in array.addressable_shards:
            lent = np.from_dlpack(shard.data)
            assert same(lent, expected[shard.index])
            assert shard.data.unsafe_buffer_pointer() == lent.ctypes.data or not lent.size
        assert bytes(memoryview(array)) == expected.tobytes()

    def test_array_is_one_leaf_of_a_tree(self, array: Array) -> None:
        tree = {"a": [array, 1]}
        assert jax.tree.leaves(tree)[0] is array
        assert jax.tree.map(lambda leaf: leaf, tree)["a"][0] is array
        assert jax.block_until_ready(tree)["a"][0] is array

    def test_transfer_guards_permit_calls_without_transfer(
        self, array: Array, expected: np.ndarray
    ) -> None:
        with jax.transfer_guard("disallow_explicit"):
            there = device_put(array, array.sharding)
            pieces = [shard.data for shard in array.addressable_shards]
            assert repr(array).startswith("Array(")
        assert same(there, expected) and len(pieces) == len(array.devices())
        with jax.transfer_guard("disallow"):
            assert same(device_get(array), expected)

    def test_a_slice_that_is_a_shard(self, array: Array, expected: np.ndarray) -> None:
        if array.is_fully_replicated or not array.size:
            return
        index = array.addressable_shards[-1].index
        assert same(array[index], expected[index])

    @pytest.mark.slow
    def test_donation_deletes_the_array(self, array: Array, expected: np.ndarray) -> None:
        shards = array.addressable_shards
        moved = device_put(array, array.sharding, donate=True)
        assert array.is_deleted() and same(moved, expected)
        assert [shard.device for shard in shards] == [s.device for s in moved.addressable_shards]

    def test_every_use_of_a_deleted_array_is_an_error(self, array: Array) -> None:
        array.delete()
        array.delete()
        assert array.is_deleted() and repr(array).endswith("deleted)")
        for use in (np.asarray, jnp.sin, pickle.dumps, lambda x: x.addressable_shards, device_put):
            with pytest.raises(DeletedError, match=r"delete\(\)"):
                use(array)
