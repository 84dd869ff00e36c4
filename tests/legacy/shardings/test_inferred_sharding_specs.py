"""From tilings back to the sharding specs of `pmap`."""

import itertools

import pytest

from xlashard.errors import TilingError
from xlashard.geometry import MeshGrid, Spec, Tiling
from xlashard.legacy.shardings.sharding_spec import (
    Chunked,
    NoSharding,
    Replicated,
    ShardedAxis,
    sharding_spec_from_tiling,
)


def all_tilings(grid, ndim):
    names = grid.axis_names
    for count in range(len(names) + 1):
        for used in itertools.permutations(names, count):
            for dims in itertools.product(range(ndim), repeat=count):
                of_dim = [
                    tuple(n for n, d in zip(used, dims, strict=True) if d == dim)
                    for dim in range(ndim)
                ]
                yield Tiling.from_spec(grid, Spec(tuple(of_dim)), ndim)


@pytest.mark.parametrize("sizes", [(2, 3, 2), (4, 2), (1, 3), (1,)])
def test_inferred_sharding_spec_has_the_tiles_of_its_source(sizes):
    grid = MeshGrid(("a", "b", "c")[: len(sizes)], sizes)
    for ndim in (1, 2, 3):
        for tiling in all_tilings(grid, ndim):
            spec = sharding_spec_from_tiling(tiling)
            assert spec.tiling == tiling
            assert all(
                size > 1 or isinstance(entry, NoSharding)
                for size, entry in zip(spec.counts, spec.sharding, strict=True)
            )


def test_inferred_sharding_spec_is_minimal():
    grid = MeshGrid(("a", "b"), (4, 2))
    spec = sharding_spec_from_tiling(Tiling.from_spec(grid, Spec((("a", "b"), ())), 2))
    assert spec.sharding == (Chunked((8,)), NoSharding())
    assert spec.mesh_mapping == (ShardedAxis(0),)
    spec = sharding_spec_from_tiling(Tiling.from_spec(grid, Spec((("b",),)), 1))
    assert spec.mesh_mapping == (Replicated(4), ShardedAxis(0))


def test_tiles_without_a_grid_are_refused():
    with pytest.raises(TilingError, match=r"4 devices.*\(4,\)"):
        sharding_spec_from_tiling(Tiling((4,), 4, listed=(0, 3, 1, 2)))
    with pytest.raises(TilingError, match=r"3 devices.*\(2, 3\)"):
        sharding_spec_from_tiling(Tiling((2, 3), 6, ((3, 2), (2, 1))))
