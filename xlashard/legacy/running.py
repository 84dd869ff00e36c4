"""Runs a program as Python would, with the era's names in place."""

import importlib.util
import os
import runpy
import sys
import warnings
from dataclasses import dataclass
from types import TracebackType

_OWN_FOLDER = os.path.dirname(__file__)


@dataclass(frozen=True)
class Program:
    """What to run.

    Attributes:
        target: The path of a script or folder, or the name of a module.
        is_module: Whether it is a name.
        arguments: What follows on the command line.
    """

    target: str
    is_module: bool
    arguments: tuple[str, ...] = ()


def why_missing(program: Program) -> str:
    """Says why a program can't be run; empty if nothing is known against it."""
    if not program.is_module:
        there = os.path.exists(program.target)
        return "" if there else f"there is no file {program.target!r}"
    try:
        found = importlib.util.find_spec(program.target)
    except (ModuleNotFoundError, ValueError):
        found = None
    return "" if found else f"there is no module {program.target!r}"


def run(program: Program) -> None:
    """Runs a program as `__main__`, in this process.

    What it raises is shown as Python would show it, with the program's own frames alone, before it
    is raised on.
    """
    sys.argv = [program.target, *program.arguments]
    # It stays as it is: what JAX would rather read in it is for the report to say.
    warnings.filterwarnings("ignore", r"`with mesh:`", DeprecationWarning)
    try:
        if program.is_module:
            runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        else:
            _look_beside(program.target)
            runpy.run_path(program.target, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = _from_the_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        # It has been shown; what is left to Python is to end as it does after such an error.
        sys.excepthook = lambda *_: None
        raise


def _look_beside(script: str) -> None:
    """Lets a script import what lies beside it, and not what lies where Python was started."""
    if not sys.flags.safe_path and os.path.isfile(script):
        sys.path[0] = os.path.dirname(os.path.realpath(script))


def _from_the_program(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback from the first frame that is neither ours nor of `runpy`."""
    while traceback is not None and _is_ours(traceback.tb_frame.f_code.co_filename):
        traceback = traceback.tb_next
    return traceback


def _is_ours(filename: str) -> bool:
    return filename.startswith((_OWN_FOLDER, "<frozen runpy", "<frozen importlib"))
