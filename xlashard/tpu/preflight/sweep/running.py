"""What a process of a sweep does for one mesh: a preflight, and the facts of it."""

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from xlashard.errors import ArgumentError, XlashardError
from xlashard.sharding import Mesh
from xlashard.tpu.preflight.api import preflight
from xlashard.tpu.preflight.machine import describe_topology
from xlashard.tpu.preflight.parts import Workload
from xlashard.tpu.preflight.placing import placer
from xlashard.tpu.preflight.sweep.results import SweepFacts
from xlashard.tpu.preflight.sweep.store import Store
from xlashard.tpu.topologies import Topology, topology
from xlashard.wording import in_bytes


@dataclass(frozen=True)
class Program:
    """What is to be looked at on a mesh.

    Attributes:
        function: As `xlashard.preflight` takes it.
        args: Its arguments, as shapes with shardings on the mesh.
        kwargs: Its keyword arguments.
        workload: What one call of it does, for a step of training.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    workload: Workload | None = None


@dataclass(frozen=True)
class Request:
    """What a process of a sweep is asked.

    Attributes:
        target: What the program is made of, as its maker reads it.
        title: What the report calls it.
        topology: As libtpu writes it.
        slices: How many slices.
        mesh: Names and sizes of the axes.
        options: Options of the compiler.
        workload: What one call does, if the caller said so.
        folder: Where the report goes.
        key: Its name there.
    """

    target: Any
    title: str
    topology: str
    slices: int
    mesh: tuple[tuple[str, int], ...]
    options: Mapping[str, Any]
    workload: Mapping[str, Any] | None
    folder: str = ""
    key: str = ""

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "Request":
        """That of such JSON."""
        axes = tuple((str(name), int(size)) for name, size in said["mesh"])
        return cls(**{**said, "mesh": axes})

    def to_json(self) -> dict[str, Any]:
        """It as JSON says it."""
        return asdict(self)


def run_target(said: Mapping[str, Any]) -> dict[str, Any]:
    """Looks at a `module:function` on one mesh: the runner of Python's sweeps."""
    return look_at(Request.from_json(said), _of_target)


def _of_target(request: Request, mesh: Mesh) -> Program:
    return read_program(find_target(request.target), mesh)


def find_target(name: str) -> Callable[..., Any]:
    """The function that a target names.

    Raises:
        ArgumentError: If there is none.
    """
    module, colon, member = name.partition(":")
    if not colon or not module or not member:
        raise ArgumentError(f"{name!r} names no function: write package.module:function")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ArgumentError(f"{name}: {error}") from None
    for part in member.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ArgumentError(f"{name}: the module {module} has no function {member}")
    return found


def read_program(maker: Callable[..., Any], mesh: Mesh) -> Program:
    """What a function gives that makes the program of a mesh.

    Args:
        maker: Takes the mesh, or nothing; gives a function and its arguments.
        mesh: Of the topology's devices.

    Raises:
        ArgumentError: If it gives something else.
    """
    found = maker(mesh) if inspect.signature(maker).parameters else maker()
    function, *rest = found if isinstance(found, tuple) and found else (None,)
    args, kwargs = (*rest, *((), {})[len(rest) :])[:2] if len(rest) <= 2 else (None, None)
    if not callable(function) or not isinstance(args, tuple) or not isinstance(kwargs, Mapping):
        raise ArgumentError(
            f"{maker.__name__} gave {type(found).__name__}: it must give a function and its "
            "arguments, return f, (x, y), as shapes with shardings on the mesh that it is called "
            "with"
        )
    return Program(function, args, kwargs)


def look_at(request: Request, make: Callable[[Request, Mesh], Program]) -> dict[str, Any]:
    """Makes a program for one mesh, and says what becomes of it there.

    Args:
        request: Which mesh.
        make: Makes the program.

    Returns:
        Outcome, reason, facts and the place of the report, as a `SweepResult` has them.
    """
    try:
        place = topology(request.topology, request.slices)
        mesh = place.mesh(dict(request.mesh))
        program = make(request, mesh)
        too_much = _too_much(program, place, mesh)
        if too_much:
            return {"outcome": "out of memory", "reason": too_much}
        return _compiled(request, program, place, mesh)
    except XlashardError as error:
        return {"outcome": "impossible", "reason": str(error)}


def _compiled(request: Request, program: Program, place: Topology, mesh: Mesh) -> dict[str, Any]:
    workload = program.workload
    if request.workload is not None:
        workload = Workload(**request.workload)
    report = preflight(
        program.function,
        *program.args,
        topology=place,
        mesh=mesh,
        workload=workload,
        compiler_options=dict(request.options),
        title=request.title,
        **program.kwargs,
    )
    reason = ""
    if not report.fits:
        memory = report.memory
        reason = f"{in_bytes(memory.total_bytes)} of {in_bytes(memory.available_bytes)}"
    return {
        "outcome": report.outcome,
        "reason": reason,
        "facts": asdict(SweepFacts.of(report)),
        "report": Store(Path(request.folder)).keep_report(_report_name(request), report),
    }


def _report_name(request: Request) -> str:
    """A name that a person finds, and that no other result has."""
    slices = f"{request.slices}x" if request.slices > 1 else ""
    sizes = "-".join(f"{name}{size}" for name, size in request.mesh)
    return f"{slices}{request.topology.replace(':', '-')}.{sizes}.{request.key[:8]}"


def _too_much(program: Program, place: Topology, mesh: Mesh) -> str:
    """Why a program can't fit, whatever the compiler does; empty if it may."""
    leaves = jax.tree.leaves(jax.tree.map(placer(mesh), (program.args, dict(program.kwargs))))
    taken = sum(map(_device_bytes, leaves))
    available = describe_topology(place).available_bytes
    if taken <= available:
        return ""
    return (
        f"its arguments alone take {in_bytes(taken)} of the {in_bytes(available)} of each device, "
        "so it was not compiled"
    )


def _device_bytes(leaf: Any) -> int:
    if not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is None:
        return 0
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return 0
    shape = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize
