"""Mesh axes from the order of devices."""

import itertools

import numpy as np
import pytest

from tests.geometry.oracle import grid_id, small_grids
from xlashard.errors import TilingError
from xlashard.legacy.shardings.superdims import (
    explode_superdims,
    strides_for_sizes,
    unflatten_array,
    unflatten_superdims,
)


def test_strides_of_sizes():
    assert strides_for_sizes([2, 3, 4]).tolist() == [12, 4, 1]
    assert strides_for_sizes(np.array([5])).tolist() == [1]
    assert strides_for_sizes([]).tolist() == []


@pytest.mark.parametrize("grid", small_grids(most=24, biggest=4), ids=grid_id)
def test_the_order_of_axes_is_read_from_devices(grid):
    for order in itertools.permutations(grid.axis_names):
        mesh = np.arange(grid.size).reshape(grid.axis_sizes)
        assignment = mesh.transpose([grid.axis_names.index(a) for a in order]).reshape(-1)
        expected = [axis for axis in order if grid.shape[axis] > 1]
        assert unflatten_array(grid.shape, assignment) == expected

        digits = unflatten_superdims(assignment)
        rebuilt = np.zeros(1, int)
        for size, stride in reversed(digits):
            rebuilt = (rebuilt[:, None] + np.arange(size) * stride).reshape(-1)
        assert rebuilt.tolist() == assignment.tolist()
        exploded = explode_superdims(grid.axis_sizes, digits)
        assert exploded == [
            (grid.shape[axis], int(strides_for_sizes(grid.axis_sizes)[grid.axis_names.index(axis)]))
            for axis in expected
        ]


def test_superdims_of_orders_and_their_splits():
    assert unflatten_superdims(np.arange(12)) == [(12, 1)]
    assert unflatten_superdims([0, 3, 1, 4, 2, 5]) == [(2, 3), (3, 1)]
    assert unflatten_superdims([0]) == []
    assert explode_superdims([2, 3], [(6, 1)]) == [(2, 3), (3, 1)]
    assert explode_superdims([2, 1, 3], [(2, 3), (3, 1)]) == [(3, 1), (2, 3)]


@pytest.mark.parametrize("assignment", [[], [1, 0], [0, 2, 1], [0, 1, 3, 2], [0, 2, 3, 1]])
def test_devices_in_no_transposed_order(assignment):
    for kind in (TilingError, NotImplementedError):
        with pytest.raises(kind, match="order of the devices"):
            unflatten_superdims(assignment)


def test_digits_across_axes():
    with pytest.raises(TilingError, match=r"2 devices.* stride [13].*\((2, 4|4, 2)\)"):
        explode_superdims([2, 4], [(2, 1), (4, 2)])
    with pytest.raises(TilingError, match=r"2 devices.* stride [13].*\((2, 4|4, 2)\)"):
        explode_superdims([4, 2], [(2, 3)])
    with pytest.raises(TilingError, match="3 devices.* 4"):
        unflatten_array({"x": 2, "y": 2}, [0, 1, 2])
