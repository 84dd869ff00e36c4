"""Pieces dealt out to rounds, and tiles cut further."""

import math

from hypothesis import given
from hypothesis import strategies as st

from xlashard.geometry import Piece, Tiling, refine, reshard_plan, schedule_rounds, transfer_load


@st.composite
def moves(draw: st.DrawFn) -> list[Piece]:
    """The pieces between two lists of devices, some of them the same."""
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


@given(moves())
def test_every_piece_goes_once_and_no_device_has_two_transfers(pieces: list[Piece]) -> None:
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


def test_rows_to_columns_take_as_many_rounds_as_there_are_pieces_of_a_shard() -> None:
    rows, columns = Tiling((4, 1), 4, ((4, 1),)), Tiling((1, 4), 4, ((4, 1),))
    plan = reshard_plan((8, 8), 4, rows, range(4), columns, range(4, 8))
    assert len(schedule_rounds(plan.pieces)) == 4


@given(
    st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3),
    st.sampled_from([1, 2, 3, 4]),
    st.lists(st.sampled_from([1, 2, 3, 5, 8]), min_size=3, max_size=3),
    st.sampled_from([1, 2, 4, 6, 8, 24]),
)
def test_refined_tiles_are_parts_of_the_others(
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
    """Whether a prime factor is there more often than in all extents together."""
    twos, threes = ([_power(n, prime) for n in (parts, math.prod(extents))] for prime in (2, 3))
    return twos[0] > twos[1] or threes[0] > threes[1]


def _power(number: int, prime: int) -> int:
    return 0 if number % prime else 1 + _power(number // prime, prime)


def test_what_the_busiest_device_has_to_do() -> None:
    rows, columns = Tiling((8, 1), 8, ((8, 1),)), Tiling((1, 4), 4, ((4, 1),))
    assert transfer_load((8, 8), rows, columns).rounds == 8
    assert (
        transfer_load((8, 8), Tiling.replicated(1, 2), Tiling.replicated(8, 2)).elements == 8 * 64
    )
    assert transfer_load((8, 8), rows, rows).rounds == 1
