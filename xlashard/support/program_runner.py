"""Python programs of a command line: its words, and running a script or module as `__main__`."""

import builtins
import importlib.util
import io
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from xlashard.errors import ArgumentError

_NOT_USER_CODE = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    importlib.util.__file__,
    "<frozen importlib",
)


@dataclass(frozen=True)
class ScriptOrModule:
    """Program to run.

    Attributes:
        target: The path of a script or folder, or the name of a module.
        is_module: True if `target` is the name of a module.
        arguments: The command-line arguments of the program.
    """

    target: str
    is_module: bool
    arguments: tuple[str, ...] = ()


class ProgramNotFoundError(Exception):
    """Missing script or module."""


class ProgramStopped(BaseException):
    """Ends a running program from within, without a traceback."""


def run(program: ScriptOrModule) -> None:
    """Run a program as `__main__`, in this process.

    It stays `__main__` after its last line, for its threads and exit handlers. Its exception is
    printed as Python prints it, with the program's own frames only, and raised again.

    Args:
        program: The script or module, and its arguments.

    Raises:
        ProgramNotFoundError: The script or module does not exist.
    """
    sys.argv = [program.target, *program.arguments]
    try:
        code, about = _read(program)
        main = ModuleType("__main__")
        vars(main).update(about, __builtins__=builtins)
        sys.modules["__main__"] = main
        exec(code, vars(main))
    except (SystemExit, ProgramNotFoundError, ProgramStopped):
        raise
    except BaseException as error:
        error.__traceback__ = _from_the_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        # The traceback is printed; let Python exit with the right code.
        sys.excepthook = lambda *_: None
        raise


def _read(program: ScriptOrModule) -> tuple[CodeType, dict[str, Any]]:
    """Return a program's code and module attributes, and add its folder to `sys.path`."""
    target = program.target
    if program.is_module:
        # A console script begins with its own folder in `sys.path`.
        _add_to_path(os.getcwd())
        return _load_spec(_module_to_run(target), f"no module {target!r}")
    path = os.path.abspath(target)
    if not os.path.exists(path):
        # no-catalogue: an error of the command line
        raise ProgramNotFoundError(f"no file {target!r}")
    inside = PathFinder.find_spec("__main__", [path])
    if inside is None and not os.path.isdir(path):
        # Also a pipe, such as `<(sed ... train.py)` or /dev/stdin.
        _add_to_path(os.path.dirname(os.path.realpath(path)))
        return _read_script(path)
    _add_to_path(path)
    loaded = _load_spec(inside, f"the folder {target!r} has no __main__.py: pass a script in it")
    sys.argv[0] = target
    return loaded


def _add_to_path(folder: str) -> None:
    """Replace the first entry of `sys.path` by the program's folder."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _read_script(path: str) -> tuple[CodeType, dict[str, Any]]:
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    loader = SourceFileLoader("__main__", path)
    about = {"__spec__": None, "__file__": path, "__cached__": None}
    return code, {**about, "__loader__": loader, "__package__": None}


def _module_to_run(name: str) -> ModuleSpec | None:
    """Return the spec of a module, or of the `__main__` module of a package."""
    if name.startswith("."):
        # A relative name without a package.
        return None
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            return importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            # The package exists, but imports a missing module.
            raise
        return None
    return spec


def _load_spec(spec: ModuleSpec | None, error: str) -> tuple[CodeType, dict[str, Any]]:
    code_of = getattr(spec and spec.loader, "get_code", None)
    code = code_of(spec.name) if spec is not None and code_of is not None else None
    if spec is None or code is None:
        # Also raised for extension modules, which have no code object.
        raise ProgramNotFoundError(error)  # no-catalogue: an error of the command line
    sys.argv[0] = spec.origin or sys.argv[0]
    return code, {
        "__spec__": spec,
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__loader__": spec.loader,
        "__package__": spec.parent,
    }


def _from_the_program(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its leading frames of this package and of importlib."""
    while traceback and traceback.tb_frame.f_code.co_filename.startswith(_NOT_USER_CODE):
        traceback = traceback.tb_next
    return traceback


