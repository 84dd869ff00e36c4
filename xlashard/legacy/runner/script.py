"""Runs a program as Python would, with the era's names in place."""

import builtins
import importlib.util
import io
import os
import sys
import warnings
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

_NOT_USER_CODE = (
    os.path.dirname(os.path.dirname(__file__)),
    importlib.util.__file__,
    "<frozen importlib",
)


@dataclass(frozen=True)
class ScriptOrModule:
    """What to run.

    Attributes:
        target: The path of a script or folder, or the name of a module.
        is_module: Whether it is a name.
        arguments: What follows on the command line.
    """

    target: str
    is_module: bool
    arguments: tuple[str, ...] = ()


class ProgramNotFoundError(Exception):
    """There is no such program; says what there is instead."""


def run(program: ScriptOrModule) -> None:
    """Runs a program as `__main__`, in this process.

    It stays `__main__`, as it does under Python: threads and handlers that outlive its last line
    find its classes there. What it raises is shown as Python would show it, with the program's own
    frames alone, before it is raised on.

    Raises:
        ProgramNotFoundError: There is none.
    """
    sys.argv = [program.target, *program.arguments]
    # It stays as it is: what JAX would rather read in it is for the report to say.
    warnings.filterwarnings("ignore", r"`with mesh:`", DeprecationWarning)
    try:
        code, about = _read(program)
        main = ModuleType("__main__")
        vars(main).update(about, __builtins__=builtins)
        sys.modules["__main__"] = main
        exec(code, vars(main))
    except (SystemExit, ProgramNotFoundError):
        raise
    except BaseException as error:
        error.__traceback__ = _from_the_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        # It has been shown; what is left to Python is to end as it does after such an error.
        sys.excepthook = lambda *_: None
        raise


def _read(program: ScriptOrModule) -> tuple[CodeType, dict[str, Any]]:
    """A program's code, and what its module says of itself; lets it import what lies beside it."""
    target = program.target
    if program.is_module:
        return _load_spec(_module_to_run(target), f"there is no module {target!r} to run")
    path = os.path.abspath(target)
    if not os.path.exists(path):
        # no-catalogue: an error of the command line
        raise ProgramNotFoundError(f"there is no file {target!r}")
    inside = PathFinder.find_spec("__main__", [path])
    if inside is None and not os.path.isdir(path):
        # Also a pipe, such as `<(sed ... train.py)` or /dev/stdin.
        _add_to_path(os.path.dirname(os.path.realpath(path)))
        return _read_script(path)
    _add_to_path(path)
    found = _load_spec(inside, f"the folder {target!r} has no __main__.py: name a script in it")
    sys.argv[0] = target
    return found


def _add_to_path(folder: str) -> None:
    """Lets a program import what lies in a folder, and not what lies where Python was started."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _read_script(path: str) -> tuple[CodeType, dict[str, Any]]:
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    loader = SourceFileLoader("__main__", path)
    about = {"__spec__": None, "__file__": path, "__cached__": None}
    return code, {**about, "__loader__": loader, "__package__": None}


def _module_to_run(name: str) -> ModuleSpec | None:
    """The module of that name; of a package the module that stands for it when it is run."""
    if name.startswith("."):
        # Relative to nothing.
        return None
    try:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            return importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            # Found, and imports something that there is not.
            raise
        return None
    return found


def _load_spec(spec: ModuleSpec | None, else_say: str) -> tuple[CodeType, dict[str, Any]]:
    code_of = getattr(spec and spec.loader, "get_code", None)
    code = code_of(spec.name) if spec is not None and code_of is not None else None
    if spec is None or code is None:
        # Also modules that are not written in Python, which have no code to run.
        raise ProgramNotFoundError(else_say)  # no-catalogue: an error of the command line
    sys.argv[0] = spec.origin or sys.argv[0]
    return code, {
        "__spec__": spec,
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__loader__": spec.loader,
        "__package__": spec.parent,
    }


def _from_the_program(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback from the first frame that is neither ours nor of the import of the program."""
    while traceback is not None and _is_ours(traceback.tb_frame.f_code.co_filename):
        traceback = traceback.tb_next
    return traceback


def _is_ours(filename: str) -> bool:
    return filename.startswith(_NOT_USER_CODE)
