"""Mesh axes, inferred from the order of devices in an assignment."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from xlashard.errors import TilingError
from xlashard.geometry import strides
from xlashard.legacy.historic_errors import DeviceOrderError


def unflatten_array(named_sizes: Mapping[str, int], assignment: Sequence[int]) -> list[str]:
    """Return the order of mesh axes behind a device assignment.

    Args:
        named_sizes: Mesh axes and sizes, major to minor.
        assignment: Devices, in the order of a flattened transposition of the mesh.

    Returns:
        Axis names, major to minor, without those of size 1.

    Raises:
        TilingError: The order is not that of a transposed mesh.

    Example:
        >>> unflatten_array({"x": 2, "y": 3}, [0, 3, 1, 4, 2, 5])
        ['y', 'x']
    """
    sizes = list(named_sizes.values())
    if len(assignment) != math.prod(sizes):
        raise TilingError(
            f"{len(assignment)} devices are assigned, the axes {dict(named_sizes)} have "
            f"{math.prod(sizes)}"
        )
    names = {
        (size, stride): name
        for (name, size), stride in zip(named_sizes.items(), strides.row_major(sizes), strict=True)
        if size > 1
    }
    return [names[dim] for dim in explode_superdims(sizes, unflatten_superdims(assignment))]


def unflatten_superdims(assignment: Sequence[int]) -> list[tuple[int, int]]:
    """Return the fewest `(size, stride)` digits that count out an assignment, minor to major.

    Raises:
        DeviceOrderError: No digits do; it is a `NotImplementedError` too.

    Example:
        >>> unflatten_superdims([0, 3, 1, 4, 2, 5])
        [(2, 3), (3, 1)]
    """
    steps = strides.find(np.asarray(assignment, np.int64).reshape(-1))
    if steps is None:
        raise DeviceOrderError("the order of the devices is not that of a transposed mesh")
    return list(reversed(steps))


def explode_superdims(
    sizes: Sequence[int], dims: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Cut digits that span several mesh axes into one digit per axis.

    Args:
        sizes: Sizes of the mesh axes, major to minor.
        dims: `(size, stride)` digits, minor to major, as `unflatten_superdims` returns them.

    Returns:
        `(size, stride)` of each axis, major to minor.

    Raises:
        TilingError: A digit would need a part of an axis.

    Example:
        >>> explode_superdims([2, 3], [(6, 1)])
        [(2, 3), (3, 1)]
    """
    axis_at = {
        stride: size
        for size, stride in zip(sizes, strides.row_major(sizes), strict=True)
        if size > 1
    }
    exploded: list[tuple[int, int]] = []
    for size, stride in dims:
        while size > 1:
            axis = axis_at.get(stride)
            if axis is None or size % axis:
                raise TilingError(
                    f"{size} devices with stride {stride} are not whole axes of the mesh "
                    f"{tuple(sizes)}"
                )
            exploded.append((axis, stride))
            size //= axis
            stride *= axis
    return exploded[::-1]


def strides_for_sizes(sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the strides, in elements, of a dense array whose last dimension is the fastest.

    Example:
        >>> strides_for_sizes([2, 3, 4]).tolist()
        [12, 4, 1]
    """
    return np.array(strides.row_major([int(size) for size in sizes]), np.int64)
