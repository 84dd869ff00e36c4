"""Running a program with the removed names, and the words of `python -m xlashard.legacy`."""

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import jax

from xlashard import multihost
from xlashard._jax.legacy_api import call_when_set
from xlashard._jax.runtime.coordination import process_index
from xlashard.config import read_flags
from xlashard.errors import ArgumentError, ConfigError
from xlashard.legacy.installer import INSTALLER, install
from xlashard.legacy.libraries.installation import LibraryInstallation, UsedNames
from xlashard.legacy.modes.config_flags import config, jax_array, parallel_functions_output_gda
from xlashard.legacy.recorder import Recorder
from xlashard.legacy.usage_report import Report, json_of, show_report
from xlashard.support.background import at_exit
from xlashard.support.documents import write_whole
from xlashard.support.formatting import print_error
from xlashard.support.program_runner import (
    ProgramNotFoundError,
    ScriptOrModule,
    names_interpreter,
    parse_script,
    run,
)

_USAGE = """\
usage: python -m xlashard.legacy [OPTION ...] [--FLAG=VALUE ...] script.py ARGS ...
       python -m xlashard.legacy [OPTION ...] [--FLAG=VALUE ...] -m module ARGS ...
       python -m xlashard.legacy [OPTION ...] [--FLAG=VALUE ...] -- console-script ARGS ...
       python -m xlashard legacy --migrate FILE ... [--write]"""

_HELP = f"""{_USAGE}

Runs an unchanged program of 2022 or 2023, with the removed names of JAX installed.

  --report         at exit, list the removed names that ran, their lines, and today's code
  --report=FILE    write that list to a file, as JSON
  --libraries      give back names that Python, NumPy, optax, flax and others took away since
  --jax_array=0    set a flag of JAX, or of 2022 and 2023, before the program starts; also
                   --jax_parallel_functions_output_gda=1, --jax_enable_x64=1
  -m module        run a module, as `python -m module` does
  -h, --help       show this help

Arguments after script.py, module or console-script are passed to the program. The last form
rewrites programs for today's JAX."""

_OF_MIGRATION = ("--migrate", "--write", "--check")
"""Options of `xlashard legacy` that migrate files."""


class UsageError(Exception):
    """Invalid command line."""


@dataclass(frozen=True)
class RunCommand:
    """Parsed command line.

    Attributes:
        program: The script or module to run.
        report: True to report the removed names that it uses.
        report_file: The file of the report; empty to print it.
        libraries: True to install names that other libraries than JAX took away.
        flags: Flags to set before the program starts, by name.
        migrated: The program's files that get none of the removed names.
    """

    program: ScriptOrModule
    report: bool = False
    report_file: str = ""
    libraries: bool = False
    flags: dict[str, str | bool] = field(default_factory=dict)
    migrated: frozenset[str] = frozenset()


