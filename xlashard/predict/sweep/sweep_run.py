"""`preflight_sweep`: compile every mesh shape of given topologies and rank them."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, Self

from xlashard.errors import ArgumentError, check_type
from xlashard.predict.costs.kernel_costs import KernelCost, KernelCosts, read_kernel_costs
from xlashard.predict.preflight.mesh_mapping import find_topology
from xlashard.predict.preflight.preflight_run import check_options
from xlashard.predict.preflight.report.measured import (
    Calibration,
    RatesSources,
    read_calibrations,
)
from xlashard.predict.preflight.report.pricing import Workload, parse_price
from xlashard.predict.preflight.target_loading import load_function
from xlashard.predict.sweep.axis_ranges import AxisRange, AxisSizes, factorisations, read_axes
from xlashard.predict.sweep.evaluate import (
    RUNNERS,
    SweepRequest,
    cache_key,
    runner_of,
    source_files,
)
from xlashard.predict.sweep.sweep_report import SweepProgress, SweepReport
from xlashard.predict.sweep.sweep_results import (
    ChipPrice,
    ResultStore,
    SkippedTopology,
    SweepFacts,
    SweepResult,
    ranked,
)
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.support.consoles import is_terminal
from xlashard.support.tracebacks import short_tracebacks
from xlashard.workers.dump_folder import remove_abandoned_folders
from xlashard.workers.job_pool import JobPool, WorkerJob, WorkerLimits, default_limits

type Prices = float | str | Mapping[str, float | str]
"""Cost per chip-hour of any generation, or by generation: `{"v5e": "1.2 USD"}`."""

type Meshes = Sequence[tuple[BaseTopology, Mapping[str, int]]]
"""Topologies with mesh axis sizes."""


@dataclass(frozen=True)
class Sweep:
    """Specification of a sweep.

    Attributes:
        title: Title of the reports.
        target: JSON value that the runner turns into a program.
        topologies: Topologies to try.
        axes: Valid sizes of each mesh axis; empty if its caller lists the meshes.
        runner: `module:function` that evaluates one mesh in a worker process.
        options: Compiler options.
        estimate: Whether to stop the compiler before code generation.
        kernel_costs: Costs of kernels by name.
        calibrations: Measured slowdowns by chip.
        workload: Workload of a training step.
        sources: Other files that results depend on.
    """

    title: str
    target: Any
    topologies: tuple[BaseTopology, ...]
    axes: Mapping[str, AxisRange] = field(default_factory=dict)
    runner: str = RUNNERS[None]
    options: tuple[tuple[str, Any], ...] = ()
    estimate: bool = False
    kernel_costs: Mapping[str, KernelCost] = field(default_factory=dict)
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    workload: Workload | None = None
    sources: tuple[Path, ...] = ()


def preflight_sweep(
    target: str | Callable[..., Any],
    *,
    topologies: str | BaseTopology | Sequence[str | BaseTopology],
    mesh: Mapping[str, AxisSizes],
    slices: int = 1,
    folder: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    timeout: float = 0.0,
    again: bool = False,
    workload: Workload | None = None,
    price: Prices | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    estimate: bool = False,
    kernel_costs: KernelCosts | None = None,
    rates: RatesSources | None = None,
    shardings: str | None = None,
    progress: bool = True,
) -> SweepReport:
    """Compile every mesh of some topologies and rank them by estimated step time.

    Worker processes compile the meshes in parallel. Results are cached in a folder, keyed by
    everything they depend on: another sweep there continues an interrupted one and compiles what
    has changed.

    Args:
        target: Function of a module, or `"package.module:function"`: it takes `mesh` and returns a
            function and its arguments, as shapes with shardings on that mesh, or a stage of one.
        topologies: Topologies: `"v5e-16"`, `["v5e-16", "v5p-16"]`.
        mesh: Valid sizes by axis name: `"auto"` for any, `"2..8"`, `4`.
        slices: Number of slices per topology.
        folder: Folder of the results. Default: a new temporary folder.
        workers: Number of worker processes. Default: as many as CPUs and memory allow.
        timeout: Timeout per mesh in seconds; 0 for none.
        again: Whether to recompile cached results.
        workload: Workload of a training step, for tokens per second and MFU.
        price: Cost per chip-hour, by generation where prices differ.
        compiler_options: Compiler options.
        estimate: Whether to stop the compiler before code generation, as `preflight` does.
        kernel_costs: Costs of kernels by name, as `preflight` takes them.
        rates: Files of measured rates, as `preflight` takes them, or several for several kinds of
            chips; a chip without one keeps the published rates.
        shardings: `"auto"` for the layout that `auto_shard` chooses on each mesh; None for the
            shardings of the target.
        progress: Whether to show a progress bar if standard error is a terminal.

    Returns:
        Results, best mesh first. `print(report)` displays them.

    Raises:
        ArgumentError: If the target is not a function of a module, no mesh is possible, or
            `kernel_costs`, `rates` or `shardings` is invalid.
        TopologyError: If a topology is unknown, or libtpu is missing.

    Example:
        >>> meshes = {"data": "auto", "model": "..8"}
        >>> report = preflight_sweep("model:step", "v5e-16", mesh=meshes)  # doctest: +SKIP
        >>> report.best.axes  # doctest: +SKIP
        'data=8 model=2'
    """
    check_options(workload, compiler_options)
    check_type("folder", folder, (str, os.PathLike, NoneType), "a path")
    check_type("workers", workers, (int, NoneType), "a number of processes")
    check_type("timeout", timeout, (int, float, NoneType), "seconds for each mesh, or 0")
    name = target_name(target)
    runner = runner_of(shardings)
    load_function(name)
    places = find_topologies(topologies, slices)
    sweep = Sweep(
        title=name,
        # Results of both kinds may lie in one folder.
        target=name if shardings is None else {"name": name, "shardings": shardings},
        runner=runner,
        topologies=places,
        axes=read_axes(mesh),
        options=tuple((compiler_options or {}).items()),
        estimate=estimate,
        kernel_costs=read_kernel_costs(kernel_costs),
        calibrations=read_calibrations(rates, [place.chip for place in places]),
        workload=workload,
        sources=tuple(source_files(name.partition(":")[0])),
    )
    prices = read_prices(price)
    limits = default_limits(workers, timeout)
    results = tempfile.mkdtemp(prefix="xlashard-sweep-") if folder is None else folder
    with (
        SweepProgress(shown=progress and is_terminal(sys.stderr)) as bar,
        SweepRunner(Path(results), limits, bar, again) as runner,
    ):
        return run_sweep(sweep, runner, prices)


def target_name(target: str | Callable[..., Any]) -> str:
    """Return the `module:function` that worker processes import."""
    if isinstance(target, str):
        return target
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    if not callable(target) or module in (None, "__main__") or "<" in name:
        raise ArgumentError(
            f"{name or target!r} can't be imported by worker processes: define it at the top "
            f"level of a module, preflight_sweep('module:function', ...)"
        )
    return f"{module}:{name}"


def find_topologies(
    names: str | BaseTopology | Sequence[str | BaseTopology], slices: int = 1
) -> tuple[BaseTopology, ...]:
    """Return the named topologies without duplicates."""
    requested: Sequence[Any] = names if isinstance(names, list | tuple) else [names]
    if not requested:
        raise ArgumentError("topologies is empty: write topologies=['v5e-16', 'v5p-16']")
    topologies = (find_topology(t, slices) for t in requested)
    return tuple(dict.fromkeys(topologies))


def read_prices(price: Prices | None) -> tuple[ChipPrice, ...]:
    """Parse the prices of a sweep."""
    if price is None:
        return ()
    by_generation = price if isinstance(price, Mapping) else {"": price}
    with short_tracebacks:
        prices = {name: parse_price(value) for name, value in by_generation.items()}
        return tuple(ChipPrice(name, p.chip_hour, p.currency) for name, p in prices.items())


@dataclass
class SweepRunner:
    """Evaluates candidates in worker processes, and keeps their results in a folder.

    A context manager, which ends the processes.

    Attributes:
        folder: Folder of the results.
        limits: Limits of the worker processes.
        progress: Progress display.
        again: Whether to evaluate candidates with a cached result.
        reused_results: Number of cached results so far.
    """

    folder: Path
    limits: WorkerLimits
    progress: SweepProgress
    again: bool = False
    reused_results: int = 0

    def __post_init__(self) -> None:
        self._pool = JobPool(self.limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()
        # Killed worker processes leave their folders.
        remove_abandoned_folders()

    def run(self, sweep: Sweep, requests: Iterable[SweepRequest]) -> tuple[SweepResult, ...]:
        """Evaluate the candidates without a cached result; return all of them, best first.

        Args:
            sweep: Specification of the sweep.
            requests: The candidates.
        """
        keyed = {cache_key(request.to_json(), sweep.sources): request for request in requests}
        store = ResultStore(self.folder)
        # Failed results are tried again.
        stored = {} if self.again else store.known()
        results = {k: r for k, r in stored.items() if k in keyed and r.outcome != "failed"}
        self.reused_results += len(results)
        self.progress.start(len(keyed), tuple(results.values()))
        jobs = [
            WorkerJob(
                key, sweep.runner, replace(request, folder=str(self.folder), key=key).to_json()
            )
            for key, request in keyed.items()
            if key not in results
        ]
        with contextlib.closing(self._pool.run(jobs)) as answers:
            for job, answer in answers:
                results[job.key] = _result(keyed[job.key], job.key, answer)
                store.keep(results[job.key])
                self.progress.update(results[job.key])
        return ranked(results.values())


def run_sweep(sweep: Sweep, runner: SweepRunner, prices: tuple[ChipPrice, ...] = ()) -> SweepReport:
    """Evaluate all meshes of a sweep, and rank their results.

    Args:
        sweep: Specification of the sweep.
        runner: Runner of its candidates.
        prices: Prices of chips.
    """
    meshes, without = _meshes(sweep)
    results = runner.run(sweep, (make_request(sweep, *mesh) for mesh in meshes))
    return SweepReport(
        sweep.title,
        str(runner.folder),
        results,
        runner.reused_results,
        prices,
        without,
        sweep.estimate,
    )


def make_request(sweep: Sweep, place: BaseTopology, sizes: Mapping[str, int]) -> SweepRequest:
    """Return the request to evaluate a mesh.

    Args:
        sweep: Specification of the sweep.
        place: The topology.
        sizes: Mesh axis sizes.
    """
    calibration = sweep.calibrations.get(place.chip.name)
    return SweepRequest(
        target=sweep.target,
        title=sweep.title,
        topology=place.name,
        slices=place.slices,
        mesh=tuple(sizes.items()),
        options=dict(sweep.options),
        estimate=sweep.estimate,
        kernel_costs={name: asdict(cost) for name, cost in sweep.kernel_costs.items()},
        rates=None if calibration is None else asdict(calibration),
        workload=None if sweep.workload is None else asdict(sweep.workload),
    )


def _meshes(sweep: Sweep) -> tuple[Meshes, tuple[SkippedTopology, ...]]:
    """Return all meshes, grouped by topology, and the topologies without one.

    Raises:
        ArgumentError: If no topology has a mesh with these axes.
    """
    meshes: list[tuple[BaseTopology, dict[str, int]]] = []
    refusals: list[tuple[BaseTopology, ArgumentError]] = []
    for place in sweep.topologies:
        try:
            meshes += ((place, sizes) for sizes in factorisations(place.num_devices, sweep.axes))
        except ArgumentError as error:
            refusals.append((place, error))
    if not meshes:
        raise refusals[0][1]  # no-catalogue: raises an error of factorisations() again
    return meshes, tuple(SkippedTopology(t.name, t.slices, str(error)) for t, error in refusals)


def _result(request: SweepRequest, key: str, answer: Mapping[str, Any]) -> SweepResult:
    facts = answer.get("facts")
    return SweepResult(
        key=key,
        topology=request.topology,
        slices=request.slices,
        mesh=request.mesh,
        outcome=answer["outcome"],
        reason=answer["reason"],
        facts=None if facts is None else SweepFacts(**facts),
        report=answer.get("report", ""),
        batch=request.batch,
        remat=request.remat,
        layout=answer.get("layout", ""),
    )
