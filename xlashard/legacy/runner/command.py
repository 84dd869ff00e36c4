"""Reads the command line of `python -m xlashard.legacy`."""

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import jax

from xlashard import multihost
from xlashard._jax.coordination import process_index
from xlashard._jax.era import tell_when_set
from xlashard.config import read_flags
from xlashard.errors import ConfigError
from xlashard.legacy.installation.installer import INSTALLER, install
from xlashard.legacy.modes.config_flags import config, jax_array, parallel_functions_output_gda
from xlashard.legacy.runner.recorder import Recorder
from xlashard.legacy.runner.script import ProgramNotFoundError, ScriptOrModule, run
from xlashard.legacy.runner.usage_report import Report, json_of, show_report
from xlashard.wording import print_error

_USAGE = """\
usage: python -m xlashard.legacy [--report[=FILE]] [--FLAG=VALUE ...] script.py ARGS ...
       python -m xlashard.legacy [--report[=FILE]] [--FLAG=VALUE ...] -m module ARGS ..."""

_HELP = f"""{_USAGE}

Runs a program of 2022 or 2023 as it is: the names of JAX that it imports are there again.

  --report         at the end, list which of these names ran, from which lines, and what to write
                   today
  --report=FILE    write that list to a file, as JSON, for other programs
  --jax_array=0    any flag of JAX or of the era, as the program could set it itself:
                   --jax_parallel_functions_output_gda=1, --jax_enable_x64=1
  -m module        run a module, as `python -m module` does
  -h, --help       show this

Everything behind script.py or module is the program's own."""


class UsageError(Exception):
    """A command line that can't be understood; says what to write."""


@dataclass(frozen=True)
class RunCommand:
    """What a command line asks for.

    Attributes:
        program: What to run.
        report: Whether to report on the names that it uses.
        report_file: Where to write the report to, instead of showing it.
        flags: Flags to set before, by name.
    """

    program: ScriptOrModule
    report: bool = False
    report_file: str = ""
    flags: dict[str, str | bool] = field(default_factory=dict)


