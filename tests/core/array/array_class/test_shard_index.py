"""Indices that select a shard: the shard has NumPy's value for every grid of devices."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.array.cases import DEVICES, same, value
from xlashard import (
    Chunked,
    NoSharding,
    PmapSharding,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    Unstacked,
    device_put,
)
from xlashard.core.array.array_class import indexing


@st.composite
def placements(draw: st.DrawFn) -> tuple[PmapSharding, tuple[int, ...]]:
    """Draw a grid of up to eight devices in any order, and a shape that it shards."""
    dims: list[Any] = []
    left = 8
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if n <= left]))
        left //= count
        kinds = [NoSharding(), Chunked(()), Chunked((1,))] if count == 1 else []
        kinds += [Chunked((count,)), Unstacked(count)]
        kinds += [Chunked((2, count // 2))] if count % 2 == 0 else []
        dims.append(draw(st.sampled_from(kinds)))
    cuts = sum(
        len(dim.chunks) if isinstance(dim, Chunked) else isinstance(dim, Unstacked) for dim in dims
    )
    axes: list[Any] = [ShardedAxis(n) for n in range(cuts)]
    axes.append(Replicated(draw(st.integers(1, left))))
    spec = ShardingSpec(tuple(dims), tuple(draw(st.permutations(axes))))
    shape = tuple(
        count if isinstance(dim, Unstacked) else count * draw(st.integers(0, 3))
        for dim, count in zip(dims, spec.counts, strict=True)
    )
    devices = draw(st.permutations(DEVICES))[: spec.num_devices]
    return PmapSharding(devices, spec), shape


@pytest.mark.slow
@settings(max_examples=60)
@given(placements(), st.data())
def test_index_of_a_shard_selects_its_value(
    placement: tuple[PmapSharding, tuple[int, ...]], data: st.DataObject
) -> None:
    sharding, shape = placement
    whole = value(np.float32, shape)
    x = device_put(whole, sharding)
    assert same(x, whole)
    extents = sharding.shard_shape(shape)
    device, bounds = data.draw(st.sampled_from(list(sharding.devices_indices_map(shape).items())))
    index = []
    for cut, size, extent in zip(bounds, shape, extents, strict=True):
        start = cut.indices(size)[0]
        ways: list[Any] = [cut, slice(start, start + extent), slice(start - size or None, None)]
        if extent == 1:
            ways += [start, start - size, np.int32(start)]
        index.append(
            data.draw(st.sampled_from(ways if start + extent == size else ways[:2] + ways[3:]))
        )
    found = indexing.whole_shard(x.to_jax(), tuple(index))
    if 0 in shape:
        assert found is None
        return
    assert found is not None
    assert same(found, whole[tuple(index)])
    holders = [d for d, held in sharding.devices_indices_map(shape).items() if held == bounds]
    assert found.devices() == {holders[0]}
    assert device in holders


@pytest.mark.slow
@settings(max_examples=60)
@given(placements(), st.data())
def test_every_other_index_is_left_to_a_program(
    placement: tuple[PmapSharding, tuple[int, ...]], data: st.DataObject
) -> None:
    sharding, shape = placement
    whole = value(np.float32, shape)
    x = device_put(whole, sharding)
    entry = st.one_of(st.integers(-4, 4), st.slices(4), st.just(...), st.just(None), st.booleans())
    index = tuple(data.draw(st.lists(entry, max_size=3)))
    found = indexing.whole_shard(x.to_jax(), index)
    if found is not None:
        assert same(found, whole[index])
        assert found.size == np.prod(sharding.shard_shape(shape))
