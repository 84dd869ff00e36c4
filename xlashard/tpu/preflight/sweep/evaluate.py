"""Evaluate one mesh of a sweep in a worker process."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from xlashard._jax.trace.tracing import is_extended
from xlashard.errors import XlashardError
from xlashard.sharding import Mesh
from xlashard.tpu.preflight.api import preflight
from xlashard.tpu.preflight.argument_sharding import argument_placer
from xlashard.tpu.preflight.report.preflight_model import Workload
from xlashard.tpu.preflight.sweep.sweep_results import ResultStore, SweepFacts
from xlashard.tpu.preflight.target_loading import TargetProgram, load_program, user_code_errors
from xlashard.tpu.topologies import Topology, topology
from xlashard.wording import in_bytes


@dataclass(frozen=True)
class SweepRequest:
    """Request to evaluate one mesh.

    Attributes:
        target: JSON value that the runner turns into a program.
        title: Title of the report.
        topology: Name in libtpu.
        slices: Number of slices.
        mesh: Mesh axis names and sizes.
        options: Compiler options.
        workload: Workload of a training step, if specified.
        folder: Folder for the report.
        key: Cache key.
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
    def from_json(cls, values: Mapping[str, Any]) -> "SweepRequest":
        """Return the request of a JSON value."""
        axes = tuple((str(name), int(size)) for name, size in values["mesh"])
        return cls(**{**values, "mesh": axes})

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axis sizes by name."""
        return dict(self.mesh)

    def to_json(self) -> dict[str, Any]:
        """Return the request as a JSON value."""
        return asdict(self)


def run_target(values: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate a `module:function` on one mesh; the default runner."""
    return evaluate_mesh(
        SweepRequest.from_json(values), lambda r, place: load_program(r.target, place, r.axes)
    )


def evaluate_mesh(
    request: SweepRequest, make: Callable[[SweepRequest, Topology], TargetProgram]
) -> dict[str, Any]:
    """Load a program for one mesh and compile it.

    Args:
        request: The request.
        make: Function that returns the program for the mesh of a topology.

    Returns:
        Outcome, reason, facts and file of the report, as in `SweepResult`.
    """
    try:
        place = topology(request.topology, request.slices)
        program = make(request, place)
        mesh = program.mesh or place.mesh(request.axes)
        too_much = _too_much(program, place, mesh)
        if too_much:
            return {"outcome": "out of memory", "reason": too_much}
        return _compiled(request, program, place, mesh)
    except XlashardError as error:
        return {"outcome": "impossible", "reason": str(error)}


def _compiled(
    request: SweepRequest, program: TargetProgram, place: Topology, mesh: Mesh
) -> dict[str, Any]:
    workload = program.workload
    if request.workload is not None:
        workload = Workload(**request.workload)
    with user_code_errors(f"{request.title} can't be traced"):
        report = preflight(
            program.function,
            *program.args,
            topology=place,
            mesh=mesh,
            workload=workload,
            compiler_options=dict(request.options) or None,
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
        "report": ResultStore(Path(request.folder)).keep_report(_report_name(request), report),
    }


def _report_name(request: SweepRequest) -> str:
    """Return a readable, unique file name."""
    slices = f"{request.slices}x" if request.slices > 1 else ""
    sizes = "-".join(f"{name}{size}" for name, size in request.mesh)
    return f"{slices}{request.topology.replace(':', '-')}.{sizes}.{request.key[:8]}"


def _too_much(program: TargetProgram, place: Topology, mesh: Mesh) -> str:
    """Return the reason why arguments alone exceed the memory, or an empty string."""
    leaves = jax.tree.leaves(
        jax.tree.map(argument_placer(mesh), (program.args, dict(program.kwargs)))
    )
    taken = sum(map(_device_bytes, leaves))
    available = place.generation.available_bytes
    if taken <= available:
        return ""
    return (
        f"not compiled: its arguments alone take {in_bytes(taken)} of the {in_bytes(available)} "
        f"of each device"
    )


def _device_bytes(leaf: Any) -> int:
    if not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is None:
        return 0
    if is_extended(leaf):
        return 0
    shape = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize
