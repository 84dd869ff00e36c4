import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.geometry import oracle
from tests.geometry.oracle import all_specs, assignment_of, grid_id, small_grids
from tests.goldens import check_errors
from xlashard.errors import TilingError
from xlashard.geometry import (
    MeshGrid,
    Spec,
    TileAssignment,
    Tiling,
    spec_from_tile_assignment,
)

GOLDENS = Path(__file__).parent / "goldens"

GRID = MeshGrid(("x", "y"), (2, 4))


def without_unit_axes(grid, spec):
    """Return the spec without axes of size 1, as a round trip returns it."""
    dims = (tuple(a for a in axes if grid.shape[a] > 1) for axes in spec.dims)
    return Spec(tuple(dims))


@pytest.mark.parametrize("grid", small_grids(), ids=grid_id)
def test_every_spec_of_every_small_mesh_comes_back(grid):
    rng = random.Random(grid_id(grid))
    for ndim in range(4):
        for spec in all_specs(grid, ndim):
            expected = without_unit_axes(grid, spec)
            iota = assignment_of(grid, spec, ndim)
            assert spec_from_tile_assignment(grid, iota) == expected
            if iota.kind != "tiled":
                continue
            devices = iota.device_array()
            listed = TileAssignment.listed(iota.dims, devices.reshape(-1), iota.subgroups)
            assert not listed.is_iota
            assert spec_from_tile_assignment(grid, listed) == expected
            if not iota.subgroups:
                continue
            # Within its replica group each device may be at any position.
            rows = [
                rng.sample(row, len(row)) for row in devices.reshape(-1, iota.dims[-1]).tolist()
            ]
            shuffled = TileAssignment.listed(iota.dims, [*itertools.chain(*rows)], iota.subgroups)
            assert spec_from_tile_assignment(grid, shuffled) == expected


@pytest.mark.slow
@settings(max_examples=300)
@given(st.sampled_from(small_grids(most=8)), st.data())
def test_spec_is_inferred_exactly_for_tilings_of_the_mesh(grid, data):
    cuts = [
        (a, b)
        for a in range(1, grid.size + 1)
        for b in range(1, grid.size + 1)
        if grid.size % (a * b) == 0
    ]
    dims = data.draw(st.sampled_from(cuts))
    dims = (*dims, grid.size // (dims[0] * dims[1]))
    if data.draw(st.booleans()):
        devices = data.draw(st.permutations(range(grid.size)))
    else:
        sizes = data.draw(st.permutations(grid.axis_sizes))
        perm = data.draw(st.permutations(range(len(sizes))))
        devices = np.arange(grid.size).reshape(sizes).transpose(perm).reshape(-1).tolist()
    assignment = TileAssignment.listed(dims, devices, ("replicated",))
    wanted = [None] * grid.size
    for i, device in enumerate(devices):
        wanted[device] = (i // dims[2] // dims[1], i // dims[2] % dims[1])
    matching = {
        without_unit_axes(grid, spec)
        for spec in all_specs(grid, 2)
        if oracle.counts_of_spec(grid, spec, 2) == dims[:2]
        and oracle.tiles_of_spec(grid, spec, 2) == wanted
    }
    if not matching:
        with pytest.raises(TilingError, match="mesh"):
            spec_from_tile_assignment(grid, assignment)
        return
    assert {spec_from_tile_assignment(grid, assignment)} == matching


NOT_SPECS = [
    "{devices=[8]<=[4,2]T(1,0)}",
    "{devices=[4,2]<=[8]}",
    "{devices=[2,4]<=[2,2,2]T(2,0,1)}",
    "{devices=[8]7,6,5,4,3,2,1,0}",
    "{devices=[4]<=[4]}",
    "{{replicated}}",
    "{devices=[2,4]<=[8] last_tile_dims={manual}}",
    "{manual}",
    "{maximal device=0}",
]


def test_assignments_without_a_spec(update_goldens):
    calls = {
        text: lambda t=text: spec_from_tile_assignment(GRID, TileAssignment.parse_text(t))
        for text in NOT_SPECS
    }
    check_errors(GOLDENS / "not_specs.txt", calls, TilingError, update=update_goldens)


def test_one_device_has_one_spec():
    grid = MeshGrid(("x",), (1,))
    for text in ("{replicated}", "{maximal device=0}", "{devices=[1,1]<=[1]}", "{devices=[1]0}"):
        assert spec_from_tile_assignment(grid, TileAssignment.parse_text(text)) == Spec()


def test_inferred_spec_uses_the_axes_of_the_given_mesh():
    assignment = assignment_of(GRID, Spec((("x",),)), 1)
    finer = MeshGrid(("a", "b", "c"), (2, 2, 2))
    assert spec_from_tile_assignment(finer, assignment) == Spec((("a",),))
    whole = assignment_of(GRID, Spec((("x", "y"),)), 1)
    assert spec_from_tile_assignment(finer, whole) == Spec((("a", "b", "c"),))


def test_huge_assignment_is_parsed_without_enumerating_devices():
    grid = MeshGrid(("x", "y", "z"), (2**20, 2**10, 2**20))
    spec = Spec((("z",), (), ("x",)))
    assignment = assignment_of(grid, spec, 3)
    assert spec_from_tile_assignment(grid, TileAssignment.parse_text(str(assignment))) == spec
    assert Tiling.from_tile_assignment(assignment, 3).num_replicas == 2**10
