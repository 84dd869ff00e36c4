import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.geometry.oracle import coordinates_of, grid_id, small_grids
from xlashard.errors import BoxError, GridError
from xlashard.geometry import Box, MeshGrid


def test_describe():
    grid = MeshGrid(("data", "model"), (2, 4))
    assert grid.size == 8
    assert dict(grid.shape) == {"data": 2, "model": 4}
    assert list(grid.shape) == ["data", "model"]
    assert grid == MeshGrid(["data", "model"], np.array([2, 4]))
    assert hash(grid) == hash(pickle.loads(pickle.dumps(grid)))
    assert MeshGrid((), ()).size == 1


@pytest.mark.parametrize(
    ("names", "sizes", "words"),
    [
        (("x",), (2, 3), "1 axis names"),
        (("x", "x"), (2, 3), "repeats"),
        (("x", "y"), (2, 0), "'y' has size 0"),
    ],
)
def test_errors_of_invalid_grids(names, sizes, words):
    with pytest.raises(GridError, match=words):
        MeshGrid(names, sizes)


@pytest.mark.parametrize("grid", small_grids(), ids=grid_id)
def test_coordinates(grid):
    expected = [tuple(coordinates_of(grid, p).values()) for p in range(grid.size)]
    everything = grid.coordinates(np.arange(grid.size))
    assert everything.tolist() == [list(c) for c in expected]
    assert grid.coordinates(grid.size - 1).tolist() == list(expected[-1])
    assert grid.coordinates(np.zeros((2, 3), int)).shape == (2, 3, len(grid.axis_names))


def test_coordinates_of_a_mesh_without_axes():
    assert MeshGrid((), ()).coordinates([0, 0]).shape == (2, 0)


@pytest.mark.parametrize("position", [-1, 8, [0, 9]])
def test_positions_outside(position):
    with pytest.raises(GridError, match=r"outside 0\.\.7"):
        MeshGrid(("x", "y"), (2, 4)).coordinates(position)


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2, 2), (3, 1, 3)], ids=str)
def test_local_box_is_found_exactly_for_boxes(sizes):
    grid = MeshGrid(("x", "y", "z")[: len(sizes)], sizes)
    spans = [
        [(low, high) for low in range(size) for high in range(low + 1, size + 1)] for size in sizes
    ]
    boxes = {}
    for span in itertools.product(*spans):
        inside = frozenset(
            p
            for p in range(grid.size)
            if all(
                low <= c < high
                for (low, high), c in zip(span, coordinates_of(grid, p).values(), strict=True)
            )
        )
        boxes[inside] = (tuple(s[0] for s in span), tuple(s[1] - s[0] for s in span))
    for count in range(1, grid.size + 1):
        for subset in itertools.combinations(range(grid.size), count):
            box = boxes.get(frozenset(subset))
            if box is None:
                with pytest.raises(BoxError):
                    grid.local_box(subset)
                continue
            assert grid.local_box(subset) == box
            assert grid.local_box(list(reversed(subset))) == Box(*box)


def test_errors_of_positions_that_form_no_box():
    grid = MeshGrid(("x", "y"), (2, 4))
    with pytest.raises(BoxError, match="no device positions"):
        grid.local_box([])
    with pytest.raises(BoxError, match="repeats"):
        grid.local_box([1, 1])
    with pytest.raises(BoxError) as caught:
        grid.local_box([1, 2, 5])
    for word in ("3 devices", "'x' 0..1", "'y' 1..2", "a box of 4", "'x'=1, 'y'=2"):
        assert word in str(caught.value)
    with pytest.raises(GridError, match="position 8"):
        grid.local_box([8])


def test_a_box_in_a_pod_is_found_without_counting_the_pod():
    grid = MeshGrid(("x", "y"), (2**20, 2**20))
    at = 5 * 2**20 + 7
    assert grid.local_box([at, at + 1, at + 2**20, at + 2**20 + 1]) == ((5, 7), (2, 2))


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    owners=st.lists(st.integers(0, 2), min_size=27, max_size=27),
)
def test_boxes_of_all_owners_equal_each_local_box(sizes, owners):
    grid = MeshGrid(("x", "y", "z")[: len(sizes)], tuple(sizes))
    owners = owners[: grid.size]
    boxes = grid.boxes_of(owners)
    assert list(boxes) == sorted(set(owners))
    for owner, box in boxes.items():
        mine = [position for position, other in enumerate(owners) if other == owner]
        if box is not None:
            assert box == grid.local_box(mine)
            continue
        with pytest.raises(BoxError, match=r"\d devices.* box of \d"):
            grid.local_box(mine)


def test_boxes_need_an_owner_for_each_device():
    with pytest.raises(GridError, match="3 .* 4 devices of 'x'=2, 'y'=2"):
        MeshGrid(("x", "y"), (2, 2)).boxes_of([0, 0, 1])
