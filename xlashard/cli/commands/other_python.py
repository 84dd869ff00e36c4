"""The Python that runs the script of a command line: this one, or that of another environment.

`python` is the program that a shell would start. In the environment of this process a script runs
in this process. In another one the command line starts again there, in place of this process, so
that signals, streams and exit code are those of the script. The environment is left as it is:

- One start of its Python inspects it. It needs JAX, and a Python that this package is written for.
- If it has xlashard, that one makes the reports, in its version. If not, this one is lent to it
  (`xlashard/support/lending.py`). A line on standard error names the version, and that of JAX.

If a bare `python` has no JAX, and this environment has it, the script runs here: xlashard may be
started by its path, from a virtual environment that is not active.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from xlashard._jax import describe_requirement, is_too_old
from xlashard._version import __version__
from xlashard.errors import ArgumentError
from xlashard.support.lending import list_folders, start_words
from xlashard.support.program_runner import Script, parse_script

MINIMUM_PYTHON = (3, 12)
_BARE = ("python", "python3", "python.exe")
_TIMEOUT = 60.0
# Old versions of Python understand it, too.
_PROBE = """
import json, sys
facts = {"executable": sys.executable, "prefix": sys.prefix, "python": sys.version_info[:3]}
if sys.version_info >= (3, 8):
    from importlib import metadata, util
    sys.path[:] = [entry for entry in sys.path if entry]
    for name in ("jax", "xlashard"):
        spec = util.find_spec(name)
        if spec is not None and spec.origin:
            try:
                facts[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                facts[name] = "of an unknown version"
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class PythonEnvironment:
    """Environment of a Python interpreter.

    Attributes:
        executable: Path of the interpreter, as the interpreter returns it.
        prefix: Folder of the environment.
        python: Version of Python.
        jax: Version of JAX; empty without JAX.
        xlashard: Version of xlashard; empty without xlashard.
    """

    executable: str
    prefix: str
    python: tuple[int, ...]
    jax: str = ""
    xlashard: str = ""


def change_python(words: Sequence[str], to_script: Sequence[str]) -> None:
    """Start a command line again in the Python of its script, unless that is the current one.

    Then it does not return: the process is replaced.

    Args:
        words: The words of the command before `--`.
        to_script: The words after `--`.

    Raises:
        ArgumentError: If the words name a Python that can't run the script, or no Python program
            where this process can't run the command.
    """
    try:
        script = parse_script(to_script)
    except ArgumentError:
        if not has_jax():
            raise
        # The command raises it, after the errors of its own words.
        return
    other = _find_other_python(script)
    if other is not None:
        print(f"xlashard: {_describe_start(script, other)}", file=sys.stderr)
        executable, start = other.executable, [*start_words(list_folders()), "xlashard"]
    elif script.options:
        executable, start = sys.executable, ["-m", "xlashard"]
    else:
        return
    module = ["-m"] if script.program.is_module else []
    again = [executable, *module, script.program.target, *script.program.arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(executable, [executable, *script.options, *start, *words, "--", *again])


def has_jax() -> bool:
    """Return True if the environment of this process has JAX, without importing it."""
    return find_spec("jax") is not None


def _describe_start(script: Script, other: PythonEnvironment) -> str:
    """Describe where a script runs, and which version of this package makes the reports."""
    version = f"xlashard {__version__} is lent to it, and nothing is installed"
    if other.xlashard:
        version = f"its own xlashard {other.xlashard} makes the reports"
    return f"{script.program.target} runs in {other.executable} with jax {other.jax}; {version}"


def _find_other_python(script: Script) -> PythonEnvironment | None:
    """Return the environment of a script's Python; None for that of this process.

    Raises:
        ArgumentError: If the Python does not exist, or can't run a program with JAX.
    """
    word = script.interpreter or ("" if has_jax() else "python")
    if not word:
        return None
    is_bare = word in _BARE
    path = shutil.which(word, path=_search_path() if is_bare else None)
    target = script.program.target
    if path is None and is_bare and has_jax():
        return None
    if path is None:
        raise ArgumentError(  # no-catalogue: starts no program
            f"no program {word!r} was found: write the path of your program's Python, such as "
            f"-- .venv/bin/python {target}"
        )
    other = None
    # Of this environment, as far as its path shows it.
    is_current = _find_environment(path) == _find_environment(sys.executable)
    if not is_current:
        other = inspect_python(path, script.options)
        is_current = other is not None and _is_same_folder(other.prefix, sys.prefix)
    if is_current and has_jax():
        return None
    fault = "has no jax" if is_current else _find_fault(other)
    if fault and is_bare and has_jax() and not (other and other.jax):
        print(f"xlashard: {path} {fault}; {target} runs in {sys.executable}", file=sys.stderr)
        return None
    if fault:
        raise ArgumentError(  # no-catalogue: needs another interpreter
            f"{path} {fault}: write the path of a Python {_shown(MINIMUM_PYTHON)} or later with "
            f"{describe_requirement()}, such as -- .venv/bin/python {target}"
        )
    return other


def _search_path() -> str:
    """Return `PATH`, without this environment's own programs if the user can't mean its Python.

    Tools that run a program in an environment of its own, such as uvx, put that first in `PATH`.
    """
    active = os.environ.get("VIRTUAL_ENV", sys.prefix)
    path = os.environ.get("PATH", os.defpath)
    if has_jax() and _is_same_folder(active, sys.prefix):
        return path
    own = os.path.dirname(sys.executable)
    return os.pathsep.join(entry for entry in path.split(os.pathsep) if entry != own)


def _is_same_folder(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _find_environment(interpreter: str) -> Path:
    """Return the folder of a virtual environment, or the interpreter outside of one."""
    path = Path(os.path.abspath(interpreter))
    folder = path.parent.parent
    return folder if (folder / "pyvenv.cfg").exists() else path.resolve()


def inspect_python(path: str, options: Sequence[str] = ()) -> PythonEnvironment | None:
    """Return the environment of an interpreter; None if the program is no Python.

    Args:
        path: Path of the interpreter.
        options: Options that it is started with.
    """
    try:
        done = subprocess.run(
            [path, *options, "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
        )
        # The start of an environment may print lines, too.
        facts = json.loads(done.stdout.splitlines()[-1])
        return PythonEnvironment(**facts | {"python": tuple(facts["python"])})
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
        return None


def _find_fault(other: PythonEnvironment | None) -> str:
    """Return why an environment can't run a program with this package; empty if it can."""
    if other is None:
        return "does not answer as a Python"
    if other.python < MINIMUM_PYTHON:
        return f"is Python {_shown(other.python)}"
    if not other.jax:
        return "has no jax"
    return f"has jax {other.jax}" if is_too_old(other.jax) else ""


def _shown(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
