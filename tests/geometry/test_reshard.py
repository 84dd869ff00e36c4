import itertools
import math
import pickle
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.geometry.oracle import all_specs, small_grids
from xlashard.errors import RankError, TilingError
from xlashard.geometry import (
    MeshGrid,
    Piece,
    Spec,
    TileAssignment,
    Tiling,
    parse_spec,
    refine,
    reshard_plan,
    schedule_rounds,
    transfer_load,
)
from xlashard.geometry.intermediate_tilings import intermediate_tilings

GRID = MeshGrid(("x", "y"), (2, 4))
SIX = MeshGrid(("x", "y"), (3, 2))


def tiling_of(*entries, grid=GRID, ndim=2):
    return Tiling.from_spec(grid, parse_spec(entries), ndim)


def check_plan(plan):
    """Execute the plan on real data and check each of its facts."""
    array = np.arange(1, 1 + math.prod(plan.shape)).reshape(plan.shape)
    # The leading `...` keeps a view even of an array without dimensions.
    have, want = (
        {d: (..., *i) for d, i in zip(ids, tiling.indices(plan.shape, uneven=True), strict=True)}
        for tiling, ids in ((plan.src, plan.src_devices), (plan.dst, plan.dst_devices))
    )
    shards = {device: np.zeros_like(array[index]) for device, index in want.items()}
    by_pair = Counter()
    for piece in plan.pieces:
        block = array[have[piece.source]][(..., *piece.source_index)]
        target = shards[piece.destination][(..., *piece.destination_index)]
        assert block.shape == target.shape
        assert block.size > 0
        assert not target.any(), "a piece is brought twice"
        target[...] = block
        assert piece.nbytes == block.size * plan.itemsize
        by_pair[piece.source, piece.destination] += piece.nbytes
    kept = 0
    for device, index in want.items():
        assert np.array_equal(shards[device], array[index])
        if device in have:
            common = np.intersect1d(array[index], array[have[device]]).size * plan.itemsize
            assert by_pair.pop((device, device), 0) == common, "a device is sent what it has"
            kept += common
    moved = sum(by_pair.values())
    assert (plan.bytes_kept, plan.bytes_moved) == (kept, moved)
    assert plan.bytes_by_pair == by_pair
    assert list(plan.pieces) == [p for d in plan.dst_devices for p in plan.pieces_for(d)]


@pytest.mark.slow
@pytest.mark.parametrize("grid", [g for g in small_grids(most=8, axes=2)], ids=str)
def test_plan_between_every_two_specs_of_one_mesh(grid):
    rng = random.Random(str(grid))
    devices = list(range(10, 10 + grid.size))
    for src, dst in itertools.product(all_specs(grid, 2), repeat=2):
        shape = (rng.randint(0, 6), rng.randint(1, 9))
        rng.shuffle(devices)
        tilings = [Tiling.from_spec(grid, spec, 2) for spec in (src, dst)]
        plan = reshard_plan(shape, 4, tilings[0], devices, tilings[1], devices)
        check_plan(plan)
        if src == dst:
            assert plan.bytes_moved == 0
            assert plan.bytes_by_pair == {}


