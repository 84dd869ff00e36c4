"""Whose code a frame is: ours, JAX's or a person's."""

import os
import sys
from pathlib import Path

import jax

# Rooms that stand between a user's call and the function that is traced.
_ROOMS = (
    *("_jax", "array", "cloud", "commands", "geometry", "legacy", "multihost", "numpy", "pictures"),
    *("pjit", "processes", "program", "sharding", "testing", "tpu"),
)
INNER_FOLDERS = tuple(str(Path(__file__).parents[1] / room) for room in _ROOMS)
"""Where the frames of ours lie that no user cares about."""

JAX_FOLDER = str(Path(jax.__file__).parent) + os.sep
"""Where JAX's own code is."""

_PASSED_BY = (*(folder + os.sep for folder in INNER_FOLDERS), JAX_FOLDER)


def calling_line() -> tuple[str, int]:
    """The file and line of the innermost frame that is neither ours nor JAX's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED_BY):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def is_called_by_jax() -> bool:
    """Whether the function that asks was called by code of JAX, and not by a person's."""
    return sys._getframe(2).f_code.co_filename.startswith(JAX_FOLDER)
