"""Sharding specs against a walk over the device grid that follows early JAX's definition."""

import itertools
import math
import pickle
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from xlashard.errors import DivisibilityError, RankError, TilingError
from xlashard.geometry import MeshGrid, Tiling
from xlashard.legacy.shardings.sharding_spec import (
    Chunked,
    NoSharding,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    Unstacked,
)

ALL = slice(None)


@st.composite
def specs(draw: st.DrawFn) -> ShardingSpec:
    """Draw specs of up to three dimensions and four grid axes, of at most 48 devices."""
    dims: list[Any] = draw(
        st.lists(
            st.one_of(
                st.just(NoSharding()),
                st.lists(st.integers(1, 3), max_size=2).map(lambda c: Chunked(tuple(c))),
                st.integers(1, 3).map(Unstacked),
            ),
            max_size=3,
        )
    )
    cuts = ShardingSpec.__new__(ShardingSpec)
    object.__setattr__(cuts, "sharding", tuple(dims))
    axes: list[Any] = [ShardedAxis(n) for n in range(len(cuts.cuts))]
    axes += map(Replicated, draw(st.lists(st.integers(1, 3), max_size=2)))
    made = ShardingSpec(tuple(dims), tuple(draw(st.permutations(axes))))
    return made if made.num_devices <= 48 else ShardingSpec((), ())


@st.composite
def specs_and_shapes(draw: st.DrawFn) -> tuple[ShardingSpec, tuple[int, ...]]:
    spec = draw(specs())
    shape = []
    for entry, count in zip(spec.sharding, spec.counts, strict=True):
        times = 1 if isinstance(entry, Unstacked) else draw(st.integers(0, 3))
        shape.append(count * times)
    return spec, tuple(shape)


