"""Programs and devices that the words of a command name."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress

import jax

from xlashard._jax.runtime.topologies import quiet_backends
from xlashard.analysis.explain.explain import explain, explain_call
from xlashard.analysis.explain.program_report import ProgramReport
from xlashard.cli.commands.option_words import read_mesh
from xlashard.errors import ArgumentError
from xlashard.predict.preflight.mesh_mapping import find_topology
from xlashard.predict.preflight.report.comparison import Limit, broken_limits
from xlashard.predict.preflight.report.measured import Calibration, read_calibrations
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.predict.preflight.target_loading import (
    TargetProgram,
    load_function,
    load_program,
    user_code_errors,
)
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.train.config.schema import to_toml
from xlashard.train.config.settings import load_settings


def quiet_start() -> None:
    """Keep JAX from initialising accelerators, which a preflight must not lock."""
    with suppress(RuntimeError):  # JAX is already initialised
        jax.config.update("jax_platforms", "cpu")


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
        # Needs the packages of the extra `train`, which a function of one's own does without.
        from xlashard.train.model.programs import training_step

        loaded = load_settings(target, settings)
        return training_step(loaded, place.mesh(loaded.mesh if axes is None else axes))
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


def load_axes_and_text(path: str, words: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Return the mesh axes of a settings file, and all settings as TOML.

    Args:
        path: A TOML file.
        words: `KEY=VALUE` words that override the file.
    """
    settings = load_settings(path, words)
    return tuple(settings.mesh), to_toml(settings)


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
