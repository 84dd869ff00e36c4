import itertools
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.geometry import oracle
from tests.geometry.oracle import all_specs, assignment_of, grid_id, small_grids
from tests.goldens import check_errors
from xlashard.errors import DivisibilityError, GeometryError, GridError, RankError, TilingError
from xlashard.geometry import (
    UNCONSTRAINED,
    MeshGrid,
    Spec,
    TileAssignment,
    Tiling,
    parse_spec,
    spec_from_tile_assignment,
)

GOLDENS = Path(__file__).parent / "goldens"

GRID = MeshGrid(("x", "y"), (2, 4))


def check_against_oracle(tiling, tiles, counts, shape):
    """Compare all properties of a tiling, for all devices and for selections of devices."""
    n = len(tiles)
    assert tiling.counts == counts
    assert tiling.num_devices == n
    assert tiling.is_replicated == (len(set(tiles)) == 1)
    assert tiling.num_tiles * tiling.num_replicas == n
    replicas = oracle.replicas_of_tiles(tiles)
    assert tiling.replica_ids().tolist() == replicas
    assert tiling.coordinates().tolist() == [list(tile) for tile in tiles]
    ids = tiling.tile_ids().tolist()
    everything = [tuple(c) for c in itertools.product(*map(range, counts))]
    assert [everything[i] for i in ids] == tiles
    for tile in set(ids):
        assert tiling.replicas(tile) == [p for p in range(n) if ids[p] == tile]

    expected = oracle.indices_of_tiles(shape, counts, tiles)
    assert tiling.indices(shape, uneven=True) == expected
    if all(size % count == 0 for size, count in zip(shape, counts, strict=True)):
        assert tiling.indices(shape) == expected
        local = tiling.shard_shape(shape)
        for index in expected:
            assert np.empty(shape, np.int8)[index].shape == local
    else:
        with pytest.raises(DivisibilityError):
            tiling.indices(shape)

    some = [n - 1, 0, n // 2, n // 2]
    assert tiling.indices(shape, some, uneven=True) == [expected[p] for p in some]
    assert tiling.tile_ids(some).tolist() == [ids[p] for p in some]
    assert tiling.replica_ids(np.array([some])).tolist() == [[replicas[p] for p in some]]
    assert tiling.replica_ids(n - 1).item() == replicas[n - 1]
    assert tiling.coordinates([]).shape == (0, len(counts))
    many = [p % n for p in range(100)]
    assert tiling.indices(shape, many, uneven=True) == [expected[p] for p in many]
    assert tiling.indices(shape, [], uneven=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("grid", small_grids(), ids=grid_id)
def test_every_spec_of_every_small_mesh(grid):
    rng = random.Random(grid_id(grid))
    for ndim in range(4):
        for spec in all_specs(grid, ndim):
            counts = oracle.counts_of_spec(grid, spec, ndim)
            tiles = oracle.tiles_of_spec(grid, spec, ndim)
            tiling = Tiling.from_spec(grid, spec, ndim)
            even = tuple(count * rng.randint(0, 2) for count in counts)
            any_shape = tuple(rng.randint(0, 9) for _ in counts)
            check_against_oracle(tiling, tiles, counts, even)
            check_against_oracle(tiling, tiles, counts, any_shape)


@pytest.mark.parametrize("grid", small_grids(), ids=grid_id)
def test_every_tiling_round_trips_through_assignment_and_indices(grid):
    for spec in all_specs(grid, 2):
        tiling = Tiling.from_spec(grid, spec, 2)
        assignment = tiling.to_tile_assignment()
        assert assignment == assignment_of(grid, spec, 2)
        assert Tiling.from_tile_assignment(assignment, 2, grid.size) == tiling
        shape = tuple(count * 3 for count in tiling.counts)
        assert Tiling.from_indices(shape, tiling.indices(shape)) == tiling


@st.composite
def placements(draw):
    """Draw any placement of equal tiles on devices in any order."""
    counts = draw(st.sampled_from([(), (1,), (2,), (3,), (2, 2), (2, 3), (4, 1), (1, 2, 2)]))
    copies = draw(st.integers(1, 4))
    tiles = list(itertools.product(*map(range, counts))) * copies
    return counts, draw(st.permutations(tiles))


@pytest.mark.slow
@given(placements(), st.data())
def test_devices_in_any_order(placement, data):
    counts, tiles = placement
    shape = tuple(data.draw(st.integers(1, 3)) * count for count in counts)
    tiling = Tiling.from_indices(shape, oracle.indices_of_tiles(shape, counts, tiles))
    check_against_oracle(tiling, tiles, counts, shape)

    assignment = tiling.to_tile_assignment()
    assert Tiling.from_tile_assignment(assignment, len(counts), len(tiles)) == tiling
    copied = pickle.loads(pickle.dumps(tiling))
    assert copied == tiling
    assert hash(copied) == hash(tiling)
    check_against_oracle(copied, tiles, counts, shape)


@pytest.mark.slow
@given(placements(), placements())
def test_same_tiles_compares_the_tile_of_every_device(one, other):
    def build(counts, tiles):
        shape = tuple(counts)
        return Tiling.from_indices(shape, oracle.indices_of_tiles(shape, counts, tiles))

    same = one[0] == other[0] and one[1] == other[1]
    assert build(*one).same_tiles(build(*other)) == same


@pytest.mark.slow
@given(st.data())
def test_iota_and_equivalent_list_have_equal_tilings(data):
    sizes = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    perm = data.draw(st.permutations(range(len(sizes))))
    total = int(np.prod(sizes))
    first = data.draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
    dims = (first, total // first)
    kinds = data.draw(st.sampled_from([(), ("replicated",), ("unreduced",)]))
    devices = np.arange(total).reshape(sizes).transpose(perm).reshape(-1)
    iota = TileAssignment.iota(dims, sizes, perm, kinds)
    listed = TileAssignment.listed(dims, devices.tolist(), kinds)
    ndim = 2 - len(kinds)
    tilings = [Tiling.from_tile_assignment(ta, ndim, total) for ta in (iota, listed)]
    assert tilings[0] == tilings[1]
    if tilings[0].is_partial:
        return
    tile_of = {int(d): divmod(i, dims[1]) for i, d in enumerate(devices)}
    tiles = [tile_of[d][:ndim] for d in range(total)]
    check_against_oracle(tilings[0], tiles, dims[:ndim], tuple(d * 2 for d in dims[:ndim]))


def test_few_devices_of_a_huge_mesh_need_no_enumeration():
    grid = MeshGrid(("x", "y", "z"), (2**20, 2**10, 2**20))
    tiling = Tiling.from_spec(grid, parse_spec([("z", "x"), None]), 2)
    shape = (2**43, 5)
    last = grid.size - 1
    assert tiling.indices(shape, [0, 1, last]) == [
        (slice(0, 8), slice(None)),
        (slice(2**23, 2**23 + 8), slice(None)),
        (slice(2**43 - 8, 2**43), slice(None)),
    ]
    assert tiling.replica_ids([0, 1, last, 2**20]).tolist() == [0, 0, 2**10 - 1, 1]
    assert tiling.to_tile_assignment().to_text() == (
        "{devices=[1099511627776,1,1024]<=[1073741824,1048576]T(1,0) last_tile_dim_replicate}"
    )
    assert tiling.replicas(3)[:2] == [3 * 2**30, 3 * 2**30 + 2**20]


def test_unconstrained_dims_count_as_uncut():
    free = Tiling.from_spec(GRID, parse_spec([UNCONSTRAINED, "x"]), 2)
    assert free == Tiling.from_spec(GRID, parse_spec([None, "x"]), 2)


def test_replicated():
    tiling = Tiling.replicated(8, 2)
    assert tiling == Tiling.from_spec(GRID, Spec(), 2)
    assert tiling.is_replicated
    assert tiling.indices((3, 5)) == [(slice(None), slice(None))] * 8
    assert Tiling.replicated(3, 0).indices(()) == [()] * 3
    with pytest.raises(TilingError, match="got 0"):
        Tiling.replicated(0, 2)


def test_zero_sizes_are_cut_into_empty_tiles():
    tiling = Tiling.from_spec(GRID, parse_spec(["x", "y"]), 2)
    assert tiling.shard_shape((0, 8)) == (0, 2)
    assert tiling.indices((0, 8), [5]) == [(slice(0, 0), slice(2, 4))]


def test_uneven_sizes_fill_the_first_tiles():
    tiling = Tiling.from_spec(GRID, parse_spec(["y"]), 1)
    assert tiling.shard_shape((5,), uneven=True) == (2,)
    assert tiling.indices((5,), [0, 1, 2, 3], uneven=True) == [
        (slice(0, 2),),
        (slice(2, 4),),
        (slice(4, 5),),
        (slice(5, 5),),
    ]


def test_arrays_are_read_only():
    tiling = Tiling.from_spec(GRID, parse_spec(["y"]), 1)
    with pytest.raises(ValueError, match="read-only"):
        tiling.tile_ids()[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        tiling.replica_ids()[0] = 1


def test_errors_of_invalid_shapes_and_positions():
    tiling = Tiling.from_spec(GRID, parse_spec(["x", "y"]), 2)
    with pytest.raises(RankError, match=r"\(8,\).* rank 1.* rank 2"):
        tiling.indices((8,))
    with pytest.raises(DivisibilityError, match=r"dimension 1 of shape \(2, 6\).*4 tiles") as e:
        tiling.shard_shape((2, 6))
    assert (e.value.dim, e.value.tiles) == (1, 4)
    for ask in (tiling.tile_ids, tiling.replica_ids, lambda p: tiling.indices((2, 4), p)):
        for wrong in ([8], [0, -1]):
            with pytest.raises(GridError, match=r"outside 0\.\.7"):
                ask(wrong)
    with pytest.raises(TilingError, match=r"outside 0\.\.7"):
        tiling.replicas(8)
    with pytest.raises(RankError):
        Tiling.from_spec(GRID, parse_spec(["x", "y"]), 1)


NOT_TILINGS = [
    ("{replicated}", 1, None),
    ("{maximal device=1}", 1, 4),
    ("{manual}", 1, 4),
    ("{unknown}", 1, 4),
    ("{{replicated}}", 1, 4),
    ("{devices=[2,2]<=[4] last_tile_dims={manual}}", 1, 4),
    ("{devices=[2,2]<=[4]}", 1, 4),
    ("{devices=[2,2]<=[4]}", 2, 8),
]


def test_assignments_that_are_no_tiling(update_goldens):
    calls = {
        f"{text}, {ndim} dimensions, {devices} devices": lambda t=text, n=ndim, d=devices: (
            Tiling.from_tile_assignment(TileAssignment.parse_text(t), n, d)
        )
        for text, ndim, devices in NOT_TILINGS
    }
    check_errors(GOLDENS / "not_tilings.txt", calls, GeometryError, update=update_goldens)


def test_replicated_assignments_give_replicated_tilings():
    whole = Tiling.replicated(4, 1)
    assert Tiling.from_tile_assignment(TileAssignment.replicated(), 1, 4) == whole
    alone = Tiling.from_tile_assignment(TileAssignment.unreduced(), 1, 1)
    assert alone == Tiling.replicated(1, 1)
    single = TileAssignment.maximal(0)
    assert Tiling.from_tile_assignment(single, 3, 1) == Tiling.replicated(1, 3)


@pytest.mark.slow
@given(st.data())
def test_partial_results_go_to_hlo_and_to_specs_and_back(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    grid = MeshGrid(tuple("wxyz"[: len(sizes)]), tuple(sizes))
    axes = data.draw(st.permutations(grid.axis_names))
    borders = sorted(data.draw(st.integers(0, len(axes))) for _ in range(3))
    first, second, summed = (tuple(axes[a:b]) for a, b in zip((0, *borders), borders, strict=False))
    spec = Spec((first, second), frozenset(summed), reduction="sum" if summed else "")
    tiling = Tiling.from_spec(grid, spec, 2)
    addends = int(np.prod([grid.shape[a] for a in summed]))
    assert tiling.is_partial == (addends > 1)
    assert tiling.num_tiles * tiling.addends * tiling.num_replicas == grid.size
    assignment = tiling.to_tile_assignment()
    again = assignment_of(grid, spec.whole, 2, unreduced=summed)
    if addends == 1:
        assert not tiling.reduction
        return
    assert assignment == again
    assert Tiling.from_tile_assignment(assignment, 2, grid.size) == tiling
    found = spec_from_tile_assignment(grid, assignment)
    assert found.unreduced == {a for a in summed if grid.shape[a] > 1}
    assert Tiling.from_spec(grid, found, 2) == tiling
    order = data.draw(st.permutations(range(grid.size)))
    back = sorted(range(grid.size), key=order.__getitem__)
    assert tiling.reordered(order).reordered(back) == tiling


def test_partial_results_are_no_slices():
    grid = MeshGrid(("x", "y"), (2, 2))
    partial = Tiling.from_spec(grid, Spec((("y",),), frozenset("x"), reduction="max"), 1)
    assert partial.shard_shape((4,)) == (2,)
    assert (partial.num_tiles, partial.addends, partial.num_replicas) == (2, 2, 1)
    assert not partial.is_replicated
    assert partial != Tiling.from_spec(grid, Spec((("y",),)), 1)
    assert partial != Tiling.from_spec(grid, Spec((("y",),), frozenset("x"), reduction="sum"), 1)
    reads = [
        lambda: partial.indices((4,)),
        lambda: partial.indices((4,), [0]),
        lambda: partial.tile_ids(),
        lambda: partial.replica_ids([1]),
        lambda: partial.coordinates(),
        lambda: partial.replicas(0),
    ]
    for read in reads:
        with pytest.raises(TilingError, match="2 partial results.* max"):
            read()


NOT_CUTS = [
    ((4,), []),
    ((4,), [(slice(0, 3),), (slice(3, 4),)]),
    ((4,), [(slice(0, 2),), (slice(1, 3),)]),
    ((5,), [(slice(0, 2),), (slice(2, 4),)]),
    ((4,), [(slice(0, 0),)]),
    ((4,), [(slice(0, 2),), (slice(0, 2),)]),
    ((4,), [(slice(0, 2),), (slice(2, 4),), (slice(2, 4),)]),
    ((4,), [(slice(0, 1),)]),
    ((10**12, 10**12), [(slice(0, 1), slice(0, 1))] * 3),
    ((4,), [(slice(0, 4, 2),)]),
    ((4,), [(0,)]),
    ((4,), [(slice(None), slice(None))]),
    ((4,), [None]),
]


def test_indices_that_are_no_tiling(update_goldens):
    calls = {
        f"{shape}: {indices}": lambda s=shape, i=indices: Tiling.from_indices(s, i)
        for shape, indices in NOT_CUTS
    }
    check_errors(GOLDENS / "not_cuts.txt", calls, TilingError, update=update_goldens)


def test_indices_may_be_written_in_several_ways():
    expected = Tiling.from_spec(MeshGrid(("x",), (2,)), parse_spec([None, "x"]), 3)
    indices = [
        (slice(None), slice(None, -2), slice(0, 9)),
        [slice(0, 3), slice(2, 4, 1)],
    ]
    assert Tiling.from_indices((3, 4, 5), indices) == expected


def test_a_zero_size_counts_as_uncut_in_indices():
    indices = [(slice(0, 0), slice(0, 1)), (slice(None), slice(1, 2))]
    assert Tiling.from_indices((0, 2), indices).counts == (1, 2)


def test_reordered_devices_keep_their_tiles() -> None:
    tiling = Tiling.from_spec(MeshGrid(("x", "y"), (2, 4)), parse_spec(["x", "y"]), 2)
    order = [3, 1, 0, 2, 7, 6, 5, 4]
    again = tiling.reordered(order)
    assert again.tile_ids().tolist() == [tiling.tile_ids().tolist()[p] for p in order]
    assert again.counts == tiling.counts
    back = again.reordered([order.index(p) for p in range(8)])
    assert back == tiling
    with pytest.raises(TilingError, match=r"0 \.\. 7 once"):
        tiling.reordered([0, 0, 1, 2, 3, 4, 5, 6])
