"""What every sharding answers, whatever its class: inherit it and say what it must mean."""

import copy
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

from xlashard import Sharding, device_put, make_array_from_callback, pjit
from xlashard.errors import GeometryError
from xlashard.sharding import to_jax

type Cuts = Mapping[int, tuple[slice, ...]]


class ShardingSuite:
    """Give it a fixture `sharding`, and what is expected of it.

    Attributes:
        shape: A shape that it cuts evenly.
        cuts: For each position in the device assignment the slices that it holds.
        uneven: A shape that it can't cut evenly, or None.
        low_rank: A shape of too low a rank for it, or None.
        pickles: False for a class that a test defines.
        listed: True if the order of its devices can only be said by a list.
    """

    shape: ClassVar[tuple[int, ...]]
    cuts: ClassVar[Cuts]
    uneven: ClassVar[tuple[int, ...] | None] = None
    low_rank: ClassVar[tuple[int, ...] | None] = None
    pickles: ClassVar[bool] = True
    listed: ClassVar[bool] = False

    def held(self, position: int) -> np.ndarray:
        """The numbers that one device holds of `0, 1, 2, ...` in the suite's shape."""
        whole = np.arange(np.prod(self.shape), dtype=np.int32).reshape(self.shape)
        return whole[self.cuts[position]]

    def test_devices(self, sharding: Sharding) -> None:
        assert len(sharding.devices) == sharding.num_devices == len(self.cuts)
        assert sharding.device_set == set(sharding.devices)
        assert sharding.addressable_devices == set(sharding.devices)
        assert sharding.addressable_positions == tuple(range(len(self.cuts)))
        assert sharding.is_fully_addressable

    def test_indices_of_every_device(self, sharding: Sharding) -> None:
        whole = np.arange(np.prod(self.shape)).reshape(self.shape)
        index_map = sharding.devices_indices_map(self.shape)
        assert set(index_map) == set(sharding.devices)
        for position, device in enumerate(sharding.devices):
            np.testing.assert_array_equal(whole[index_map[device]], self.held(position))
        assert sharding.addressable_devices_indices_map(self.shape) == index_map

    def test_index_maps_are_the_callers_own(self, sharding: Sharding) -> None:
        first = sharding.devices_indices_map(self.shape)
        first.clear()  # type: ignore[attr-defined]
        assert len(sharding.devices_indices_map(self.shape)) == len(self.cuts)

    def test_shard_shape(self, sharding: Sharding) -> None:
        assert sharding.shard_shape(self.shape) == self.held(0).shape
        sharding.is_compatible_aval(self.shape)
        sharding.check_compatible_aval(self.shape)

    def test_replication_is_what_the_indices_say(self, sharding: Sharding) -> None:
        assert sharding.is_fully_replicated == all(
            self.held(i).shape == self.shape for i in self.cuts
        )

    def test_uneven_shapes_are_refused_with_the_numbers(self, sharding: Sharding) -> None:
        if self.uneven is None:
            sharding.shard_shape((3, 5, 7)[: len(self.shape)])
            return
        with pytest.raises(GeometryError) as caught:
            sharding.shard_shape(self.uneven)
        assert str(self.uneven) in str(caught.value)

    def test_too_low_a_rank_is_refused_with_the_numbers(self, sharding: Sharding) -> None:
        if self.low_rank is None:
            assert sharding.shard_shape(()) == ()
            return
        with pytest.raises(GeometryError, match=str(len(self.low_rank))):
            sharding.shard_shape(self.low_rank)

    def test_zero_sized_arrays(self, sharding: Sharding) -> None:
        shape = (0, *self.shape[1:])
        assert sharding.shard_shape(shape)[0] == 0
        array = device_put(np.zeros(shape, np.float32), sharding)
        assert array.shape == shape
        assert np.asarray(array).shape == shape

    def test_equal_to_itself_and_to_its_copies(self, sharding: Sharding) -> None:
        assert sharding == sharding
        assert sharding != "a sharding"
        if not self.pickles:
            return
        for twin in (copy.copy(sharding), copy.deepcopy(sharding), _repickled(sharding)):
            assert type(twin) is type(sharding)
            assert twin == sharding
            assert hash(twin) == hash(sharding)
            assert twin.devices == sharding.devices
            assert twin.memory_kind == sharding.memory_kind

    def test_its_text_names_its_class(self, sharding: Sharding) -> None:
        assert type(sharding).__name__ in repr(sharding)

    def test_its_twin_is_jaxs_own_and_agrees(self, sharding: Sharding) -> None:
        twin = sharding.twin(self.shape)
        assert type(twin).__module__.startswith(("jax", "jaxlib"))
        assert not isinstance(twin, Sharding)
        assert twin.shard_shape(self.shape) == sharding.shard_shape(self.shape)
        theirs = twin.devices_indices_map(self.shape)
        whole = np.arange(np.prod(self.shape)).reshape(self.shape)
        for device, index in sharding.devices_indices_map(self.shape).items():
            np.testing.assert_array_equal(whole[theirs[device]], whole[index])
        assert to_jax(sharding, self.shape) == twin

    @pytest.mark.parametrize("compiled", [jax.jit, pjit])
    def test_programs_take_arrays_that_lie_so(self, sharding: Sharding, compiled: Any) -> None:
        if self.listed and compiled is jax.jit:
            compiled = pjit  # jax.jit can't tell Shardy of such tiles
        whole = np.arange(np.prod(self.shape), dtype=np.int32).reshape(self.shape)
        array = compiled(lambda x: x + 1)(device_put(whole, sharding))
        np.testing.assert_array_equal(np.asarray(array), whole + 1)

    def test_constructors_put_each_piece_on_its_device(self, sharding: Sharding) -> None:
        whole = np.arange(np.prod(self.shape), dtype=np.int32).reshape(self.shape)
        for array in (
            device_put(whole, sharding),
            make_array_from_callback(self.shape, sharding, lambda index: whole[index]),
        ):
            assert array.sharding.is_equivalent_to(to_jax(sharding, self.shape), len(self.shape))
            by_device = {shard.device: shard for shard in array.addressable_shards}
            copies: dict[bytes, list[int]] = {}
            for position, device in enumerate(sharding.devices):
                shard = by_device[device]
                np.testing.assert_array_equal(np.asarray(shard.data), self.held(position))
                copies.setdefault(self.held(position).tobytes(), []).append(shard.replica_id)
            assert all(ids == list(range(len(ids))) for ids in copies.values())


def _repickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))
