"""What a person names as `package.module:function`, as a program for a preflight."""

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from xlashard._jax.tracebacks import shortened
from xlashard.errors import ArgumentError, XlashardError
from xlashard.pjit import Lowered, Traced
from xlashard.sharding import Mesh
from xlashard.tpu.preflight.report.preflight_model import Workload
from xlashard.tpu.topologies import Topology

_NOT_THE_USERS = tuple(
    str(Path(module.__file__ or "").parent) for module in (jax, sys.modules["xlashard"], inspect)
)


@dataclass(frozen=True)
class TargetProgram:
    """A program for a preflight.

    Attributes:
        function: A function, or a stage of one.
        mesh: The mesh that its arguments lie on; None if they say that themselves.
        args: Its arguments, as shapes with shardings.
        kwargs: Those that go by name.
        workload: For a step of training, what it does.
    """

    function: Any
    mesh: Mesh | None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    workload: Workload | None = None


@shortened
def load_program(target: str, topology: Topology, axes: Mapping[str, int] | None) -> TargetProgram:
    """The program that a function gives.

    Args:
        target: `package.module:function`.
        topology: The devices.
        axes: Of the mesh, if that was said.

    Raises:
        XlashardError: If there is no such function, or it gives no program.
    """
    maker = load_function(target)
    mesh = None if axes is None else topology.mesh(axes)
    given = {}
    parameters = _parameters(maker)
    if "topology" in parameters:
        given["topology"] = topology
    if "mesh" in parameters:
        if mesh is None and parameters["mesh"].default is inspect.Parameter.empty:
            raise ArgumentError(
                f"{target} takes a mesh: write --mesh data={topology.num_devices}, with the axes "
                "that it names"
            )
        if mesh is not None:
            given["mesh"] = mesh
    missing = [
        name
        for name, p in parameters.items()
        if name not in (*given, "mesh")
        and p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if missing:
        raise ArgumentError(
            f"{target} takes {', '.join(missing)}, which nobody can give it here: a function for "
            "preflight takes nothing, or a mesh and a topology by these names"
        )
    with user_code_errors(f"{target} failed"):
        made = maker(**given)
    return _program(target, made, mesh)


def _parameters(maker: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(maker).parameters
    except ValueError:  # Some built-in functions don't tell.
        return {}


def _program(target: str, made: Any, mesh: Mesh | None) -> TargetProgram:
    """What a function gave, as a program."""
    if isinstance(made, Traced | Lowered):
        return TargetProgram(made, mesh)
    parts: tuple[Any, ...] = tuple(made) if isinstance(made, tuple | list) else ()
    workload = parts[2] if len(parts) == 3 else None
    if len(parts) not in (2, 3) or not callable(parts[0]) or not _is_workload(workload):
        raise ArgumentError(
            f"{target} gave {_described(made)}, not a function and its arguments: end it with "
            "`return step, (state, batch)`, and a Workload as the third for tokens per second"
        )
    function, arguments = parts[0], parts[1]
    if isinstance(arguments, Mapping):
        return TargetProgram(function, mesh, (), dict(arguments), workload)
    if not isinstance(arguments, tuple | list):
        raise ArgumentError(
            f"{target} gave its arguments as {type(arguments).__name__}: write a tuple of them, "
            "`return step, (state, batch)`, or a dict of those that go by name"
        )
    return TargetProgram(function, mesh, tuple(arguments), {}, workload)


def _is_workload(said: Any) -> bool:
    return said is None or isinstance(said, Workload)


def _described(made: Any) -> str:
    if isinstance(made, tuple | list):
        return f"a {type(made).__name__} of {', '.join(type(m).__name__ for m in made) or 'none'}"
    return type(made).__name__


def check_target(target: str) -> None:
    """Raises if a word can't name a program.

    Raises:
        ArgumentError: If it is neither a settings file nor `package.module:function`.
    """
    name, colon, attribute = target.partition(":")
    if target.endswith(".toml") or (colon and name and attribute and "/" not in name):
        return
    raise ArgumentError(
        f"{target!r} names no program: write CONFIG.toml, package.module:function, or the "
        "REPORT.json of an earlier preflight"
    )


@shortened
def load_function(target: str) -> Callable[..., Any]:
    """The function that `package.module:function` names, as `python -m` would find the module.

    Raises:
        ArgumentError: If there is no such module or function, or the module can't be imported.
    """
    check_target(target)
    name, _, attribute = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module = _module(name, target)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=2)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ArgumentError(f"{name} has no function {attribute}{meant}")
        found = getattr(found, part)
    if not callable(found):
        raise ArgumentError(f"{target} is no function, but {type(found).__name__}")
    return found


def _module(name: str, target: str) -> Any:
    try:
        with user_code_errors(f"{name} can't be imported"):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ArgumentError(f"{name} can't be imported: it needs {error.name}") from None
        raise ArgumentError(  # no-catalogue: the message names a folder
            f"there is no module {error.name} for {target}: it is looked for in {Path.cwd()} and "
            "among the installed packages"
        ) from None


class user_code_errors:
    """Within it, what goes wrong in a person's own code is told in one sentence with its line.

    What is raised on purpose by this package, and a module that is not there, passes as it is, and
    so does what no line of the person's code had a part in.

    Args:
        what: How the sentence begins: `steps:make failed`.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, XlashardError):
            return
        if isinstance(error, ModuleNotFoundError):
            return
        where = user_line(error)
        if where:
            said = " ".join(str(error).split("\n\n")[0].split())
            raise ArgumentError(
                f"{self._what} at {where}: {type(error).__name__}{': ' if said else ''}{said}"
            ) from error


def user_line(error: BaseException) -> str:
    """The innermost line of a person's own code behind an exception; empty if there is none.

    Example:
        >>> own_line(ValueError("never raised"))
        ''
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).is_file() and not _is_foreign(f.filename)]
    if not own:
        return ""
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}"


def _is_foreign(file: str) -> bool:
    return file.startswith(_NOT_THE_USERS) or "site-packages" in Path(file).parts
