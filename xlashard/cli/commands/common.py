"""Targets, parsing, files and terminal output shared by the commands."""

import argparse
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

import jax

from xlashard._jax.runtime.topologies import quiet_backends
from xlashard.analysis.explain.explain import explain, explain_call
from xlashard.analysis.explain.program_report import ProgramReport
from xlashard.errors import ArgumentError, TopologyError, XlashardError
from xlashard.predict.costs.kernel_costs import read_kernel_cost_words
from xlashard.predict.preflight.mesh_mapping import find_topology
from xlashard.predict.preflight.report.comparison import Limit, broken_limits
from xlashard.predict.preflight.report.measured import Calibration, read_calibrations
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.predict.preflight.report.pricing import parse_price
from xlashard.predict.preflight.target_loading import (
    TargetProgram,
    load_function,
    load_program,
    user_code_errors,
)
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.support.background import StopSignal, listening_to_signals
from xlashard.support.consoles import show_progress
from xlashard.support.documents import parse_json
from xlashard.support.formatting import printable
from xlashard.train.config.schema import to_toml
from xlashard.train.config.settings import load_settings
from xlashard.workers.dump_folder import remove_own_folders

# Seconds in which the main thread handles a signal, unless it compiles.
_PYTHON_TIMEOUT = 0.5


def quiet_start() -> None:
    """Keep JAX from initialising accelerators, which a preflight must not lock."""
    with suppress(RuntimeError):  # JAX is already initialised
        jax.config.update("jax_platforms", "cpu")


def command_line_message(error: XlashardError) -> str:
    """Return the message of an error, with command line arguments as the fix.

    Example:
        >>> from xlashard.errors import TopologyError
        >>> command_line_message(TopologyError("that is no mesh", axes={"data": 4, "model": 2}))
        'that is no mesh: write --mesh data=4,model=2'
    """
    if not isinstance(error, TopologyError):
        return str(error)
    if error.topology:
        return f"{error.problem}: write --topology {error.topology} --slices {error.slices}"
    if error.axes is None:
        return str(error)
    words = ",".join(f"{name}={size}" for name, size in error.axes.items())
    return f"{error.problem}: write --mesh {words}"


def read_mesh(text: str) -> dict[str, int]:
    """Parse the mesh axes of a command line.

    Raises:
        ArgumentError: If the text is invalid.

    Example:
        >>> read_mesh("data=8,model=4")
        {'data': 8, 'model': 4}
    """
    axes: dict[str, int] = {}
    for word in text.split(","):
        name, _, size = (part.strip() for part in word.partition("="))
        number = size.removeprefix("-")
        if not name.isidentifier() or not (number.isascii() and number.isdecimal()):
            raise ArgumentError(
                f"--mesh {text} is no list of axes and sizes ({word.strip()!r}): write --mesh "
                "data=8,model=4"
            )
        if name in axes:
            raise ArgumentError(f"--mesh {text} names the axis {name} twice")
        axes[name] = int(size)
    return axes


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """Parse compiler options of a command line.

    Raises:
        ArgumentError: If one has no value.

    Example:
        >>> read_options(["xla_a=true", "xla_b=3", "xla_c=fast"])
        {'xla_a': True, 'xla_b': 3, 'xla_c': 'fast'}
    """
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not (name and equals):
            raise ArgumentError(f"--option {word} has no value: write --option {name}=true")
        try:
            options[name] = parse_json(value)
        except ValueError:
            options[name] = value
    return options