def walked(spec: ShardingSpec, shape: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """Return the index of each device, by grid position and dimension."""
    out = []
    for place in itertools.product(*(range(n) for n in spec.mesh_shape)):
        at_cut = {
            axis.axis: where
            for axis, where in zip(spec.mesh_mapping, place, strict=True)
            if isinstance(axis, ShardedAxis)
        }
        cut = 0
        index: list[Any] = []
        for entry, size in zip(spec.sharding, shape, strict=True):
            if isinstance(entry, Unstacked):
                index.append(at_cut[cut])
                cut += 1
            elif isinstance(entry, Chunked):
                length, chunk = size, 0
                for factor in entry.chunks:
                    chunk = chunk * factor + at_cut[cut]
                    length //= factor
                    cut += 1
                index.append(slice(chunk * length, (chunk + 1) * length))
            else:
                index.append(ALL)
        out.append(tuple(index))
    return out


def elements(index: tuple[Any, ...], shape: tuple[int, ...]) -> list[Any]:
    """Return an index by its elements: numbers as they are, slices as lists of their elements."""
    return [
        list(range(size))[entry] if isinstance(entry, slice) else entry
        for entry, size in zip(index, shape, strict=True)
    ]


@pytest.mark.slow
@given(specs_and_shapes())
def test_indices_equal_a_walk_over_the_grid(case: tuple[ShardingSpec, tuple[int, ...]]) -> None:
    spec, shape = case
    found = spec.indices(shape)
    assert found.shape == spec.mesh_shape
    assert found.size == spec.num_devices
    for got, want in zip(found.flat, walked(spec, shape), strict=True):
        assert elements(got, shape) == elements(want, shape)


@pytest.mark.slow
@given(specs_and_shapes())
def test_indexed_pieces_have_the_shard_shape(case: tuple[ShardingSpec, tuple[int, ...]]) -> None:
    spec, shape = case
    whole = np.arange(math.prod(shape)).reshape(shape)
    for index in spec.indices(shape).flat:
        assert whole[index].shape == spec.shard_shape(shape)
    for index in spec.tiling.indices(shape):
        assert whole[index].shape == spec.tiling.shard_shape(shape)


@pytest.mark.slow
@given(specs())
def test_tiling_text_and_partition_spec_agree(spec: ShardingSpec) -> None:
    tiling = spec.tiling
    names = tuple(f"a{n}" for n in range(len(spec.mesh_shape)))
    grid = MeshGrid(names, spec.mesh_shape)
    assert Tiling.from_spec(grid, spec.on_axes(names), spec.ndim) == tiling
    assignment = spec.to_tile_assignment()
    assert Tiling.from_tile_assignment(assignment, spec.ndim, spec.num_devices) == tiling
    copies = math.prod(a.replicas for a in spec.mesh_mapping if isinstance(a, Replicated))
    assert tiling.num_replicas == copies


@pytest.mark.slow
@given(specs())
def test_sharding_spec_is_a_hashable_value(spec: ShardingSpec) -> None:
    for other in (
        pickle.loads(pickle.dumps(spec)),
        eval(repr(spec)),
        ShardingSpec(list(spec.sharding), list(spec.mesh_mapping)),  # type: ignore[arg-type]
    ):
        assert other == spec
        assert hash(other) == hash(spec)
    assert spec != ShardingSpec((*spec.sharding, NoSharding()), spec.mesh_mapping)


def test_sharding_spec_with_reordered_mesh_axes() -> None:
    spec = ShardingSpec(
        (Chunked((2,)), Unstacked(3)), (ShardedAxis(1), Replicated(2), ShardedAxis(0))
    )
    assert spec.mesh_shape == (3, 2, 2)
    assert spec.shard_shape((4, 3)) == (2,)
    assert spec.indices((4, 3))[2, 1, 0] == (slice(0, 2), 2)
    assert str(spec.to_tile_assignment()) == (
        "{devices=[2,3,2]<=[6,2]T(1,0) last_tile_dim_replicate}"
    )


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: Chunked(2), ["2", "Chunked((4,))"]),
        (lambda: Chunked((2, 0)), ["number of chunks", "from 1 on", "0"]),
        (lambda: Unstacked(True), ["unstacked size", "True"]),
        (lambda: Unstacked(2.0), ["unstacked size", "2.0"]),
        (lambda: ShardedAxis(-1), ["sharded axis", "-1"]),
        (lambda: Replicated(0), ["number of replicas", "0"]),
        (lambda: ShardingSpec(NoSharding(), ()), ["sharding must be a list", "NoSharding()"]),
        (lambda: ShardingSpec((3,), ()), ["sharding[0]", "Chunked", "not 3"]),
        (lambda: ShardingSpec((), (NoSharding(),)), ["mesh_mapping[0]", "Replicated"]),
        (
            lambda: ShardingSpec((Chunked((2, 4)),), (ShardedAxis(0),)),
            ["2 times (2, 4)", "takes the cuts 0", "ShardedAxis(0), ShardedAxis(1)"],
        ),
        (
            lambda: ShardingSpec((Unstacked(2),), (ShardedAxis(0), ShardedAxis(0))),
            ["1 time (2)", "0, 0", "exactly once"],
        ),
    ],
)
def test_errors_of_refused_specs(make: Any, facts: list[str]) -> None:
    with pytest.raises(TilingError) as caught:
        make()
    for fact in facts:
        assert fact in str(caught.value)


def test_shapes_that_do_not_fit() -> None:
    spec = ShardingSpec((Unstacked(4), Chunked((2,))), (ShardedAxis(0), ShardedAxis(1)))
    with pytest.raises(RankError, match=r"1 dimension, .* is for 2"):
        spec.shard_shape((4,))
    with pytest.raises(DivisibilityError, match=r"\(4, 3\) has size 3.* 2 tiles"):
        spec.indices((4, 3))
    with pytest.raises(DivisibilityError, match=r"size 8.*Unstacked\(4\).*Chunked\(\(4,\)\).* 2$"):
        spec.check_shape((8, 2))
    with pytest.raises(DivisibilityError, match=r"size 6.*one index of 4$"):
        spec.check_shape((6, 2))