def read_command(words: Sequence[str]) -> RunCommand:
    """Reads a command line.

    Args:
        words: Without the program's name.

    Raises:
        UsageError: It makes no sense.

    Example:
        >>> read_command(["--jax_array=0", "train.py", "--steps=3"]).program
        ScriptOrModule(target='train.py', is_module=False, arguments=('--steps=3',))
    """
    report, file, flags = False, "", {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--"):
        name, equals, value = rest.pop(0).partition("=")
        if name == "--report":
            if equals and not value:
                # no-catalogue: an error of the command line
                raise UsageError("--report= needs the name of a file: --report=uses.json")
            report, file = True, value
        elif name.startswith(("--jax_", "--nojax_")):
            flags.update([_flag(name, equals, value)])
        else:
            # no-catalogue: an error of the command line
            raise UsageError(f"{name} is none of its options; those of the program go behind it")
    if rest[:1] == ["--"]:
        rest.pop(0)
    return RunCommand(_program(rest), report, file, flags)


def _flag(name: str, equals: str, value: str) -> tuple[str, str | bool]:
    if name.startswith("--no"):
        return name.removeprefix("--no"), False
    return name.removeprefix("--"), value if equals else True


def _program(words: list[str]) -> ScriptOrModule:
    is_module = words[:1] == ["-m"]
    if is_module:
        words = words[1:]
    if not words:
        what = "-m needs the name of a module" if is_module else "there is no program to run"
        raise UsageError(what)  # no-catalogue: an error of the command line
    return ScriptOrModule(words[0], is_module, tuple(words[1:]))


def main(words: Sequence[str]) -> int:
    """Runs a program with the era's names.

    Args:
        words: The command line without the program's name.

    Returns:
        The exit code, where the program itself did not end the process: 0 done, 2 wrong use.
    """
    if words[:1] in (["-h"], ["--help"]):
        print(_HELP)
        return 0
    try:
        command = read_command(words)
        flags = {name: _typed(name, value) for name, value in command.flags.items()}
        for name, value in flags.items():
            config.update(name, value)
    except (UsageError, ConfigError) as error:
        print(_USAGE, file=sys.stderr)
        print_error(error)
        return 2
    if "jax_array" not in flags and "JAX_ARRAY" not in os.environ:
        _advise_about_arrays()
    recorder = Recorder() if command.report else None
    if recorder is not None:
        # The last of all that the program leaves to be done at its end.
        atexit.register(_write_report, recorder, command.report_file)
        INSTALLER.install(recorder.listen)
        recorder.start()
    else:
        INSTALLER.install()
    join_pod()
    leave_children = install_in_children(flags)
    try:
        run(command.program)
    except ProgramNotFoundError as error:
        leave_children()
        INSTALLER.uninstall()
        if recorder is not None:
            recorder.end()
            atexit.unregister(_write_report)
        print_error(error)
        return 1 if command.program.is_module else 2
    return 0


def _write_report(recorder: Recorder, file: str) -> None:
    recorder.end()
    report = Report.of(recorder.uses(), _own_folder())
    if not file:
        show_report(report, sys.stderr)
        return
    try:
        Path(_own_file(file)).write_text(json_of(report), encoding="utf-8")
    except OSError as error:
        print_error(f"no report, for {error.filename!r} can't be written")


def _own_folder() -> str:
    """Return the folder of the package that runs as the program; empty where it is a script."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    package = sys.modules.get(spec.name.partition(".")[0]) if spec is not None else None
    return next(iter(getattr(package, "__path__", ())), "")


def _advise_about_arrays() -> None:
    """Name `--jax_array=0` at the end of a program that asks for GlobalDeviceArrays in vain."""
    asked: list[bool] = []
    tell_when_set(
        parallel_functions_output_gda, lambda: asked.append(parallel_functions_output_gda.value)
    )
    tell_when_set(jax_array, asked.clear)

    def advise() -> None:
        if any(asked):
            print(
                "note: the program turned jax_parallel_functions_output_gda on, which has no "
                "effect while jax_array is on: pjit returned jax.Arrays. For GlobalDeviceArrays "
                "write `python -m xlashard.legacy --jax_array=0 ...`",
                file=sys.stderr,
            )

    atexit.register(advise)


def _own_file(file: str) -> str:
    """The file of this process: in a pod each writes its own, `uses.1.json`."""
    process = process_index()
    stem, suffix = os.path.splitext(file)
    return f"{stem}.{process}{suffix}" if process else file


def _typed(name: str, value: str | bool) -> Any:
    """A flag's value of the type that it has now."""
    now = config.read(name)
    if isinstance(value, bool) or not isinstance(now, bool | int) or isinstance(now, bool):
        return value
    return int(value)


class _InstallOnUnpickle:
    """Where it is unpickled, the flags are set and the names are there."""

    def __init__(self, flags: Mapping[str, Any]) -> None:
        self._flags = dict(flags)

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Mapping[str, Any]]]:
        return _begin, (self._flags,)


def _begin(flags: Mapping[str, Any]) -> None:
    for name, value in flags.items():
        config.update(name, value)
    install()


def install_in_children(flags: Mapping[str, Any]) -> Callable[[], None]:
    """Gives the names to all processes that `multiprocessing` starts from now on.

    Those that it forks have them anyway; this is for `spawn` and `forkserver`.

    Args:
        flags: What the runner was told to set, by name.

    Returns:
        What ends that.
    """
    told = spawn.get_preparation_data

    def with_install(name: str) -> dict[str, Any]:
        return {**told(name), "xlashard.legacy": _InstallOnUnpickle(flags)}

    spawn.get_preparation_data = with_install

    def end() -> None:
        spawn.get_preparation_data = told

    return end


def join_pod() -> None:
    """Makes this process one of those of its emulated pod, if it is in one.

    A program that calls `jax.distributed.initialize()` afterwards is right as well: what it asks
    for is done.
    """
    if read_flags(os.environ).pod is None:
        return
    multihost.initialize()
    jax.distributed.initialize = _do_nothing


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for `jax.distributed.initialize`, whose work is done."""