def read_command(words: Sequence[str]) -> RunCommand:
    """Parse a command line.

    Args:
        words: The arguments, without the program's name.

    Raises:
        UsageError: The command line is invalid.
        ArgumentError: The words after an interpreter name no program.

    Example:
        >>> read_command(["--jax_array=0", "train.py", "--steps=3"]).program
        ScriptOrModule(target='train.py', is_module=False, arguments=('--steps=3',))
    """
    report, file, libraries, flags = False, "", False, {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--"):
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name == "--report":
            if equals and not value:
                # no-catalogue: an error of the command line
                raise UsageError("--report= requires a file name: write --report=uses.json")
            report, file = True, value
        elif word == "--libraries":
            libraries = True
        elif name.startswith(("--jax_", "--nojax_")):
            flags.update([parse_flag(word)])
        elif name in _OF_MIGRATION:
            # no-catalogue: an error of the command line
            raise UsageError(
                f"{name} is an option of another command: write "
                "python -m xlashard legacy --migrate FILE"
            )
        else:
            # no-catalogue: an error of the command line
            raise UsageError(f"unknown option {name}: write options of the program after it")
    after_dashes = rest[:1] == ["--"]
    rest = rest[after_dashes:]
    if after_dashes and (names_interpreter(rest) or _names_command(rest)):
        return RunCommand(parse_script(rest).program, report, file, libraries, flags)
    return RunCommand(_program(rest), report, file, libraries, flags)


def _names_command(words: Sequence[str]) -> bool:
    """Return True if the first of some words can only be the name of a console script."""
    word = words[0] if words else "-"
    is_file = os.sep in word or word.endswith(".py") or os.path.exists(word)
    return not (is_file or word.startswith("-"))


def parse_flag(word: str) -> tuple[str, str | bool]:
    """Return the name and value of a flag: `--jax_array=0`, `--jax_array`, `--nojax_array`.

    Args:
        word: Command line text.

    Example:
        >>> parse_flag("--nojax_array")
        ('jax_array', False)
    """
    name, equals, value = word.partition("=")
    if name.startswith("--no"):
        return name.removeprefix("--no"), False
    return name.removeprefix("--"), value if equals else True


def _program(words: list[str]) -> ScriptOrModule:
    is_module = words[:1] == ["-m"]
    if is_module:
        words = words[1:]
    if not words:
        what = "-m requires a module name" if is_module else "missing program to run"
        raise UsageError(what)  # no-catalogue: an error of the command line
    return ScriptOrModule(words[0], is_module, tuple(words[1:]))


def main(words: Sequence[str]) -> int:
    """Run the program of a command line with the removed names installed.

    Args:
        words: The arguments, without the program's name.

    Returns:
        The exit code, unless the program exits itself: 0, or 2 for an invalid command line.
    """
    if words[:1] in (["-h"], ["--help"]):
        print(_HELP)
        return 0
    try:
        command = read_command(words)
        flags = set_flags(command.flags)
    except (UsageError, ArgumentError, ConfigError) as error:
        print(_USAGE, file=sys.stderr)
        print_error(error)
        return 2
    return run_old_program(command, flags)


def set_flags(flags: Mapping[str, str | bool]) -> dict[str, Any]:
    """Set the flags of a command line, and return their values.

    Args:
        flags: Text of each flag, by name; True or False without a text.

    Raises:
        ConfigError: A flag is unknown, or its value is invalid.
    """
    values = {name: _typed(name, text) for name, text in flags.items()}
    for name, value in values.items():
        config.update(name, value)
    return values


def run_old_program(command: RunCommand, flags: Mapping[str, Any]) -> int:
    """Run a program with the removed names installed.

    Args:
        command: The program and the report.
        flags: The flags that were set, for the processes that the program starts.

    Returns:
        The exit code, unless the program exits itself: 0, 1 if the module does not exist, 2 if the
        script does not.
    """
    if "jax_array" not in flags and "JAX_ARRAY" not in os.environ:
        _advise_about_arrays()
    recorder, cancel_report = Recorder() if command.report else None, None
    if recorder is not None:
        # Runs after the exit handlers that the program registers.
        # The program may leave the folder.
        file = command.report_file and os.path.abspath(command.report_file)
        cancel_report = at_exit(_write_report, recorder, file)
        INSTALLER.install(recorder.listen, command.migrated)
        recorder.start()
    else:
        INSTALLER.install(migrated=command.migrated)
    libraries = install_libraries(recorder) if command.libraries else None
    join_pod()
    leave_children = install_in_children(flags, command.libraries)
    # The program stays unchanged: the report lists `with mesh:`.
    warnings.filterwarnings("ignore", r"`with mesh:`", DeprecationWarning)
    try:
        run(command.program)
    except ProgramNotFoundError as error:
        leave_children()
        if libraries is not None:
            libraries.end()
        INSTALLER.uninstall()
        if recorder is not None and cancel_report is not None:
            recorder.end()
            cancel_report()
        print_error(error)
        return 1 if command.program.is_module else 2
    except BaseException as error:
        if recorder is not None:
            recorder.record_failure(error)
        raise
    return 0


def install_libraries(recorder: Recorder | None = None) -> LibraryInstallation:
    """Install the names that other libraries than JAX took away.

    Args:
        recorder: The recorder of the report; without one, a line at exit lists the names used.
    """
    used = UsedNames()
    libraries = LibraryInstallation(recorder.listen if recorder is not None else used.listen)
    libraries.start()

    def show_used() -> None:
        names = used.describe()
        if names:
            note = f"note: --libraries gave back {names}; --report lists their lines"
            print(note, file=sys.stderr)

    at_exit(show_used)
    return libraries


def _write_report(recorder: Recorder, file: str) -> None:
    recorder.end()
    report = Report.of(recorder.uses(), _own_folder(), recorder.failure)
    if not file:
        show_report(report, sys.stderr)
        return
    path = Path(_own_file(file))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json_of(report))
    except OSError:
        print_error(f"the report cannot be written to {str(path)!r}")


