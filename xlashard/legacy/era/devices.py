"""What devices and their arrays could do besides what they can today."""

import math
import unittest
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xlashard.sharding import Mesh


def live_buffers(device: Any) -> list[jax.Array]:
    """The arrays that lie on one device alone."""
    return [x for x in device.client.live_arrays() if x.devices() == {device}]


def to_dlpack(x: Any, **options: Any) -> Any:
    """An array's memory as a capsule of DLPack, which other libraries take.

    Args:
        x: The array.
        **options: Those of today's `__dlpack__`; `take_ownership` is not looked at.
    """
    options.pop("take_ownership", None)
    return x.__dlpack__(**options)


def enable_x64(new_val: bool = True) -> Any:
    """A context in which numbers have 64 bits."""
    return jax.enable_x64(new_val)


def disable_x64() -> Any:
    """A context in which numbers have 32 bits."""
    return jax.enable_x64(False)


def create_global_mesh(mesh_shape: Sequence[int], axis_names: Sequence[str]) -> Mesh:
    """Make a mesh of the first devices by their ids, for a test.

    Args:
        mesh_shape: The size of each axis.
        axis_names: The name of each axis.

    Raises:
        unittest.SkipTest: There are fewer devices, so the test can't run.
    """
    size, devices = math.prod(mesh_shape), sorted(jax.devices(), key=lambda device: device.id)
    if len(devices) < size:
        raise unittest.SkipTest(  # no-catalogue: skips a test
            f"the test needs {size} devices for a mesh of shape {tuple(mesh_shape)}, and there are "
            f"{len(devices)}"
        )
    grid = np.array(devices[:size], dtype=object).reshape(tuple(mesh_shape))
    return Mesh(grid, tuple(axis_names))
