"""`preflight_sweep`: every mesh of every topology in question, compiled and ranked."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from xlashard.errors import ArgumentError
from xlashard.tpu.preflight.dump_folder import remove_abandoned_folders
from xlashard.tpu.preflight.report.preflight_model import Workload
from xlashard.tpu.preflight.report.pricing import parse_price
from xlashard.tpu.preflight.sweep.cache_key import cache_key, source_files
from xlashard.tpu.preflight.sweep.evaluate import SweepRequest
from xlashard.tpu.preflight.sweep.mesh_shapes import (
    AxisRange,
    AxisSizes,
    factorisations,
    read_axes,
)
from xlashard.tpu.preflight.sweep.sweep_report import SweepProgress, SweepReport
from xlashard.tpu.preflight.sweep.sweep_results import (
    ChipPrice,
    ResultStore,
    SkippedTopology,
    SweepFacts,
    SweepResult,
    ranked,
)
from xlashard.tpu.preflight.sweep.worker_pool import (
    SweepJob,
    WorkerLimits,
    default_limits,
    run_jobs,
)
from xlashard.tpu.preflight.target_loading import load_function
from xlashard.tpu.topologies import Topology, topology

type Prices = float | str | Mapping[str, float | str]
"""What a chip costs for an hour: of any generation, or by generation: `{"v5e": "1.2 USD"}`."""

type Meshes = Sequence[tuple[Topology, Mapping[str, int]]]
"""Topologies with the sizes of the axes of a mesh on each."""

_RUNNER = "xlashard.tpu.preflight.sweep.evaluate:run_target"


@dataclass(frozen=True)
class Sweep:
    """What is to be tried.

    Attributes:
        title: What was asked.
        target: What the program is made of, as the runner reads it; JSON can say it.
        topologies: Where.
        axes: Which sizes each mesh axis may have.
        runner: The `module:function` that looks at one mesh, in another process.
        options: Options of the compiler.
        workload: What one call does, for a step of training.
        sources: Files that the result depends on besides.
    """

    title: str
    target: Any
    topologies: tuple[Topology, ...]
    axes: Mapping[str, AxisRange]
    runner: str = _RUNNER
    options: tuple[tuple[str, Any], ...] = ()
    workload: Workload | None = None
    sources: tuple[Path, ...] = ()


def preflight_sweep(
    target: str | Callable[..., Any],
    *,
    topologies: str | Topology | Sequence[str | Topology],
    mesh: Mapping[str, AxisSizes],
    slices: int = 1,
    folder: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    timeout: float = 0.0,
    again: bool = False,
    workload: Workload | None = None,
    price: Prices | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> SweepReport:
    """Tries every mesh of some topologies, and ranks them by the estimated time of a step.

    Each mesh is compiled in one of several processes side by side. What they find is kept in a
    folder, under a digest of all that it depends on; a second sweep there goes on where the first
    one was stopped, and compiles what has changed.

    Args:
        target: A function in a module, or `"package.module:function"`: it takes `mesh` and returns
            a function and its arguments, as shapes with shardings on that mesh.
        topologies: The chips: `"v5e-16"`, `["v5e-16", "v5p-16"]`.
        mesh: By name the sizes that each mesh axis may have: `"auto"` for any, `"2..8"`, `4`.
        slices: How many slices of each topology there are.
        folder: Where the results are kept; by default one that goes with the machine's temporary
            files.
        workers: How many processes there are side by side; by default as many as this machine has
            processors and memory for.
        timeout: Seconds after which a mesh is given up; 0 for never.
        again: Whether to compile what is known, too.
        workload: For a step of training what it does, for tokens per second and utilisation.
        price: Of one chip for an hour; by generation where they differ.
        compiler_options: Options of the compiler.
        progress: Whether a bar shows how far it is, where the standard error is a terminal.

    Returns:
        What was found, the best mesh first. `print(report)` shows it.

    Raises:
        ArgumentError: If the target names no function of a module, or no mesh is possible.
        TopologyError: If there is no such topology, or libtpu is missing.
    """
    name = target_name(target)
    load_function(name)
    sweep = Sweep(
        title=name,
        target=name,
        topologies=find_topologies(topologies, slices),
        axes=read_axes(mesh),
        options=tuple((compiler_options or {}).items()),
        workload=workload,
        sources=tuple(source_files(name.partition(":")[0])),
    )
    prices = read_prices(price)
    limits = default_limits(workers, timeout)
    with SweepProgress(shown=progress) as bar:
        return run_sweep(sweep, _folder(folder), limits, bar, again=again, prices=prices)


def target_name(target: str | Callable[..., Any]) -> str:
    """The `module:function` by which other processes find a target."""
    if isinstance(target, str):
        return target
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    if not callable(target) or module in (None, "__main__") or "<" in name:
        raise ArgumentError(
            f"{name or target!r} can't be found by the processes of a sweep, which import it: put "
            "it on the top level of a module of its own, preflight_sweep('module:function', ...)"
        )
    return f"{module}:{name}"


def _folder(folder: str | os.PathLike[str] | None) -> Path:
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="xlashard-sweep-"))
    return Path(folder)


def find_topologies(
    names: str | Topology | Sequence[str | Topology], slices: int = 1
) -> tuple[Topology, ...]:
    """The topologies of some names, each once."""
    given = [names] if isinstance(names, str | Topology) else list(names)
    if not given:
        raise ArgumentError("a sweep needs a topology: topologies=['v5e-16', 'v5p-16']")
    found = (t if isinstance(t, Topology) else topology(t, slices) for t in given)
    return tuple(dict.fromkeys(found))


def read_prices(price: Prices | None) -> tuple[ChipPrice, ...]:
    """Prices as somebody wrote them."""
    if price is None:
        return ()
    by_generation = price if isinstance(price, Mapping) else {"": price}
    found = {name: parse_price(said) for name, said in by_generation.items()}
    return tuple(ChipPrice(name, p.chip_hour, p.currency) for name, p in found.items())


def run_sweep(
    sweep: Sweep,
    folder: Path,
    limits: WorkerLimits,
    progress: SweepProgress,
    *,
    again: bool = False,
    prices: tuple[ChipPrice, ...] = (),
) -> SweepReport:
    """Finds out what nobody knows yet, and ranks all.

    Args:
        sweep: What is to be tried.
        folder: Where the results are, and go.
        limits: How much the processes may take.
        progress: Hears of each result.
        again: Whether to find out again what is known.
        prices: Of chips.
    """
    meshes, without = _meshes(sweep)
    requests = _requests(sweep, meshes)
    store = ResultStore(folder)
    # What a process left unfinished may be found by another.
    known = {k: r for k, r in store.known().items() if k in requests and r.outcome != "failed"}
    if again:
        known = {}
    found = dict(known)
    progress.start(len(requests), tuple(known.values()))
    jobs = [
        SweepJob(key, sweep.runner, replace(request, folder=str(folder), key=key).to_json())
        for key, request in requests.items()
        if key not in known
    ]
    with contextlib.ExitStack() as stack:
        # Processes that were ended in their work leave some.
        stack.callback(remove_abandoned_folders)
        answers = stack.enter_context(contextlib.closing(run_jobs(jobs, limits)))
        for job, answer in answers:
            result = _result(requests[job.key], job.key, answer)
            store.keep(result)
            found[job.key] = result
            progress.update(result)
    results = ranked(found.values())
    return SweepReport(sweep.title, str(folder), results, len(known), prices, without)


def _requests(sweep: Sweep, meshes: Meshes) -> dict[str, SweepRequest]:
    """What is to be found out, by key."""
    found = {}
    for place, sizes in meshes:
        request = SweepRequest(
            target=sweep.target,
            title=sweep.title,
            topology=place.name,
            slices=place.slices,
            mesh=tuple(sizes.items()),
            options=dict(sweep.options),
            workload=None if sweep.workload is None else asdict(sweep.workload),
        )
        found[cache_key(request.to_json(), sweep.sources)] = request
    return found


def _meshes(sweep: Sweep) -> tuple[Meshes, tuple[SkippedTopology, ...]]:
    """All meshes, those of each topology together, and the topologies that have none.

    Raises:
        ArgumentError: If no topology has a mesh of these axes.
    """
    found: list[tuple[Topology, dict[str, int]]] = []
    refusals: list[tuple[Topology, ArgumentError]] = []
    for place in sweep.topologies:
        try:
            found += ((place, sizes) for sizes in factorisations(place.num_devices, sweep.axes))
        except ArgumentError as error:
            refusals.append((place, error))
    if not found:
        raise refusals[0][1]  # no-catalogue: raises an error of factorisations() again
    return found, tuple(SkippedTopology(t.name, t.slices, str(error)) for t, error in refusals)


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
    )
