"""Short tracebacks: an error ends at the user's line, without the frames of this package.

Once JAX is in use, `_jax.runtime.tracebacks` replaces the filter by JAX's own, which leaves out
frames of both packages.
"""

import functools
import os
import sys
import sysconfig
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from types import TracebackType

from xlashard.config import SKIP_FILES, split_globs

# Packages and modules whose code runs between a user's call and the traced function.
_ROOMS = (
    *("_jax", "analysis", "auto", "cli", "core", "geometry", "hlo", "legacy", "numpy", "pods"),
    *("predict", "workers"),
    *("support/consoles.py", "support/documents.py", "support/formatting.py", "support/hooks.py"),
    "support/tracebacks.py",
)
INNER_FOLDERS = tuple(str(Path(__file__).parents[1] / room) for room in _ROOMS)
"""Folders of this package whose frames are hidden."""


def is_users_file(file: str) -> bool:
    """Return False for files of Python, of installed packages, of xlashard, and skipped ones.

    A package is installed that lies in a folder of such packages; an editable one doesn't.
    """
    return not (is_skipped(file) or _installed_package(file))


def is_skipped(file: str) -> bool:
    """Return True if one of the globs of `XLASHARD_SKIP_FILES` matches a path or its end."""
    text = os.environ.get(SKIP_FILES, "")
    return bool(text) and any(
        fnmatchcase(file, glob) or fnmatchcase(file, f"*/{glob}") for glob in split_globs(text)
    )


def is_of_package(file: str, program: str) -> bool:
    """Return True if a file lies in the installed package of a program, and is not skipped.

    Args:
        file: The file.
        program: The file of the function that became the program; `__main__` counts, too.
    """
    package = _installed_package(file)
    mains = program, str(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    return (
        package not in ("", _PYTHON)
        and not is_skipped(file)
        and (package in map(_installed_package, mains))
    )


_PYTHON = "the standard library"


@lru_cache(maxsize=1024)
def _installed_package(file: str) -> str:
    """Return the folder of the installed package of a file; "" for a file of none."""
    if file.startswith(INNER_FOLDERS):
        return _PYTHON
    path = Path(file)
    for root in path.parents:
        if root.name in ("site-packages", "dist-packages") or str(root) in _SITES:
            return str(root / path.relative_to(root).parts[0])
    if path.is_relative_to(_PACKAGE):
        return _PACKAGE
    return _PYTHON if any(map(path.is_relative_to, _STANDARD)) else ""


_PACKAGE = str(Path(__file__).parents[1])
_SITES = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
_STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))


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
