"""Tracebacks without the frames between a person's call and what went wrong.

JAX leaves its own frames out of the tracebacks that leave it; `jax_traceback_filtering` says how,
and `off` shows everything. The same setting decides here of the frames of this package.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import jax
from jax._src import traceback_util


def hide_frames(folder: str) -> None:
    """Counts every frame of the code in a folder as none of a person's."""
    traceback_util.register_exclusion(folder)


def shorten(error: BaseException) -> None:
    """Takes hidden frames out of an exception's traceback, as far as it has come.

    Call it in an `except` block and raise again by a bare `raise`: then the frame that does so is
    not in the traceback either.
    """
    mode, there = traceback_util._filtering_mode(), error.__traceback__
    if there is None or mode == "off":
        return
    if mode == "tracebackhide":
        traceback_util._add_tracebackhide_to_hidden_frames(there)
        return
    error.with_traceback(traceback_util.filter_traceback(there))


class _Short:
    """The context manager, of which one is enough."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            shorten(error)


short_tracebacks = _Short()
"""`with short_tracebacks:` around what a person called; what leaves it is shortened."""


def shortened[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """A method that is called as a whole `with short_tracebacks`.

    Doctest does not find the examples of functions that are wrapped: these use the `with` itself.
    """

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        # Not by short_tracebacks, which costs something where nothing goes wrong.
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            shorten(error)
            raise

    return called


# Rooms that stand between a user's call and the function that is traced.
_ROOMS = (
    *("_jax", "array", "cloud", "commands", "geometry", "legacy", "multihost", "numpy", "pictures"),
    *("pjit", "processes", "program", "sharding", "testing", "tpu"),
)
INNER_FOLDERS = tuple(str(Path(__file__).parents[2] / room) for room in _ROOMS)
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
