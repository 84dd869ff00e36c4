"""Remove frames of this package and of JAX from tracebacks, and pass them by on the stack.

JAX removes its own frames from tracebacks as `jax_traceback_filtering` specifies; `off` keeps all
frames. The setting applies to frames of this package too.
"""

import os
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from xlashard._jax.private import find_name, traceback_util
from xlashard.support.tracebacks import INNER_FOLDERS, is_users_file, use_filter


def hide_frames(folder: str) -> None:
    """Hide the frames of the code in a folder from tracebacks."""
    traceback_util.register_exclusion(folder)


def _remove_hidden_frames(error: BaseException) -> None:
    mode, traceback = traceback_util._filtering_mode(), error.__traceback__
    if traceback is None or mode == "off":
        return
    if mode == "tracebackhide":
        traceback_util._add_tracebackhide_to_hidden_frames(traceback)
        return
    error.with_traceback(traceback_util.filter_traceback(traceback))


use_filter(_remove_hidden_frames)


def with_errors_as[R](
    translate: Callable[[Exception], Exception], fun: Callable[..., R], *args: Any
) -> R:
    """Call a function, and raise what another one makes of its exceptions.

    Below a boundary of its API JAX leaves its own frames in tracebacks: they hold the operands.
    """
    result, error = _find_attempt()(fun, *args)
    if error is None:
        return result
    try:
        raise translate(error)  # no-catalogue: the topic "explicit" has the messages
    finally:
        del error  # its traceback holds this frame


@lru_cache(maxsize=1)
def _find_attempt() -> Callable[..., tuple[Any, Exception | None]]:
    mark = find_name(traceback_util, "api_boundary")
    return mark(_attempt) if mark else _attempt


def _attempt(fun: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    try:
        return fun(*args), None
    except Exception as error:
        return None, error


JAX_FOLDER = str(Path(jax.__file__).parent) + os.sep
"""Folder of JAX's code."""


def is_called_by_jax() -> bool:
    """Return True if the calling function was called by JAX, not by the user."""
    return sys._getframe(2).f_code.co_filename.startswith(JAX_FOLDER)


_PASSED_BY = (*(folder + os.sep for folder in INNER_FOLDERS), JAX_FOLDER)

# Wrappers of jax.jit: nnx.jit, eqx.filter_jit.
_WRAPPERS = tuple(
    os.sep + str(Path("site-packages", name)) + os.sep for name in ("flax", "equinox")
)


def callers() -> Iterator[FrameType]:
    """Yield the frames of this thread, from that of the function that iterates outwards."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def calling_line() -> tuple[str, int]:
    """Return file and line of the innermost frame that is neither ours nor a library's."""
    # On the path of every first call, so without a generator.
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_passed_by(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def library_frame() -> FrameType | None:
    """Return the frame of an installed package that the user's files call; None if it is JAX's."""
    library = None
    for frame in callers():
        file = frame.f_code.co_filename
        if file.startswith((*_PASSED_BY, "<frozen")):
            continue
        if is_users_file(file):
            return library
        library = frame
    return None


def script_line() -> tuple[str, int]:
    """Return file and line of the innermost frame of the user's files.

    Without one, that of the innermost frame that is neither ours nor JAX's.
    """
    for frame in callers():
        file = frame.f_code.co_filename
        if is_users_file(file) and not file.startswith((*_PASSED_BY, "<frozen")):
            return file, frame.f_lineno
    return calling_line()


@lru_cache(maxsize=4096)
def _is_passed_by(file: str) -> bool:
    return file.startswith(_PASSED_BY) or any(wrapper in file for wrapper in _WRAPPERS)
