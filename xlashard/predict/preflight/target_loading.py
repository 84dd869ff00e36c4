"""Load the program that `package.module:function` names."""

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from xlashard._jax.trace.jitted import inner_stage
from xlashard._jax.trace.target_chip import assume_chip
from xlashard.core.sharding import Mesh
from xlashard.errors import ArgumentError, XlashardError
from xlashard.predict.preflight.report.pricing import Workload
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.predict.targets.mesh_layout import resolve_axis_sizes
from xlashard.support.tracebacks import is_users_file, shortened


@dataclass(frozen=True)
class TargetProgram:
    """A program for a preflight.

    Attributes:
        function: Function, or a stage.
        mesh: Mesh of the arguments; None if their shardings specify it.
        args: Positional arguments, as shapes with shardings.
        kwargs: Keyword arguments.
        workload: Workload of a training step.
    """

    function: Any
    mesh: Mesh | None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    workload: Workload | None = None


@shortened
def load_program(
    target: str, topology: BaseTopology | None, axes: Mapping[str, int] | None
) -> TargetProgram:
    """Call the target function and return its program.

    Args:
        target: Name: `package.module:function`.
        topology: Topology; None for the devices of this process.
        axes: Mesh axis sizes, if specified.

    Raises:
        XlashardError: If the function doesn't exist or returns no program.
    """
    function = load_function(target)
    mesh = None if axes is None else _mesh(topology, axes)
    keywords = {}
    parameters = _parameters(function)
    if "topology" in parameters:
        if topology is None:
            raise ArgumentError(  # no-catalogue: an error of `xlashard explain`
                f"{target} requires a topology, which explain has not: write xlashard preflight "
                f"--topology v5p-128 {target}"
            )
        keywords["topology"] = topology
    if "mesh" in parameters:
        if mesh is None and parameters["mesh"].default is inspect.Parameter.empty:
            devices = jax.device_count() if topology is None else topology.num_devices
            raise ArgumentError(
                f"{target} requires a mesh: write --mesh data={devices}, with its axis names"
            )
        if mesh is not None:
            keywords["mesh"] = mesh
    missing = [
        name
        for name, p in parameters.items()
        if name not in (*keywords, "mesh")
        and p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if missing:
        raise ArgumentError(
            f"{target} requires {', '.join(missing)}: the parameters of a preflight target are "
            f"mesh and topology, both optional"
        )
    # A function may return a stage, which it has traced itself.
    device = None if topology is None else topology.devices[0]
    with user_code_errors(f"{target} failed"), assume_chip(device):
        result = function(**keywords)
    return _program(target, result, mesh)


def _mesh(topology: BaseTopology | None, axes: Mapping[str, int]) -> Mesh:
    if topology is not None:
        return topology.mesh(axes)
    devices = jax.devices()
    sizes = resolve_axis_sizes(axes, len(devices), "this process")
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # Some built-in functions have no signature.
        return {}


def _program(target: str, result: Any, mesh: Mesh | None) -> TargetProgram:
    """Return the result of a target function as a program."""
    if inner_stage(result) is not None:
        return TargetProgram(result, mesh)
    parts: tuple[Any, ...] = tuple(result) if isinstance(result, tuple | list) else ()
    workload = parts[2] if len(parts) == 3 else None
    if (
        len(parts) not in (2, 3)
        or not callable(parts[0])
        or not isinstance(workload, Workload | None)
    ):
        raise ArgumentError(
            f"{target} returned {_described(result)}: expected a function and its arguments, "
            f"`return step, (state, batch)`, and optionally a Workload"
        )
    function, arguments = parts[0], parts[1]
    if isinstance(arguments, Mapping):
        return TargetProgram(function, mesh, (), dict(arguments), workload)
    if not isinstance(arguments, tuple | list):
        raise ArgumentError(
            f"{target} returned its arguments as {type(arguments).__name__}: expected a tuple, "
            f"`return step, (state, batch)`, or a dict of keyword arguments"
        )
    return TargetProgram(function, mesh, tuple(arguments), {}, workload)


def _described(result: Any) -> str:
    if isinstance(result, tuple | list):
        return (
            f"a {type(result).__name__} of {', '.join(type(m).__name__ for m in result) or 'none'}"
        )
    return type(result).__name__


def check_target(target: str) -> None:
    """Raise if a word can't name a program.

    Raises:
        ArgumentError: If the word is neither a settings file nor `package.module:function`.
    """
    name, colon, attribute = target.partition(":")
    if target.endswith(".toml") or (colon and name and attribute and "/" not in name):
        return
    raise ArgumentError(
        f"{target!r} is not a program: write CONFIG.toml, package.module:function, or the "
        "REPORT.json of an earlier preflight"
    )


@shortened
def load_function(target: str) -> Callable[..., Any]:
    """Return the function that `package.module:function` names, importing as `python -m` does.

    Raises:
        ArgumentError: If the module or function doesn't exist, or the import fails.
    """
    check_target(target)
    name, _, attribute = target.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = _module(name, target)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            near = difflib.get_close_matches(part, dir(value), n=2)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ArgumentError(f"{name} has no function {attribute}{meant}")
        value = getattr(value, part)
    if not callable(value):
        raise ArgumentError(f"{target} has type {type(value).__name__}, expected a function")
    return value


def _module(name: str, target: str) -> Any:
    try:
        with user_code_errors(f"{name} can't be imported"):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ArgumentError(f"{name} can't be imported: it requires {error.name}") from None
        raise ArgumentError(  # no-catalogue: the message names a folder
            f"no module named {error.name} for {target}, in {Path.cwd()} or among the installed "
            f"packages"
        ) from None


@contextmanager
def user_code_errors(what: str) -> Iterator[None]:
    """Report an exception of user code as one error with its line.

    Errors of this package, missing modules, and exceptions without a frame of user code propagate
    unchanged.

    Args:
        what: Start of the message: `steps:make failed`.
    """
    try:
        yield
    except (XlashardError, ModuleNotFoundError):
        raise
    except Exception as error:
        where = user_line(error)
        if not where:
            raise
        message = " ".join(str(error).split("\n\n")[0].split())
        raise ArgumentError(
            f"{what} at {where}: {type(error).__name__}{': ' if message else ''}{message}"
        ) from error


def user_line(error: BaseException) -> str:
    """Return the innermost line of user code in a traceback, or an empty string.

    Example:
        >>> user_line(ValueError("never raised"))
        ''
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).is_file() and is_users_file(f.filename)]
    if not own:
        return ""
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}"
