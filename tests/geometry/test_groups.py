import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.geometry.oracle import grid_id, small_grids
from xlashard.errors import GroupTextError
from xlashard.geometry import MeshGrid
from xlashard.geometry.groups import ReplicaGroups, SourceTargetPairs, read_groups, read_pairs


def axes_text(groups, grid):
    """Return the axes as text, or None."""
    parts = groups.axes(grid)
    return None if parts is None else ", ".join(map(str, parts))


def factors(number):
    """Yield every factorisation of a number into ordered factors from 2 on."""
    if number == 1:
        return [()]
    return [
        (first, *rest)
        for first in range(2, number + 1)
        if number % first == 0
        for rest in factors(number // first)
    ]


def all_axis_groups(grid):
    """Return every grouping along parts of axes, by enumeration: text of the axes -> groups."""
    found = {}
    for cut in itertools.product(*map(factors, grid.axis_sizes)):
        digits = [
            (name, math.prod(cuts[:i]), size)
            for name, cuts in zip(grid.axis_names, cut, strict=True)
            for i, size in enumerate(cuts)
        ]
        sizes = [size for _, _, size in digits]
        for chosen in itertools.product([False, True], repeat=len(digits)):
            groups = {}
            for position, coordinates in enumerate(np.ndindex(*sizes)):
                still = tuple(c for c, is_in in zip(coordinates, chosen, strict=True) if not is_in)
                groups.setdefault(still, []).append(position)
            found.setdefault(
                frozenset(map(frozenset, groups.values())), _text(digits, chosen, grid)
            )
    return found


def _text(digits, chosen, grid):
    """Return the shortest text of chosen digits: neighbours in one axis are one part."""
    parts = []
    for (name, before, size), is_in in zip(digits, chosen, strict=True):
        if not is_in:
            continue
        if parts and parts[-1][0] == name and parts[-1][1] * parts[-1][2] == before:
            parts[-1] = (name, parts[-1][1], parts[-1][2] * size)
        else:
            parts.append((name, before, size))
    shape = grid.shape
    return ", ".join(n if s == shape[n] else f"{n}:({b}){s}" for n, b, s in parts)


@pytest.mark.parametrize("grid", small_grids(most=12, biggest=6), ids=grid_id)
def test_axes_of_groups_do_not_depend_on_listing_order(grid):
    rng = np.random.default_rng(0)
    for groups, text in all_axis_groups(grid).items():
        rows = [rng.permutation(sorted(group)).tolist() for group in groups]
        rng.shuffle(rows)
        assert axes_text(ReplicaGroups.of_list(rows), grid) == text


@pytest.mark.slow
@given(st.sampled_from(small_grids(most=8)), st.data())
def test_groups_that_match_no_axes(grid, data):
    order = data.draw(st.permutations(range(grid.size)))
    size = data.draw(st.sampled_from([d for d in range(1, grid.size + 1) if grid.size % d == 0]))
    rows = [order[i : i + size] for i in range(0, grid.size, size)]
    known = all_axis_groups(grid)
    assert axes_text(ReplicaGroups.of_list(rows), grid) == known.get(
        frozenset(map(frozenset, rows))
    )


@st.composite
def iota_groups(draw):
    dims = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda d: math.prod(d) <= 24)
    )
    count = math.prod(dims)
    size = draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0]))
    return count // size, size, tuple(dims), tuple(draw(st.permutations(range(len(dims)))))


def rows_of(count, size, dims, perm):
    return np.arange(count * size).reshape(dims).transpose(perm).reshape(count, size).tolist()


@pytest.mark.slow
@given(iota_groups(), st.data())
def test_iota_groups_equal_their_explicit_list(groups, data):
    count, size, dims, perm = groups
    rows = rows_of(*groups)
    found = ReplicaGroups.iota(count, size, dims, perm)
    assert [list(group) for group in found.devices()] == rows
    shapes = [s for s in itertools.product(range(1, 7), repeat=3) if math.prod(s) == count * size]
    shapes.append((1, 1, count * size))
    grid = MeshGrid(("x", "y", "z"), data.draw(st.sampled_from(shapes)))
    assert axes_text(found, grid) == axes_text(ReplicaGroups.of_list(rows), grid)


@pytest.mark.slow
@given(iota_groups())
def test_text_of_iota_groups_is_parsed_as_in_hlo(groups):
    count, size, dims, perm = groups
    comma = ",".join
    text = (
        f"[{count},{size}]<=[{comma(map(str, dims))}]T({comma(map(str, perm))}), dimensions={{0}}"
    )
    assert [list(group) for group in read_groups(text, 1).devices()] == rows_of(*groups)


