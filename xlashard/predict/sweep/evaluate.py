"""Request to evaluate a candidate of a sweep, its cache key, and its evaluation in a worker."""

import ast
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import jax

from xlashard._jax.runtime import executables
from xlashard._jax.runtime.topologies import cuda_plugin_version, libtpu_version
from xlashard._jax.trace.tracing import count_bytes
from xlashard.core.program.environment import flags_here
from xlashard.core.sharding import Mesh
from xlashard.errors import ArgumentError, IncompleteDumpError, XlashardError
from xlashard.predict.preflight.memory_breakdown import available_bytes
from xlashard.predict.preflight.mesh_mapping import argument_placer, find_topology
from xlashard.predict.preflight.preflight_run import preflight
from xlashard.predict.preflight.report.pricing import Workload
from xlashard.predict.preflight.target_loading import TargetProgram, load_program, user_code_errors
from xlashard.predict.sweep.sweep_results import ResultStore, SweepFacts
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.support.formatting import in_bytes
from xlashard.support.tracebacks import is_users_file


@dataclass(frozen=True)
class SweepRequest:
    """Request to evaluate one candidate: a mesh, and settings of the program on it.

    Attributes:
        target: JSON value that the runner turns into a program.
        title: Title of the report.
        topology: Name of the topology.
        slices: Number of slices.
        mesh: Mesh axis names and sizes.
        options: Compiler options.
        estimate: Whether to stop the compiler before code generation.
        kernel_costs: Costs of kernels by name.
        rates: Measured rates of the chip, if given.
        workload: Workload of a training step, if specified.
        batch: Sequences of a step; None for those of the target.
        remat: Remat policy; empty for that of the target.
        folder: Folder for the report.
        key: Cache key.
    """

    target: Any
    title: str
    topology: str
    slices: int
    mesh: tuple[tuple[str, int], ...]
    options: Mapping[str, Any]
    estimate: bool
    kernel_costs: Mapping[str, Any]
    rates: Mapping[str, Any] | None
    workload: Mapping[str, Any] | None
    batch: int | None = None
    remat: str = ""
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


RUNNERS = {
    None: "xlashard.predict.sweep.evaluate:run_target",
    "auto": "xlashard.auto.sweep_layouts:run_target",
}
"""Functions that evaluate one mesh in a worker process, by the shardings of the program."""


def runner_of(shardings: str | None) -> str:
    """Return the `module:function` that evaluates one mesh.

    Args:
        shardings: `auto` for automatic layouts, None for the shardings of the program.

    Raises:
        ArgumentError: If the shardings are others.
    """
    if not isinstance(shardings, str | None) or shardings not in RUNNERS:
        raise ArgumentError(
            f"shardings={shardings!r} is invalid: expected 'auto', or None for those of the target"
        )
    return RUNNERS[shardings]


def run_target(values: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate a `module:function` on one mesh; the default runner."""
    return evaluate_mesh(
        SweepRequest.from_json(values), lambda r, place: load_program(r.target, place, r.axes)
    )


def evaluate_mesh(
    request: SweepRequest,
    make: Callable[[SweepRequest, BaseTopology], TargetProgram],
    judge: Callable[[SweepRequest, TargetProgram, BaseTopology], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Load a program for one mesh and judge it.

    Args:
        request: The request.
        make: Function that returns the program for the mesh of a topology.
        judge: Function that returns the outcome of the program; None to compile it.

    Returns:
        Outcome, reason, facts and file of the report, as in `SweepResult`.
    """
    try:
        place = find_topology(request.topology, request.slices)
        return (judge or _compile)(request, make(request, place), place)
    except IncompleteDumpError as error:
        return {"outcome": "failed", "reason": str(error)}
    except XlashardError as error:
        return {"outcome": "impossible", "reason": str(error)}


def _compile(request: SweepRequest, program: TargetProgram, place: BaseTopology) -> dict[str, Any]:
    mesh = program.mesh or place.mesh(request.axes)
    too_much = _too_much(program, place, mesh)
    if too_much:
        return {"outcome": "out of memory", "reason": too_much}
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
            estimate=request.estimate,
            kernel_costs=request.kernel_costs,
            rates=request.rates,
            title=request.title,
            **program.kwargs,
        )
    if report.degraded:
        # Not kept: the next sweep tries again.
        return {"outcome": "failed", "reason": report.degraded}
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


def _too_much(program: TargetProgram, place: BaseTopology, mesh: Mesh) -> str:
    """Return the reason why arguments alone exceed the memory, or an empty string."""
    leaves = jax.tree.leaves(
        jax.tree.map(argument_placer(mesh), (program.args, dict(program.kwargs)))
    )
    nbytes = sum(map(_device_bytes, leaves))
    available = available_bytes(place.chip)
    if nbytes <= available:
        return ""
    return (
        f"not compiled: its arguments alone take {in_bytes(nbytes)} of the {in_bytes(available)} "
        f"of each device"
    )


def _device_bytes(leaf: Any) -> int:
    if not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is None:
        return 0
    return count_bytes(leaf, leaf.sharding.shard_shape(leaf.shape))


_PACKAGE = Path(__file__).parents[2]
_LENGTH = 24


def cache_key(request: Mapping[str, Any], sources: Sequence[Path] = ()) -> str:
    """Return the digest of a request, the user's sources, and all versions and flags.

    Args:
        request: Request as a JSON value.
        sources: Other files that the result depends on.
    """
    inputs = {
        "request": request,
        "sources": _digest_of_files(sources),
        "xlashard": _package_digest(),
        "jax": jax.__version__,
        "jaxlib": executables.jaxlib_version(),
        "libtpu": libtpu_version(),
        "cuda_plugin": cuda_plugin_version(),
        "flags": flags_here(),
        # Worker processes inherit the environment variables of JAX.
        "config": sorted((k, v) for k, v in os.environ.items() if k.startswith("JAX_")),
    }
    text = json.dumps(inputs, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


@lru_cache(maxsize=16)
def _package_digest() -> str:
    return _digest_of_files(sorted(_PACKAGE.rglob("*.py")))


def source_files(module: str) -> list[Path]:
    """Return the files of a module and its imports, without installed packages.

    Args:
        module: Name of an imported module.
    """
    files: dict[str, Path | None] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = getattr(sys.modules.get(name), "__file__", None)
        if name in files or not file or not file.endswith(".py"):
            continue
        files[name] = None
        path = Path(file).resolve()
        if is_users_file(file) and is_users_file(str(path)):
            files[name] = path
            waiting += _imports(path, name)
    return sorted(path for path in files.values() if path is not None)


def _imports(file: Path, module: str) -> Iterator[str]:
    """Yield the names of the modules that a file imports, including packages."""
    package = sys.modules[module].__package__ or ""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            name = f"{'.' * node.level}{node.module or ''}"
            base = resolve_name(name, package) if node.level else name
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _digest_of_files(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        try:
            content = file.read_bytes()
        except OSError:
            continue
        # Digest name and content, so that the folder doesn't matter.
        digest.update(f"{file.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