def _own_folder() -> str:
    """Return the folder of the package that runs as the program; empty where it is a script."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    package = sys.modules.get(spec.name.partition(".")[0]) if spec is not None else None
    return next(iter(getattr(package, "__path__", ())), "")


def _advise_about_arrays() -> None:
    """Advise `--jax_array=0` at exit, if the program enabled the GDA flag without effect."""
    values: list[bool] = []
    call_when_set(
        parallel_functions_output_gda, lambda: values.append(parallel_functions_output_gda.value)
    )
    call_when_set(jax_array, values.clear)

    def advise() -> None:
        if any(values):
            print(
                "note: the program turned jax_parallel_functions_output_gda on, which has no "
                "effect while jax_array is on: pjit returned jax.Arrays. For GlobalDeviceArrays "
                "write `xlashard legacy --jax_array=0 -- python ...`",
                file=sys.stderr,
            )

    at_exit(advise)


def _own_file(file: str) -> str:
    """Return the report file of this process, such as `uses.1.json` in a pod."""
    process = process_index()
    stem, suffix = os.path.splitext(file)
    return f"{stem}.{process}{suffix}" if process else file


def _typed(name: str, value: str | bool) -> Any:
    """Return a flag's value, converted to the type of its current value."""
    now = config.read(name)
    if isinstance(value, bool) or not isinstance(now, bool | int) or isinstance(now, bool):
        return value
    return int(value)


class _InstallOnUnpickle:
    """Object whose unpickling sets the flags and installs the names."""

    def __init__(self, flags: Mapping[str, Any], libraries: bool) -> None:
        self._flags = dict(flags)
        self._libraries = libraries

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Mapping[str, Any], bool]]:
        return _begin, (self._flags, self._libraries)


def _begin(flags: Mapping[str, Any], libraries: bool) -> None:
    set_flags(flags)
    install()
    if libraries:
        install_libraries()


def install_in_children(flags: Mapping[str, Any], libraries: bool = False) -> Callable[[], None]:
    """Install the names in all processes that `multiprocessing` spawns from now on.

    A spawned process imports the program's main module again, so the names must be installed
    before; forked processes inherit them.

    Args:
        flags: The flags of the command line, by name.
        libraries: True to install the names of other libraries too.

    Returns:
        A function that undoes it.
    """
    original = spawn.get_preparation_data

    def with_install(name: str) -> dict[str, Any]:
        return {**original(name), "xlashard.legacy": _InstallOnUnpickle(flags, libraries)}

    spawn.get_preparation_data = with_install

    def end() -> None:
        spawn.get_preparation_data = original

    return end


def join_pod() -> None:
    """Initialize this process of an emulated pod.

    The TPU runtime connected the processes of a pod in 2022, so programs did not call
    `jax.distributed.initialize()`; emulated devices have no such runtime. A later call of
    `jax.distributed.initialize()` has no effect.
    """
    if read_flags(os.environ).pod is None:
        return
    multihost.initialize()
    jax.distributed.initialize = lambda *args, **kwargs: None