@st.composite
def placed(draw, shape):
    """Draw any tiling, in any device order, on any devices of a small machine."""
    grid = draw(st.sampled_from(small_grids(most=8)))
    spec = draw(st.sampled_from(list(all_specs(grid, len(shape)))))
    tiling = Tiling.from_spec(grid, spec, len(shape))
    devices = draw(st.permutations(range(10)))[: grid.size]
    assignment = tiling.to_tile_assignment()
    if assignment.kind == "tiled" and draw(st.booleans()):
        order = draw(st.permutations(range(grid.size)))
        listed = TileAssignment.listed(assignment.dims, order, assignment.subgroups)
        tiling = Tiling.from_tile_assignment(listed, len(shape))
    return tiling, devices


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_between_any_tilings_on_any_devices(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
    src, dst = data.draw(placed(shape)), data.draw(placed(shape))
    plan = reshard_plan(shape, data.draw(st.sampled_from([1, 2, 8])), *src, *dst)
    check_plan(plan)
    again = reshard_plan(shape, plan.itemsize, *src, *dst)
    assert again == plan
    assert again.pieces == plan.pieces == pickle.loads(pickle.dumps(plan)).pieces


def test_rows_to_columns():
    plan = reshard_plan(
        (8, 8), 4, tiling_of(("x", "y")), range(8), tiling_of(None, ("x", "y")), range(8)
    )
    assert plan.bytes_kept == 8 * 4
    assert plan.bytes_moved == 56 * 4
    assert set(plan.bytes_by_pair.values()) == {4}
    piece = plan.pieces[1]
    assert (piece.destination, piece.source, piece.nbytes) == (0, 1, 4)
    assert piece.destination_index == (slice(1, 2), slice(0, 1))
    assert piece.source_index == (slice(0, 1), slice(0, 1))


def test_copies_of_a_tile_take_turns():
    """Replicas on devices 0..7 serve eight other devices: one piece each."""
    plan = reshard_plan((8, 8), 4, tiling_of(), range(8), tiling_of(), range(8, 16))
    assert Counter(p.source for p in plan.pieces) == Counter(range(8))
    two = reshard_plan((8, 8), 4, tiling_of("y"), range(8), tiling_of(("x", "y")), range(8, 16))
    assert Counter(p.source for p in two.pieces) == Counter(range(8))


def test_replicas_kept_in_place_do_not_skew_the_senders():
    """Half of the target devices have the tile; the other half is shared evenly all the same."""
    rows = MeshGrid(("x",), (4,))
    whole = Tiling.replicated(4, 1)
    plan = reshard_plan((4,), 1, whole, [0, 1, 2, 3], Tiling.replicated(8, 1), range(8))
    assert plan.bytes_kept == 16
    assert Counter(source for source, _ in plan.bytes_by_pair) == Counter(range(4))
    finer = Tiling.from_spec(rows, Spec((("x",),)), 1)
    interleaved = [0, 10, 1, 11, 2, 12, 3, 13]
    plan = reshard_plan((4,), 1, finer, [0, 1, 2, 3], Tiling.replicated(8, 1), interleaved)
    assert plan.bytes_kept == 4
    assert plan.bytes_moved == 28
    sent = Counter()
    for (source, _), nbytes in plan.bytes_by_pair.items():
        sent[source] += nbytes
    assert set(sent.values()) == {7}


@pytest.mark.slow
@given(st.permutations(range(12)), st.permutations(range(12)), st.integers(1, 12))
def test_replicas_of_a_tile_share_the_sends_evenly(src_order, dst_order, takers):
    src = Tiling.replicated(5, 1)
    plan = reshard_plan(
        (3,), 1, src, src_order[:5], Tiling.replicated(takers, 1), dst_order[:takers]
    )
    sent = Counter(p.source for p in plan.pieces if p.source != p.destination)
    asked = sum(d not in src_order[:5] for d in dst_order[:takers])
    assert sum(sent.values()) == asked
    assert max(sent.values(), default=0) <= -(-asked // 5)


def test_pieces_for_one_device_do_not_enumerate_the_pod():
    grid = MeshGrid(("x", "y"), (2**8, 2**8))
    src = Tiling.from_spec(grid, parse_spec([("x", "y")]), 2)
    dst = Tiling.from_spec(grid, parse_spec(["x", "y"]), 2)
    devices = range(grid.size)
    plan = reshard_plan((2**16, 2**8), 2, src, devices, dst, devices)
    # A device's own row crosses its own column tile in one element.
    assert plan.bytes_kept == grid.size * 2
    assert plan.bytes_moved == (2**24 - 2**16) * 2
    pieces = plan.pieces_for(259)
    assert len(pieces) == 2**8
    assert [p.source for p in pieces[:4]] == [256, 257, 258, 259]


def test_empty_arrays_move_nothing():
    plan = reshard_plan((0, 4), 4, tiling_of("x"), range(8), tiling_of(None, "y"), range(8, 16))
    assert (plan.pieces, plan.bytes_moved, plan.bytes_kept) == ((), 0, 0)


@pytest.mark.parametrize(
    ("src_devices", "dst_devices", "words"),
    [
        (range(7), range(8), "7 source devices.* 8"),
        (range(8), range(9), "9 destination devices.* 8"),
        ([0] * 8, range(8), r"source .*\[0, 0"),
        (range(8), [*range(7), 0], r"destination .*, 6, 0\]"),
    ],
)
def test_devices_that_do_not_fit(src_devices, dst_devices, words):
    with pytest.raises(TilingError, match=words):
        reshard_plan((8, 8), 4, tiling_of("x"), src_devices, tiling_of("y"), dst_devices)


def test_errors_of_rank_and_device():
    with pytest.raises(RankError):
        reshard_plan((8,), 4, tiling_of("x"), range(8), tiling_of("y"), range(8))
    plan = reshard_plan((8, 8), 4, tiling_of("x"), range(8), tiling_of("y"), range(8))
    with pytest.raises(TilingError, match="device 9 .*destination"):
        plan.pieces_for(9)


@st.composite
def moves(draw: st.DrawFn) -> list[Piece]:
    """Draw the pieces between two lists of devices, some of them the same."""
    before, after = (draw(st.sampled_from([1, 2, 3, 4, 6, 8])) for _ in "st")
    shift = draw(st.integers(0, 8))
    tilings = []
    for count in (before, after):
        cut = draw(st.booleans())
        steps = ((count, 1),) if cut and count > 1 else ()
        whole = Tiling.replicated(count, 2)
        tilings.append(Tiling((count, 1), count, steps) if cut else whole)
    devices = [list(range(before)), list(range(shift, shift + after))]
    plan = reshard_plan((24, 2), 4, tilings[0], devices[0], tilings[1], devices[1])
    return [piece for piece in plan.pieces if piece.source != piece.destination]


@pytest.mark.slow
@given(moves())
def test_rounds_send_every_piece_once_and_one_per_device(pieces: list[Piece]) -> None:
    rounds = schedule_rounds(pieces)
    gone = [piece for one in rounds for piece in one.by_sender.values()]
    assert sorted(map(repr, gone)) == sorted(map(repr, pieces))
    for one in rounds:
        assert one.by_sender and len(one.by_sender) == len(one.by_receiver)
        takers = one.permutation()
        assert sorted(takers) == list(one.devices)
        for device, taker in zip(one.devices, takers, strict=True):
            if device in one.by_sender:
                assert one.by_sender[device].destination == taker
                assert one.by_receiver[taker] is one.by_sender[device]
        for piece in one.by_sender.values():
            assert one.shape == tuple(s.stop - s.start for s in piece.source_index)


def test_rows_to_columns_take_one_round_per_piece_of_a_shard() -> None:
    rows, columns = Tiling((4, 1), 4, ((4, 1),)), Tiling((1, 4), 4, ((4, 1),))
    plan = reshard_plan((8, 8), 4, rows, range(4), columns, range(4, 8))
    assert len(schedule_rounds(plan.pieces)) == 4


@pytest.mark.slow
@given(
    st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3),
    st.sampled_from([1, 2, 3, 4]),
    st.lists(st.sampled_from([1, 2, 3, 5, 8]), min_size=3, max_size=3),
    st.sampled_from([1, 2, 4, 6, 8, 24]),
)
def test_refined_tiles_subdivide_the_original_tiles(
    counts: list[int], copies: int, extents: list[int], devices: int
) -> None:
    count = math.prod(counts)
    shape = [k * n for k, n in zip(counts, extents, strict=False)]
    tiling = Tiling.from_indices(
        tuple(shape),
        Tiling(tuple(counts), count, ((count, 1),) if count > 1 else ()).indices(shape),
    )
    fine = refine(tiling, shape, devices)
    if fine is None:
        assert devices % count or _fits_nowhere(devices // count, extents[: len(counts)])
        return
    assert fine.num_tiles == fine.num_devices == devices
    assert all(n % k == 0 for n, k in zip(shape, fine.counts, strict=True))
    assert all(new % old == 0 for new, old in zip(fine.counts, tiling.counts, strict=True))


def _fits_nowhere(parts: int, extents: list[int]) -> bool:
    """Return whether a prime factor occurs more often than in all extents together."""
    twos, threes = ([_power(n, prime) for n in (parts, math.prod(extents))] for prime in (2, 3))
    return twos[0] > twos[1] or threes[0] > threes[1]


def _power(number: int, prime: int) -> int:
    return 0 if number % prime else 1 + _power(number // prime, prime)


def test_transfer_load_of_the_busiest_device() -> None:
    rows, columns = Tiling((8, 1), 8, ((8, 1),)), Tiling((1, 4), 4, ((4, 1),))
    assert transfer_load((8, 8), rows, columns).rounds == 8
    assert (
        transfer_load((8, 8), Tiling.replicated(1, 2), Tiling.replicated(8, 2)).elements == 8 * 64
    )
    assert transfer_load((8, 8), rows, rows).rounds == 1


@given(st.data())
def test_tilings_in_between_are_one_kind_of_collective_apart(data: st.DataObject) -> None:
    grid = data.draw(st.sampled_from([GRID, MeshGrid(("a", "b", "c"), (2, 2, 2)), SIX]))
    ndim = data.draw(st.integers(1, 3))
    specs = st.sampled_from(list(all_specs(grid, ndim)))
    ends = [Tiling.from_spec(grid, data.draw(specs), ndim) for _ in range(2)]
    steps = [ends[0], *intermediate_tilings(*ends), ends[1]]
    shape = list(map(math.lcm, *(end.counts for end in ends)))
    least = min(end.num_tiles for end in ends)
    for step in steps:
        assert step.num_tiles >= least or grid is SIX  # 3 tiles and 2 have no common refinement
        assert not any(n % count for n, count in zip(shape, step.counts, strict=True))
    for before, after in itertools.pairwise(steps):
        assert _collectives(before, after) <= 1, (before, after)


def _collectives(before: Tiling, after: Tiling) -> int:
    """Return the number of collectives that lead from one tiling to another."""
    if before.counts == after.counts:
        return 1
    changed = [a > b for a, b in zip(before.counts, after.counts, strict=True) if a != b]
    gathers = all(changed)
    slices = not any(changed)
    if gathers or slices:
        pairs = set(zip(before.tile_ids().tolist(), after.tile_ids().tolist(), strict=True))
        return 1 + (len(pairs) != max(before.num_tiles, after.num_tiles))
    return 1 if before.num_tiles == after.num_tiles and len(changed) == 2 else 2


def test_tilings_in_between_of_other_digits_are_left_to_the_compiler() -> None:
    listed = Tiling((2, 2), 4, listed=(0, 3, 1, 2))
    assert intermediate_tilings(listed, Tiling((4, 1), 4, ((4, 1),))) == []