def preflight_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a preflight as keywords of `preflight`, checked.

    Args:
        arguments: The words of `xlashard preflight`, parsed.

    Raises:
        ArgumentError: If the price, the time of a kernel or an option of the compiler is invalid.
    """
    if arguments.price is not None:
        parse_price(arguments.price)
    return {
        "price": arguments.price,
        "compiler_options": read_options(arguments.option) or None,
        "estimate": arguments.estimate,
        "kernel_costs": read_kernel_cost_words(arguments.kernel_cost),
        "values": arguments.values,
    }


def check_budget(report: PreflightReport, limits: Sequence[Limit], *, named: bool) -> bool:
    """Print to standard error why a program fails its budget; return whether it passes.

    Args:
        report: Report of the program.
        limits: Limits to check.
        named: Whether to name the program.
    """
    broken = broken_limits(report, limits)
    problems = [str(breach) for breach in broken]
    if not report.fits:
        problems.insert(0, "it does not fit")
    prefix = f"{report.title} on {report.topology.name}: " if named else ""
    if report.is_estimate:
        prefix += "estimate: "
    for text in problems:
        print(f"{prefix}{text}", file=sys.stderr)
    return not problems


@contextmanager
def status_line(what: str, *, spinner: bool = True) -> Iterator[None]:
    """Show long work in progress, and end it at Ctrl-C or SIGTERM, whatever it is doing.

    A terminal shows a spinner and the elapsed time; elsewhere a line appears on standard error
    every 15 s.

    Args:
        what: The work, such as `compiling step for v5p-128`.
        spinner: Whether to show the work in a terminal.

    Raises:
        StopSignal: At a signal, if the main thread runs Python. If it compiles, the process ends.
    """
    started = time.monotonic()
    with (
        show_progress(what, spinner=spinner, lines=True) as hide,
        _ending_at_signals(printable(what), started, hide),
    ):
        yield


@contextmanager
def _ending_at_signals(what: str, started: float, hide: Callable[[], None]) -> Iterator[None]:
    """Raise an exception at SIGINT and SIGTERM; exit if the main thread is not in Python.

    Args:
        what: The work.
        started: Time of its start.
        hide: Removes the status line from the terminal.
    """
    raised = threading.Event()
    seen = 0

    def message(number: int) -> str:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        return f"stopped by {name} after {time.monotonic() - started:.0f} s: {what}"

    def handle(number: int, _: FrameType | None) -> None:
        raised.set()
        raise StopSignal(message(number), number)

    def listen(number: int) -> None:
        nonlocal seen
        seen += 1
        # The second signal does not wait until the exception of the first has left the block.
        if seen == 1 and raised.wait(_PYTHON_TIMEOUT):
            return
        hide()
        print(message(number), file=sys.stderr, flush=True)
        remove_own_folders()
        # Python's own exit would wait for the main thread.
        os._exit(128 + number)

    with listening_to_signals(handle, listen):
        yield


def find_program(
    target: str, place: BaseTopology, axes: Mapping[str, int] | None, settings: Sequence[str]
) -> TargetProgram:
    """Return the program of a target.

    Args:
        target: `CONFIG.toml`, or `package.module:function`.
        place: The devices.
        axes: Mesh axis sizes, if specified.
        settings: `KEY=VALUE` words that override the settings file.

    Raises:
        XlashardError: If the file or function doesn't exist, or returns no program.
    """
    if target.endswith(".toml"):
        return _of_settings(target, place, axes, settings)
    if settings:
        raise ArgumentError(
            f"--set is invalid for {target}: expected a settings file such as configs/tiny.toml"
        )
    return load_program(target, place, axes)


def explain_target(target: str, mesh: str, values: str = "") -> ProgramReport:
    """Explain the program of a target on the devices of this process.

    Args:
        target: `package.module:function`.
        mesh: The words of `--mesh`; may be empty.
        values: The pattern of `--values`; may be empty.

    Raises:
        XlashardError: If the function doesn't exist, returns no program, or can't be compiled.
    """
    with quiet_backends():
        return _explain(target, read_mesh(mesh) if mesh else None, values)


def _explain(target: str, axes: Mapping[str, int] | None, values: str) -> ProgramReport:
    function = load_function(target)
    if hasattr(function, "lower"):
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            raise ArgumentError(
                f"{target} can't be called without arguments ({error}): name a function that "
                "returns it and its arguments, or write -- python SCRIPT.py that calls it"
            ) from None
        with user_code_errors(f"{target} can't be traced without arguments"):
            return explain(function, values=values)
    program = load_program(target, None, axes)
    on = nullcontext() if program.mesh is None else jax.set_mesh(program.mesh)
    with user_code_errors(f"{target} can't be traced"), on:
        return explain_call(program.function, program.args, program.kwargs, values)


def _of_settings(
    path: str, place: BaseTopology, axes: Mapping[str, int] | None, words: Sequence[str]
) -> TargetProgram:
    # Needs the packages of the extra `train`, which a function of one's own does without.
    from xlashard.train.model.programs import training_step

    settings = load_settings(path, words)
    mesh = place.mesh(settings.mesh if axes is None else axes)
    return training_step(settings, mesh)


def topologies_for(
    target: str, topologies: str, slices: int | None, words: Sequence[str]
) -> list[BaseTopology]:
    """Return the specified topologies, or those of the settings file.

    Args:
        target: `CONFIG.toml`, or `package.module:function`.
        topologies: Names of topologies, separated by commas; may be empty.
        slices: Number of slices of each, if specified.
        words: `KEY=VALUE` words that override the settings file.

    Raises:
        ArgumentError: If no topology is specified.
        XlashardError: If a topology or file is unknown.
    """
    names = [name.strip() for name in topologies.split(",") if name.strip()]
    if not names and target.endswith(".toml"):
        devices = load_settings(target, words).devices
        if devices.topology:
            names = [devices.topology]
            slices = devices.slices if slices is None else slices
    if not names:
        raise ArgumentError("for which chips? Write, for example, --topology v5p-128")
    return [find_topology(name, 1 if slices is None else slices) for name in names]


def read_calibration_files(
    text: str | None, places: Sequence[BaseTopology]
) -> dict[str, Calibration]:
    """Return the measured slowdowns of chips, by their names.

    Args:
        text: Files of `--rates`, separated by commas; None for none.
        places: Topologies to predict for.

    Raises:
        ArgumentError: If a file is invalid, or of another chip.
    """
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    return read_calibrations(names, [place.chip for place in places])


def settings_of(path: str, words: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Return the mesh axes of a settings file, and all settings as TOML.

    Args:
        path: A TOML file.
        words: `KEY=VALUE` words that override the file.
    """
    settings = load_settings(path, words)
    return tuple(settings.mesh), to_toml(settings)
