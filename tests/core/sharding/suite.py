"""Tests of every sharding class: subclass it and define the expected tiles."""

import contextlib
import copy
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from jax._src.array import device_replica_id_map

from xlashard import (
    GSPMDSharding,
    Sharding,
    SingleDeviceSharding,
    XLACompatibleSharding,
    device_put,
    make_array_from_callback,
    pjit,
)
from xlashard.core.sharding import from_jax, to_jax
from xlashard.errors import ArgumentError, GeometryError, RankError, ShardingError

type Cuts = Mapping[int, tuple[slice, ...]]

DEFAULT_MEMORY = jax.devices()[0].default_memory().kind


def bare_tiles(sharding: Any, ndim: int) -> GSPMDSharding:
    """Return the same placement of arrays of a rank by its tiles alone."""
    if isinstance(sharding, GSPMDSharding):
        return sharding
    tiles = sharding.rank_tiling(ndim).to_tile_assignment()
    return GSPMDSharding(sharding.devices, tiles, memory_kind=sharding.memory_kind)


class ShardingSuite:
    """Suite of a class with a fixture `sharding` and these expectations.

    Attributes:
        shape: A shape that it shards evenly.
        cuts: Slices that each position in the device assignment holds.
        uneven: A shape that it can't shard evenly, or None.
        low_rank: A shape of too low a rank for it, or None.
        pickles: False for a class that a test defines.
    """

    shape: ClassVar[tuple[int, ...]]
    cuts: ClassVar[Cuts]
    uneven: ClassVar[tuple[int, ...] | None] = None
    low_rank: ClassVar[tuple[int, ...] | None] = None
    pickles: ClassVar[bool] = True

    def held(self, position: int) -> np.ndarray:
        """Return the numbers that one device holds of `0, 1, 2, ...` in the suite's shape."""
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

    def test_no_caller_changes_the_index_map_of_another(self, sharding: Sharding) -> None:
        for method in (sharding.devices_indices_map, sharding.addressable_devices_indices_map):
            with contextlib.suppress(TypeError):  # that of a read-only map
                method(self.shape)[sharding.devices[0]] = ()  # type: ignore[index]
            assert method(self.shape)[sharding.devices[0]] != () or self.shape == ()

    def test_known_results_do_not_hide_invalid_shapes(self, sharding: Sharding) -> None:
        if not isinstance(sharding, XLACompatibleSharding):
            return
        methods: list[Any] = [
            sharding.shard_shape,
            sharding.devices_indices_map,
            sharding.addressable_devices_indices_map,
        ]
        for method in methods:
            first = method(self.shape)
            assert method(tuple(map(np.int64, self.shape))) == method(list(self.shape)) == first
            assert method(n for n in self.shape) == first
            for size in (float(self.shape[0]), "8"):
                with pytest.raises(ArgumentError, match="shape"):
                    method((size, *self.shape[1:]))

    def test_known_comparisons_do_not_hide_invalid_arguments(self, sharding: Sharding) -> None:
        ndim = len(self.shape)
        assert sharding.is_equivalent_to(sharding, ndim)
        for bad, rank in ((None, ndim), (sharding, float(ndim)), (sharding, None)):
            with pytest.raises(ArgumentError):
                sharding.is_equivalent_to(bad, rank)  # type: ignore[arg-type]
        with pytest.raises(RankError):
            sharding.is_equivalent_to(sharding, -1)

    def test_shard_shape(self, sharding: Sharding) -> None:
        assert sharding.shard_shape(self.shape) == self.held(0).shape
        sharding.is_compatible_aval(self.shape)
        sharding.check_compatible_aval(self.shape)

    def test_is_fully_replicated_agrees_with_the_indices(self, sharding: Sharding) -> None:
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
        for dim in range(len(self.shape)):
            shape = (*self.shape[:dim], 0, *self.shape[dim + 1 :])
            assert sharding.shard_shape(shape)[dim] == 0
            array = device_put(np.zeros(shape, np.float32), sharding)
            assert array.shape == shape
            assert np.asarray(array).shape == shape
            out = pjit(lambda x: x + 1, in_shardings=sharding)(np.zeros(shape, np.float32))
            assert out.shape == shape

    def test_sharding_equals_itself_and_its_copies(self, sharding: Sharding) -> None:
        assert sharding == sharding
        assert sharding != "a sharding"
        if not self.pickles:
            return
        for copied in (copy.copy(sharding), copy.deepcopy(sharding), _repickled(sharding)):
            assert type(copied) is type(sharding)
            assert copied == sharding
            assert hash(copied) == hash(sharding)
            assert copied.devices == sharding.devices
            assert copied.memory_kind == sharding.memory_kind

    def test_repr_names_the_class(self, sharding: Sharding) -> None:
        assert type(sharding).__name__ in repr(sharding)

    def test_jax_sharding_has_equal_indices(self, sharding: Sharding) -> None:
        jax_sharding = sharding.jax_sharding(self.shape)
        assert type(jax_sharding).__module__.startswith(("jax", "jaxlib"))
        assert not isinstance(jax_sharding, Sharding)
        assert jax_sharding.shard_shape(self.shape) == sharding.shard_shape(self.shape)
        theirs = jax_sharding.devices_indices_map(self.shape)
        whole = np.arange(np.prod(self.shape)).reshape(self.shape)
        for device, index in sharding.devices_indices_map(self.shape).items():
            np.testing.assert_array_equal(whole[theirs[device]], whole[index])
        assert to_jax(sharding, self.shape) == jax_sharding

    def test_jax_sharding_has_equal_replica_ids(self, sharding: Sharding) -> None:
        theirs = device_replica_id_map(sharding.jax_sharding(self.shape), self.shape)
        ours = sharding.tiling(self.shape).replica_ids().tolist()
        assert dict(zip(sharding.devices, ours, strict=True)) == theirs

    def test_jax_sharding_converts_back(self, sharding: Sharding) -> None:
        back = from_jax(sharding.jax_sharding(self.shape))
        assert back.devices == sharding.devices
        assert back.memory_kind in (sharding.memory_kind, DEFAULT_MEMORY)
        assert back.devices_indices_map(self.shape) == {
            d: whole_as_none(index, self.shape)
            for d, index in sharding.devices_indices_map(self.shape).items()
        }

    def test_shardings_with_equal_tiles_are_equivalent(self, sharding: Sharding) -> None:
        ndim = len(self.shape)
        if not isinstance(sharding, XLACompatibleSharding):
            assert sharding.is_equivalent_to(sharding, ndim)
            assert not sharding.is_equivalent_to(from_jax(sharding.jax_sharding(self.shape)), ndim)
            return
        tiles = bare_tiles(sharding, ndim)
        jax_sharding = sharding.jax_sharding(self.shape)
        for other in (sharding, tiles, jax_sharding, from_jax(jax_sharding)):
            assert sharding.is_equivalent_to(other, ndim)
        assert tiles.is_equivalent_to(sharding, ndim)

    def test_not_equivalent_to_other_devices_or_tiles(self, sharding: Sharding) -> None:
        ndim = len(self.shape)
        turned = sharding.devices[1:] + sharding.devices[:1]
        count = len(turned)
        if count > 1 and not sharding.is_fully_replicated:
            tiles = sharding.tiling(self.shape).to_tile_assignment()
            kind = sharding.memory_kind
            assert not sharding.is_equivalent_to(
                GSPMDSharding(turned, tiles, memory_kind=kind), ndim
            )
            whole = GSPMDSharding.get_replicated(sharding.devices, memory_kind=kind)
            assert not sharding.is_equivalent_to(whole, ndim)
        alone = SingleDeviceSharding(jax.devices()[-1])
        assert not sharding.is_equivalent_to(alone, ndim)

    def test_memories(self, sharding: Sharding) -> None:
        if not isinstance(sharding, XLACompatibleSharding):
            with pytest.raises(NotImplementedError, match=type(sharding).__name__):
                sharding.with_memory_kind("pinned_host")
            return
        kinds = [memory.kind for memory in sharding.devices[0].addressable_memories()]
        for kind in kinds:
            moved = sharding.with_memory_kind(kind)
            assert type(moved) is type(sharding)
            assert moved.memory_kind == kind
            assert moved.devices == sharding.devices
            assert moved.is_equivalent_to(sharding, len(self.shape)) == (
                kind == (sharding.memory_kind or DEFAULT_MEMORY)
            )
            whole = np.arange(np.prod(self.shape), dtype=np.int32).reshape(self.shape)
            array = device_put(whole, moved)
            assert array.sharding.memory_kind == kind
            np.testing.assert_array_equal(np.asarray(array), whole)
        with pytest.raises(ShardingError, match=f"memory_kind='hbm3'.*{kinds[-1]}"):
            sharding.with_memory_kind("hbm3")

    def test_jax_accepts_the_sharding(self, sharding: Sharding) -> None:
        own = isinstance(sharding, jax.sharding.Sharding)
        given = sharding if own else sharding.jax_sharding(self.shape)
        whole = np.arange(np.prod(self.shape), dtype=np.int32).reshape(self.shape)
        put = jax.device_put(whole, given)
        out = jax.jit(lambda x: x + 1, in_shardings=given, out_shardings=given)(put)
        for array, values in ((put, whole), (out, whole + 1)):
            np.testing.assert_array_equal(np.asarray(array), values)
            for shard in array.addressable_shards:
                position = sharding.devices.index(shard.device)
                np.testing.assert_array_equal(np.asarray(shard.data), values[self.cuts[position]])

    def test_pjit_places_arguments_and_results(self, sharding: Sharding) -> None:
        whole = np.arange(np.prod(self.shape), dtype=np.int32).reshape(self.shape)
        fun = pjit(lambda x: x + 1, in_shardings=sharding, out_shardings=sharding)
        out = fun(whole)
        for shard in out.addressable_shards:
            position = sharding.devices.index(shard.device)
            np.testing.assert_array_equal(np.asarray(shard.data), self.held(position) + 1)
        kind = sharding.memory_kind
        assert out.sharding.memory_kind == (DEFAULT_MEMORY if kind is None else kind)

    @pytest.mark.parametrize("compiled", [jax.jit, pjit])
    def test_programs_accept_arrays_on_the_sharding(
        self, sharding: Sharding, compiled: Any
    ) -> None:
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


def whole_as_none(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return slices of whole dimensions as `slice(None)`, one for each dimension."""
    full = (*index, *(slice(None),) * (len(shape) - len(index)))
    return tuple(
        slice(None) if cut.indices(size)[:2] == (0, size) else cut
        for cut, size in zip(full, shape, strict=True)
    )


def _repickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))
