"""Run the calls of the catalogue, and keep their outcomes."""

import importlib.metadata
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from tests.errors.catalogue import JAX_SETUP, SETUP, SHARED, VALUES, Mistake, names_devices
from xlashard._jax.trace.tracing import Tracer

_JAXLIB = importlib.metadata.version("jaxlib")
PACKAGE = Path(__file__).resolve().parents[2] / "xlashard"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call.

    Attributes:
        kind: The class of the exception, or of the warning; "" without either.
        cls: The class itself.
        text: Its text, with its notes.
        sites: File (relative to the package) and line of every place in the package where it, or
            one that it replaced, was raised.
    """

    kind: str = ""
    cls: type[Exception] | None = None
    text: str = ""
    sites: tuple[tuple[str, int], ...] = ()


@cache
def ours(mistake: Mistake) -> Outcome:
    """Run the mistake with xlashard."""
    return run(SETUP, mistake.setup + mistake.wrong)


@cache
def theirs(mistake: Mistake) -> Outcome:
    """Run the same mistake with JAX."""
    return run(JAX_SETUP, mistake.setup + (mistake.jax or mistake.wrong))


def run(setup: str, source: str) -> Outcome:
    """Run a call after its setup, in a separate namespace.

    Warnings count if nothing is raised, except for deprecations in other packages and for warnings
    about unclosed files and sockets, which may belong to any test and be collected just now.
    """
    with warnings.catch_warnings(record=True) as caught, _whole_tracebacks():
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            execute(setup, source)
        except Exception as error:
            return _outcome(error)
    if not caught:
        return Outcome()
    warning = caught[0].message
    return _outcome(warning) if isinstance(warning, Warning) else Outcome("str", None, warning)


@contextmanager
def _whole_tracebacks() -> Iterator[None]:
    """Keep the frames of JAX and of this package, to find where an error was raised."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


@cache
def _compiled(setup: str) -> Any:
    return compile(setup, "setup.py", "exec")


def execute(setup: str, source: str) -> dict[str, Any]:
    """Run a setup and a source, which may choose a partitioner; return the names they made."""
    names: dict[str, Any] = {"__name__": "example"}
    partitioner = jax.config.jax_use_shardy_partitioner
    try:
        exec(_compiled(setup + (SHARED if names_devices(source) else VALUES)), names)
        exec(compile(source, "example.py", "exec"), names)
        jax.block_until_ready([v for v in names.values() if isinstance(v, jax.Array) and _alive(v)])
    finally:
        jax.config.update("jax_use_shardy_partitioner", partitioner)
    return names


def _alive(array: Any) -> bool:
    return not isinstance(array, Tracer) and not array.is_deleted()


def _outcome(error: Exception) -> Outcome:
    text = "\n".join([str(error) + _suggestion(error), *getattr(error, "__notes__", [])])
    return Outcome(type(error).__name__, type(error), _without_place(text), tuple(_sites(error)))


def _suggestion(error: Exception) -> str:
    """Return the suffix that Python adds in a terminal: `. Did you mean: 'shape'?`."""
    if not isinstance(error, AttributeError):
        return ""
    shown = "".join(traceback.TracebackException.from_exception(error).format_exception_only())
    return shown.rstrip().partition(str(error))[2]


def _without_place(text: str) -> str:
    """Return the text without parts that differ from machine to machine."""
    text = text.replace(f"jaxlib {_JAXLIB}", "jaxlib at hand")
    text = re.sub(r"0x[0-9a-f]{6,}", "0x...", text)
    text = re.sub(r"(?:/[\w.+-]+)+/(\w+\.py)", r"\1", text)
    return text.rstrip()


def _sites(error: BaseException | None) -> list[tuple[str, int]]:
    """Return where the package raised an error and the errors that it replaced."""
    found: list[tuple[str, int]] = []
    while error is not None:
        found += _last_of_ours(error.__traceback__)
        error = error.__cause__ or error.__context__
    return found


def _last_of_ours(tb: TracebackType | None) -> list[tuple[str, int]]:
    frames = [(Path(f.f_code.co_filename), line) for f, line in traceback.walk_tb(tb)]
    if not frames or not frames[-1][0].is_relative_to(PACKAGE):
        return []
    path, line = frames[-1]
    return [(str(path.relative_to(PACKAGE)), line)]
