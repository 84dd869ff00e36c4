"""All meshes of a number of devices within given axis sizes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.message_patterns import naming
from xlashard.errors import ArgumentError, counted
from xlashard.predict.sweep.axis_ranges import AxisRange, factorisations, parse_axes, read_axes


def brute_force(count, ranges):
    """Return all meshes, by trying every size of every axis."""
    if not ranges:
        return {()} if count == 1 else set()
    return {
        (size, *others)
        for size in range(1, count + 1)
        if count % size == 0 and size in ranges[0]
        for others in brute_force(count // size, ranges[1:])
    }


RANGES = st.builds(
    lambda least, more: AxisRange(least, None if more is None else least + more),
    st.integers(1, 8),
    st.none() | st.integers(0, 16),
)


@given(st.integers(1, 96), st.lists(RANGES, min_size=1, max_size=4))
def test_meshes_equal_brute_force_without_duplicates(count, ranges):
    axes = {f"axis{i}": sizes for i, sizes in enumerate(ranges)}
    expected = brute_force(count, ranges)
    if not expected:
        with pytest.raises(ArgumentError, match=f"has {counted(count, 'device')}"):
            factorisations(count, axes)
        return
    found = [tuple(sizes.values()) for sizes in factorisations(count, axes)]
    assert len(found) == len(set(found)) and set(found) == expected


def test_large_windows_match_the_formula():
    # 4096 = 2^12 over three axes: 14 choose 2.
    found = factorisations(4096, read_axes({"data": "auto", "fsdp": "auto", "tensor": "auto"}))
    assert len(found) == math.comb(14, 2)
    assert list(found[0].items()) == [("data", 4096), ("fsdp", 1), ("tensor", 1)]


def test_fixed_and_bounded_axis_sizes_are_parsed():
    axes = parse_axes("data=auto, tensor=2..4,expert=2")
    assert [str(sizes) for sizes in axes.values()] == ["auto", "2..4", "2"]
    assert factorisations(16, axes) == (
        {"data": 4, "tensor": 2, "expert": 2},
        {"data": 2, "tensor": 4, "expert": 2},
    )
    assert str(AxisRange(1, 8)) == "..8" and str(AxisRange(3)) == "3.."
    assert read_axes({"a": 3, "b": "4", "c": AxisRange(2)}) == {
        "a": AxisRange(3, 3),
        "b": AxisRange(4, 4),
        "c": AxisRange(2),
    }


WRONG = {
    "no size": ("data", "'data' is not NAME=SIZE"),
    "twice": ("data=2,data=4", "'data=4' is not NAME=SIZE"),
    "a word": ("data=many", r"mesh axis 'data' has the invalid size 'many'.*data=2\.\.8"),
    "zero": ("data=0", "has the invalid size '0'"),
    "nothing": ("data=..", r"has the invalid size '\.\.'"),
    "backwards": ("data=8..2", "sizes, 8 to 2"),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_invalid_axis_sizes_are_refused(text, message):
    with pytest.raises(ArgumentError, match=message):
        parse_axes(text)


@pytest.mark.parametrize("axes", [{}, None, "auto", {"data": 0}, {"data": True}, {"data": 1.5}])
def test_invalid_axes_are_refused(axes):
    facts = ("'data'", repr(axes["data"])) if axes and axes != "auto" else (f"mesh={axes!r}",)
    with pytest.raises(ArgumentError, match=naming(*facts)):
        read_axes(axes)


def test_impossible_axis_sizes_are_refused():
    with pytest.raises(ArgumentError, match=naming("data=auto, tensor=3", "16 devices")):
        factorisations(16, parse_axes("data=auto,tensor=3"))
