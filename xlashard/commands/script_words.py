"""Words of a Python script on a command line, its interpreter, and patterns of its programs."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from xlashard.errors import ArgumentError
from xlashard.program_runner import ScriptOrModule

_PYTHON = re.compile(r"python(\d(\.\d+)?)?(\.exe)?")
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")


@dataclass(frozen=True)
class Script:
    """A script as a command line names it.

    Attributes:
        program: The script or module, and its arguments.
        interpreter: Path of another Python interpreter; empty for the current one.
        options: Options of the interpreter, such as `-u`.
    """

    program: ScriptOrModule
    interpreter: str = ""
    options: tuple[str, ...] = ()


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
    if rest and _PYTHON.fullmatch(os.path.basename(rest[0])):
        interpreter = _other_interpreter(rest.pop(0))
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


def _other_interpreter(word: str) -> str:
    """Return the path of an interpreter; empty for the current one, and for a bare `python`.

    A bare `python` is the interpreter that xlashard is installed in.
    """
    if word in ("python", "python3", "python.exe"):
        return ""
    path = shutil.which(word)
    if path is None:
        raise ArgumentError(f"no program {word!r} was found: write -- python train.py")
    return "" if _environment_of(path) == _environment_of(sys.executable) else path


def _environment_of(interpreter: str) -> str:
    """Return the folder of a virtual environment, or the interpreter outside of one."""
    path = Path(os.path.abspath(interpreter))
    folder = path.parent.parent
    return str(folder if (folder / "pyvenv.cfg").exists() else path.resolve())


_SHEBANG = re.compile(rb"#!\s*(?:/usr/bin/env\s+(?:-S\s+)?)?(\S*python[\d.]*)\b")
# pip writes this where the path of the interpreter is too long for a shebang.
_SHELL = re.compile(rb"#!/bin/sh\n'''exec' \"?([^\"\n]*?python[\d.]*)\"? ")


def _console_script(words: list[str]) -> Script:
    path = shutil.which(words[0]) if words else None
    start = b""
    if path is not None:
        with open(path, "rb") as file:
            start = file.read(4096)
    match = _SHELL.match(start) or _SHEBANG.match(start)
    if path is None or match is None:
        word = words[0] if words else ""
        raise ArgumentError(
            f"{word!r} after -- is no Python program: write -- python train.py, or the name of a "
            "console script"
        )
    interpreter = _other_interpreter(os.fsdecode(match[1]))
    return Script(ScriptOrModule(path, False, tuple(words[1:])), interpreter)


def change_interpreter(script: Script, words: Sequence[str], to_script: Sequence[str]) -> None:
    """Start the command again in the interpreter of a script, if it is another one.

    It does not return then. The process is replaced, so that signals reach the script.

    Args:
        script: The script.
        words: The words of the command before `--`.
        to_script: The words after `--`.

    Raises:
        ArgumentError: If the other interpreter has no xlashard.
    """
    if not script.interpreter and not script.options:
        return
    python = script.interpreter or sys.executable
    if script.interpreter:
        check = "import importlib.util as u, sys; sys.exit(u.find_spec('xlashard') is None)"
        if subprocess.run([python, "-c", check], check=False).returncode:
            raise ArgumentError(  # no-catalogue: needs another interpreter
                f"{python} has no xlashard: {python} -m pip install xlashard, or write "
                f"-- {sys.executable} {script.program.target}"
            )
    plain = Script(script.program)
    rest = to_script[len(to_script) - len(plain.program.arguments) :]
    module = ["-m"] if script.program.is_module else []
    command = [python, *script.options, "-m", "xlashard", *words, "--"]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(python, [*command, *module, script.program.target, *rest])


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a program's name matches one of the patterns.

    Args:
        name: The name.
        patterns: Globs such as `train_*`, or regular expressions such as `/(train|eval)_step/`.

    Raises:
        ArgumentError: If a regular expression is invalid.
    """
    for pattern in patterns:
        if len(pattern) > 2 and pattern.startswith("/") and pattern.endswith("/"):
            try:
                if re.search(pattern[1:-1], name):
                    return True
            except re.error as error:
                raise ArgumentError(
                    f"--programs {pattern} is no regular expression ({error}): write a glob such "
                    "as 'train_*', or '/(train|eval)_step/'"
                ) from None
        elif fnmatchcase(name, pattern):
            return True
    return False
