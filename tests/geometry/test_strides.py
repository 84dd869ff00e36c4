import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlashard.errors import GridError
from xlashard.geometry import strides

sizes = st.lists(st.integers(1, 4), max_size=4)


@st.composite
def placements(draw):
    """Draw digits that reach every position from 0 on equally often, in any order."""
    moving = draw(sizes)
    digits = list(zip(moving, strides.row_major(moving), strict=True))
    digits += [(size, 0) for size in draw(st.lists(st.integers(1, 3), max_size=2))]
    return tuple(draw(st.permutations(digits)))


def places(steps):
    """Return the sum of digit times stride, by plain counting."""
    return [
        sum(digit * stride for digit, (_, stride) in zip(digits, steps, strict=True))
        for digits in np.ndindex(*(size for size, _ in steps))
    ]


@given(sizes)
def test_row_major_strides_equal_numpy(sizes):
    dense = np.empty(sizes, np.int8)
    numpys = [stride for stride, size in zip(dense.strides, sizes, strict=True) if size > 1]
    ours = [s for s, size in zip(strides.row_major(sizes), sizes, strict=True) if size > 1]
    assert ours == numpys


@pytest.mark.slow
@given(placements())
def test_place_and_place_all_agree(steps):
    expected = places(steps)
    assert strides.place_all(steps).tolist() == expected
    assert [strides.place(steps, p) for p in range(len(expected))] == expected
    assert strides.place(steps, np.arange(len(expected))).tolist() == expected


@pytest.mark.slow
@given(placements())
def test_merged_steps_are_canonical_and_found_from_places(steps):
    merged = strides.merge(steps)
    assert places(merged) == places(steps)
    assert strides.merge(merged) == merged
    assert strides.find(np.array(places(steps))) == merged


@given(st.permutations(range(6)))
def test_find_returns_none_without_steps(order):
    found = strides.find(np.array(order))
    if found is not None:
        assert places(found) == order
        return
    # Every order of 6 positions that digits can produce, written out.
    assert order not in ([0, 1, 2, 3, 4, 5], [0, 2, 4, 1, 3, 5], [0, 3, 1, 4, 2, 5])


@pytest.mark.slow
@given(placements())
def test_copies_are_numbered_in_the_order_of_positions(steps):
    expected = places(steps)
    numbers = strides.place_all(strides.copies(steps)).tolist()
    assert numbers == [expected[:i].count(place) for i, place in enumerate(expected)]


@pytest.mark.slow
@given(placements(), st.data())
def test_split_groups_steps_or_returns_none(steps, data):
    total = len(places(steps))
    wanted = []
    while total > 1:
        wanted.append(data.draw(st.sampled_from([d for d in range(2, total + 1) if not total % d])))
        total //= wanted[-1]
    groups = strides.split(strides.merge(steps), wanted)
    if groups is None:
        assert len(wanted) > 1
        return
    assert [len(places(group)) for group in groups] == wanted
    assert places([step for group in groups for step in group]) == places(steps)


def test_split_across_the_borders_of_steps():
    assert strides.split(((6, 1),), (2, 3)) == [((2, 3),), ((3, 1),)]
    assert strides.split(((2, 3), (3, 1)), (3, 2)) is None
    assert strides.split(((4, 1),), (1, 4, 1)) == [(), ((4, 1),), ()]


def test_numbering_of_few_and_of_all_positions_agrees():
    number = strides.Numbering(64, strides.merge([(8, 1), (8, 8)]))
    everything = number.all.tolist()
    assert number.few([9, 0]) == [everything[9], everything[0]]
    assert number.few(range(64)) == number.at(np.arange(64)).tolist() == everything
    for ask in (number.few, number.at):
        with pytest.raises(GridError, match=r"position 64 is outside 0\.\.63"):
            ask([0, 64])
        with pytest.raises(GridError, match=r"position -1"):
            ask([-1])