_PYTHON = re.compile(r"python(\d(\.\d+)?t?)?(\.exe)?")
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")


@dataclass(frozen=True)
class Script:
    """A script as a command line names it.

    Attributes:
        program: The script or module, and its arguments.
        interpreter: The interpreter, as the command line or the console script names it; empty
            without one.
        options: Options of the interpreter, such as `-u`.
    """

    program: ScriptOrModule
    interpreter: str = ""
    options: tuple[str, ...] = ()


def names_interpreter(words: Sequence[str]) -> bool:
    """Return True if the first of some words is the name or path of a Python interpreter.

    Args:
        words: A command line.
    """
    return bool(words) and _PYTHON.fullmatch(os.path.basename(words[0])) is not None


def parse_script(words: Sequence[str]) -> Script:
    """Parse the words after `--`.

    Args:
        words: `python train.py ARGS`, `train.py ARGS`, `python -m package.module ARGS`, or the name
            of a console script that is written in Python, with its arguments.

    Raises:
        ArgumentError: If the words name no Python program.

    Example:
        >>> parse_script(["python", "-u", "-m", "train", "--steps=3"]).program
        ScriptOrModule(target='train', is_module=True, arguments=('--steps=3',))
    """
    rest = list(words)
    if names_interpreter(rest):
        interpreter = rest.pop(0)
        options = _interpreter_options(rest)
        return Script(_program(rest), interpreter, options)
    if rest and (rest[0].endswith(".py") or rest[0] == "-m" or os.path.isdir(rest[0])):
        return Script(_program(rest))
    return _console_script(rest)


def _program(words: list[str]) -> ScriptOrModule:
    """Return the program of the words after the interpreter and its options."""
    is_module = words[:1] == ["-m"]
    words = words[1:] if is_module else words
    if not words or words[0] in ("-", "-c"):
        what = f"{words[0]} is no script" if words else "no script is named"
        raise ArgumentError(
            f"{what} after --: write -- python train.py, or -- python -m package.module"
        )
    if not is_module and not os.path.exists(words[0]):
        raise ArgumentError(f"no file {words[0]!r} in {Path.cwd()}")  # no-catalogue: names a folder
    return ScriptOrModule(words[0], is_module, tuple(words[1:]))


def _interpreter_options(words: list[str]) -> tuple[str, ...]:
    """Remove the options of the interpreter from the front of its words, and return them."""
    options = []
    while words and words[0].startswith("-") and words[0] not in ("-", "-c", "-m"):
        takes_value = words[0] in _WITH_VALUE and len(words) > 1
        options += [words.pop(0) for _ in range(1 + takes_value)]
    return tuple(options)


_SHEBANG = re.compile(rb"#!\s*(?:/usr/bin/env\s+(?:-S\s+)?)?(\S*python[\d.]*)\b")
# pip writes this where the path of the interpreter is too long for a shebang.
_SHELL = re.compile(rb"#!/bin/sh\n'''exec' \"?([^\"\n]*?python[\d.]*)\"? ")


def _console_script(words: list[str]) -> Script:
    word = words[0] if words else ""
    # An environment that is not activated has its scripts beside its interpreter alone.
    path = shutil.which(word) or shutil.which(word, path=os.path.dirname(sys.executable))
    start = b""
    if path is not None:
        with open(path, "rb") as file:
            start = file.read(4096)
    match = _SHELL.match(start) or _SHEBANG.match(start)
    if path is None or match is None:
        raise ArgumentError(
            f"{word!r} after -- is no Python program: write -- python train.py, or the name of a "
            "console script"
        )
    return Script(ScriptOrModule(path, False, tuple(words[1:])), os.fsdecode(match[1]))