TEXTS = [
    ("{{0,1,2,3},{4,5,6,7}}", "y"),
    ("{{0,4},{1,5},{2,6},{3,7}}, use_global_device_ids=true", "x"),
    ("{{0,1},{2,3},{4,5},{6,7}}", "y:(2)2"),
    ("{{0,2},{1,3},{4,6},{5,7}}", "y:(1)2"),
    ("{{0,5},{1,4},{2,6},{3,7}}", None),
    ("{{0,1},{2,3}}", None),
    ("{{0,1,2},{3,4},{5,6,7}}", None),
    ("{}", "x, y"),
    ("[2,4]<=[8]", "y"),
    ("[4,2]<=[2,4]T(1,0)", "x"),
    ("[4,2]<=[2,2,2]T(0,2,1)", "y:(1)2"),
    ("[1,8]<=[8]", "x, y"),
    ("[8,1]<=[8]", ""),
    ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", "y"),
    ("mesh['data'=2,'model'=4] {'data','model'}", "x, y"),
    ("mesh['a'=8] {'a':(1)2}", "x"),
    ("mesh['a'=8] {'a':(1)2,'a':(4)2}", "x, y:(2)2"),
    ("mesh['a'=2,'b'=4] {}", ""),
    ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", "x"),
    ("mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'a'}", "y"),
]


@pytest.mark.parametrize(("text", "axes"), TEXTS)
def test_every_writing_of_groups_is_read_and_named_by_axes(text, axes):
    assert axes_text(read_groups(text, 8), MeshGrid(("x", "y"), (2, 4))) == axes


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("mesh['a'=2,'b'=2] {'b','a'}", [[0, 1, 2, 3]]),
        ("mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}", [[0, 4, 1, 5], [2, 6, 3, 7]]),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_groups_in_mesh_axes_form_are_expanded(text, devices):
    assert [list(group) for group in read_groups(text, 8).devices()] == devices


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("", "expected replica groups at the start of ''"),
        ("channel_id=1", "'channel_id=1'"),
        ("{{0,1},{1,2}}", "disjoint"),
        ("[2,4]<=[2,3]", "reshape dims [2, 3] hold 6 devices"),
        ("mesh['a'=2] {'b'}", "no axis 'b'"),
        ("mesh['a'=4] {'a':(3)2}", "axis 'a' of 4 lacks this part"),
        ("mesh['a'=4], device_ids=(0,1) {'a'}", "2 devices for a mesh of 4"),
    ],
)
def test_text_that_is_no_groups_is_refused(text, fact):
    with pytest.raises(GroupTextError) as caught:
        read_groups(text, 8)
    assert fact in str(caught.value)


@pytest.mark.parametrize("text", ["", "{{0,1,2}}", "{{0},{1}}"])
def test_text_that_is_no_pairs_is_refused(text):
    with pytest.raises(GroupTextError, match=re.escape(repr(text))):
        read_pairs(text)


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        # A ring along each axis, one step along both, and neighbours in half an axis.
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", "y"),
        ("{{0,4},{4,0}}", "x"),
        ("{{0,5},{1,6},{2,7},{3,4}}", "x, y"),
        ("{{0,1},{1,0},{2,3},{3,2}}", "y:(2)2"),
        ("{{0,2},{2,0},{1,3},{3,1}}", "y:(1)2"),
        ("{{3,3}}", ""),
        ("{}", ""),
        ("{{0,8}}", None),
    ],
)
def test_source_target_pairs_are_named_by_their_axes(pairs, axes):
    assert axes_text(read_pairs(pairs), MeshGrid(("x", "y"), (2, 4))) == axes


@settings(max_examples=50)
@given(st.sampled_from(small_grids(most=16)), st.data())
def test_pairs_run_along_exactly_the_axes_in_which_a_coordinate_changes(grid, data):
    device = st.integers(0, grid.size - 1)
    pairs = data.draw(st.lists(st.tuples(device, device), min_size=1, max_size=6))
    names = [part.name for part in SourceTargetPairs(tuple(pairs)).axes(grid)]
    where = np.indices(grid.axis_sizes).reshape(len(grid.axis_sizes), -1)
    changed = [(where[:, s] != where[:, t]) for s, t in pairs]
    assert names == [n for n, c in zip(grid.axis_names, np.any(changed, axis=0), strict=True) if c]


def test_groups_of_a_formula_are_never_listed():
    # 10^15 devices: only a closed form returns in time.
    grid = MeshGrid(("x", "y", "z"), (10**5, 10**5, 10**5))
    groups = read_groups(f"[{10**10},{10**5}]<=[{10**5},{10**5},{10**5}]T(0,2,1)", 1)
    assert axes_text(groups, grid) == "y"
    assert str(groups) == "10,000,000,000 groups of 100,000 devices"


@pytest.mark.parametrize(
    ("targets", "size"),
    [
        ((1, 2, 3, 0), 4),
        ((3, 0, 1, 2), 4),
        ((2, 3, 0, 1), 2),
        ((0, 2, 1, 3), 0),
        ((0, 1, 2, 3), 0),
        ((1, 2, 0, 3), 0),
        ((1, 2, 3), 0),
        ((), 0),
    ],
)
def test_pairs_are_rings_if_all_cycles_have_one_size(targets, size):
    assert SourceTargetPairs(tuple(enumerate(targets))).ring_size == size
