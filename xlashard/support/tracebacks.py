"""Short tracebacks: an error ends at the user's line, without the frames of this package.

Once JAX is in use, `_jax.runtime.tracebacks` replaces the filter by JAX's own, which leaves out
frames of both packages.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

# Packages and modules whose code runs between a user's call and the traced function.
_ROOMS = (
    *("_jax", "analysis", "auto", "cli", "core", "geometry", "hlo", "legacy", "numpy", "pods"),
    *("predict", "workers"),
    *(f"support/{name}.py" for name in ("documents", "formatting", "hooks", "tracebacks")),
)
INNER_FOLDERS = tuple(str(Path(__file__).parents[1] / room) for room in _ROOMS)
"""Folders of this package whose frames are hidden."""


def _remove_own_frames(error: BaseException) -> None:
    if os.environ.get("JAX_TRACEBACK_FILTERING") == "off":
        return
    kept: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        if not entry.tb_frame.f_code.co_filename.startswith(INNER_FOLDERS):
            kept.append(entry)
        entry = entry.tb_next
    shown: TracebackType | None = None
    for entry in reversed(kept):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.with_traceback(shown)


_filters: list[Callable[[BaseException], None]] = [_remove_own_frames]


def use_filter(remove_frames: Callable[[BaseException], None]) -> None:
    """Replace the function that removes hidden frames from an exception's traceback."""
    _filters[:] = [remove_frames]


def shorten(error: BaseException) -> None:
    """Remove hidden frames from an exception's traceback, up to the current frame.

    Call it in an `except` block and raise again by a bare `raise`, which adds no frame.
    """
    _filters[0](error)


class _Short:
    """Context manager without state, of which one instance suffices."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            shorten(error)


short_tracebacks = _Short()
"""`with short_tracebacks:` shortens the traceback of any exception that leaves the block."""


def shortened[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """Return a method whose exceptions have short tracebacks.

    Functions with doctest examples use the `with` block, since doctest skips wrapped functions.
    """

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        # A `with` block would take time on calls that succeed.
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            shorten(error)
            raise

    return called
