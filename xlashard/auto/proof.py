"""Proof of layouts: each is compiled for the mesh, and ranked by the time of its program.

The compiler of the mesh's devices decides what a layout is worth. On TPUs it stops before it
generates code. On devices that aren't TPUs, such as emulated ones, its module is costed at the
rates of the nominal chip, with one link per mesh axis.
"""

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp

from xlashard._jax import originals
from xlashard.analysis.explain.known_faults import find_known_faults
from xlashard.analysis.programs.program import Compilation, LoweredModule, Program
from xlashard.auto.auto_program import AutoProgram
from xlashard.auto.foreseen import unforeseen_collectives
from xlashard.auto.problem import OPEN, Machine, ProgramLayout, machine_of
from xlashard.core.sharding import Mesh, NamedSharding
from xlashard.errors import JaxVersionError
from xlashard.hlo.collectives import Collective, CollectiveTotal, summarize
from xlashard.predict.costs.models_by_target import operations_for
from xlashard.predict.costs.network_model import NetworkCost
from xlashard.predict.costs.schedule import walk_schedule
from xlashard.predict.preflight.compilation import (
    COMPILER_ERRORS,
    Estimate,
    compile_estimates,
    compile_for_report,
)
from xlashard.predict.preflight.memory_breakdown import device_allocations
from xlashard.predict.preflight.time_estimate import estimate_time, schedule_step
from xlashard.workers.job_pool import JobPool, WorkerLimits, default_limits

COMPILE_SECONDS = 300.0
"""Seconds that the compilation of one layout may take."""
_MOST_WORKERS = 4
_ROUNDS = 5
"""Timed runs of each program, after one that isn't timed."""


@dataclass(frozen=True, eq=False)
class ProvenLayout:
    """Layout whose program was compiled.

    Attributes:
        layout: The layout.
        seconds: Estimated time of a step; infinite if the compiler refused the program.
        memory_bytes: Memory of a device, without code.
        fits: Whether the memory suffices, and the compiler isn't known to get the program wrong.
        shares: Seconds of the step by the resource that the cores use or wait for.
        collectives: Collectives by kind and mesh axes, those that send most bytes first.
        unforeseen: Collectives that the layout did not foresee, with their costs, most expensive
            first.
        reason: The compiler's error, or what it is known to get wrong; empty if it accepted the
            program.
        compilation: The compiled program; None if it was refused.
        measured_seconds: Median time of a step on the devices; None if not measured.
        cpu_seconds: CPU time of the compilation.
    """

    layout: ProgramLayout
    seconds: float
    memory_bytes: int = 0
    fits: bool = False
    shares: tuple[tuple[str, float], ...] = ()
    collectives: tuple[CollectiveTotal, ...] = ()
    unforeseen: tuple[tuple[Collective, NetworkCost], ...] = ()
    reason: str = ""
    compilation: Compilation | None = None
    measured_seconds: float | None = None
    cpu_seconds: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """True if the program is refused because the compiler is known to get it wrong."""
        return self.compilation is None and self.seconds < float("inf")

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key: measured times first, then estimated ones, memory excess, and refusals."""
        if self.compilation is None:
            return 3, self.seconds
        if not self.fits:
            return 2, float(self.memory_bytes)
        return (1, self.seconds) if self.measured_seconds is None else (0, self.measured_seconds)


@dataclass(frozen=True, eq=False)
class ProvenLayouts:
    """Result of search and proof.

    Attributes:
        proven: Compiled layouts, best first.
        others: Layouts that were not compiled, best predicted first.
        gap: As of `Search`.
        least_seconds: As of `Search.least_seconds`.
    """

    proven: tuple[ProvenLayout, ...]
    others: tuple[ProgramLayout, ...]
    gap: float
    least_seconds: float


@dataclass
class _Budget:
    """Programs to compile, and CPU seconds within which more are compiled."""

    count: int
    seconds: float

    @property
    def lasts(self) -> bool:
        """True if another program may be compiled."""
        return self.count > 0 or self.seconds > 0


@dataclass(frozen=True, eq=False)
class _Candidate:
    """Program to compile: its layout, its text, and its compilation for a topology."""

    layout: ProgramLayout
    text: str
    program: LoweredModule
    estimate: Estimate | None


def _refused(layout: ProgramLayout, error: Exception) -> ProvenLayout:
    if isinstance(error, JaxVersionError):
        # No layout compiles without the name.
        raise error  # no-catalogue: needs another release of JAX
    return ProvenLayout(layout, float("inf"), reason=str(error))


class Prover:
    """Compiles layouts of one program.

    Programs for topologies are compiled by worker processes, for TPUs up to their code, so that a
    crash of the compiler costs its layout only; others in this process. A context manager, which
    ends the processes.

    Args:
        program: The program.
        memory_bytes: Memory of a device that the program may use.
        timeout: Seconds after which a worker process gives a compilation up; 0 for no limit.
    """

    def __init__(
        self, program: AutoProgram, memory_bytes: float, timeout: float = COMPILE_SECONDS
    ) -> None:
        self._program = program
        self._mesh, self._topology, self._rates = program.mesh, program.topology, program.rates
        self.memory_bytes = memory_bytes
        self._proven: dict[str, ProvenLayout] = {}
        self._texts: dict[Any, str] = {}  # By the specs of arguments and results, and inside.
        self._pool = JobPool(_limits(timeout)) if program.topology is not None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()

    @cached_property
    def _machine(self) -> Machine:
        return machine_of(self._mesh, self._topology, self._rates)

    def prove(
        self, layouts: Iterable[ProgramLayout], count: int, seconds: float = 0.0
    ) -> list[ProvenLayout]:
        """Compile layouts in order; return them, best first.

        Layouts with equal programs are compiled once; after the budget is spent, only equal specs
        count as such. One that the compiler refuses, or that crashes it, has the error.

        Args:
            layouts: Layouts, the most promising first.
            count: Number of programs to compile, whatever time that takes.
            seconds: CPU seconds of compilation within which further programs are compiled.
        """
        lowered: list[tuple[ProgramLayout, str]] = []
        refused: list[ProvenLayout] = []
        budget = _Budget(count, seconds)
        for text, proven in self._proofs(self._candidates(layouts, budget, lowered, refused)):
            budget.seconds -= proven.cpu_seconds
            self._proven[text] = proven
        compiled = [
            replace(self._proven[text], layout=layout)
            for layout, text in lowered
            if text in self._proven
        ]
        return sorted([*compiled, *refused], key=lambda p: p.rank)

    def prove_own(self, layout: ProgramLayout | None) -> list[ProvenLayout]:
        """Compile the layout that the program comes with; return it with the compiler's choices.

        No search predicts it: its predictions are the compiled figures.

        Args:
            layout: The layout, whose results may be `OPEN`; None if the program comes with none.

        Returns:
            The compiled layout; an empty list without one, or if the compiler refuses it.
        """
        for proven in () if layout is None else self.prove([layout], 1):
            if proven.compilation is None:
                continue
            _, shardings = proven.compilation.shardings
            chosen = [getattr(sharding, "spec", None) for sharding in shardings]
            specs = proven.layout.out_specs
            outs = tuple(s if o == OPEN else o for o, s in zip(specs, chosen, strict=False))
            if len(chosen) >= len(specs) and None not in outs:
                settled = replace(
                    proven.layout,
                    out_specs=outs,
                    seconds=proven.seconds,
                    memory_bytes=proven.memory_bytes,
                )
                return [replace(proven, layout=settled, unforeseen=())]
        return []

    def _candidates(
        self,
        layouts: Iterable[ProgramLayout],
        budget: "_Budget",
        lowered: list[tuple[ProgramLayout, str]],
        refused: list[ProvenLayout],
    ) -> Iterator["_Candidate"]:
        """Yield the programs to compile, while the budget lasts.

        Args:
            layouts: The layouts.
            budget: The budget.
            lowered: List that gets each layout with the text of its program.
            refused: List that gets the layouts without one.
        """
        texts = set(self._proven)
        for layout in layouts:
            specs = (layout.in_specs, layout.out_specs, layout.constraints)
            if specs in self._texts:
                lowered.append((layout, self._texts[specs]))
                continue
            if not budget.lasts:
                continue
            try:
                program = self._program.lower(layout)
                text = program.as_text()
                is_new = text not in texts
                estimate = Estimate.saved(program) if is_new and self._pool is not None else None
            except COMPILER_ERRORS as error:
                refused.append(_refused(layout, error))
                continue
            self._texts[specs] = text
            lowered.append((layout, text))
            if is_new:
                texts.add(text)
                budget.count -= 1
                yield _Candidate(layout, text, program, estimate)

    def _proofs(self, candidates: Iterable["_Candidate"]) -> Iterator[tuple[str, ProvenLayout]]:
        """Compile programs; those for topologies in worker processes."""
        if self._pool is None:
            for candidate in candidates:
                began = time.process_time()
                try:
                    proven = self._proof(candidate.layout, compile_for_report(candidate.program))
                except COMPILER_ERRORS as error:
                    proven = _refused(candidate.layout, error)
                # Other work of the machine has no say in what is compiled.
                yield candidate.text, replace(proven, cpu_seconds=time.process_time() - began)
            return
        started: dict[Estimate | None, _Candidate] = {}
        estimates = (started.setdefault(c.estimate, c).estimate for c in candidates)
        for estimate, compilation in compile_estimates(filter(None, estimates), self._pool):
            candidate = started.pop(estimate)
            if isinstance(compilation, Exception):
                proven = _refused(candidate.layout, compilation)
            else:
                proven = self._proof(candidate.layout, compilation)
            yield candidate.text, replace(proven, cpu_seconds=estimate.cpu_seconds)

    def _proof(self, layout: ProgramLayout, compilation: Compilation) -> ProvenLayout:
        topology, mesh = self._topology, self._mesh
        module = compilation.module
        collectives = module.collectives_on(mesh)
        if topology is None:
            rates = self._machine.rates
            costs = [(c, nominal_cost(c, self._machine, mesh)) for c in collectives]
            schedule = walk_schedule(module, costs, operations_for(module, rates), rates)
            seconds = schedule.seconds
        else:
            schedule = schedule_step(compilation, topology, mesh, rates=self._rates)
            time = estimate_time(compilation, topology, mesh, schedule=schedule, rates=self._rates)
            seconds = time.seconds
        memory = sum(a.size for a in device_allocations(module, topology))
        unforeseen = unforeseen_collectives(schedule.collectives, layout.transfers, mesh, seconds)
        proven = ProvenLayout(
            layout=layout,
            seconds=seconds,
            memory_bytes=memory,
            fits=not compilation.too_large and memory <= self.memory_bytes,
            shares=tuple(sorted(schedule.by_resource().items(), key=lambda item: -item[1])),
            collectives=summarize(collectives, mesh),
            unforeseen=tuple(unforeseen),
            compilation=compilation,
        )
        for fault, _ in find_known_faults(compilation):
            reason = f"jaxlib goes wrong: {fault.what}: {fault.advice}"
            return replace(proven, fits=False, reason=reason, compilation=None)
        return proven


def _limits(seconds: float) -> WorkerLimits:
    usual = default_limits(seconds=seconds)
    return usual if usual.workers <= _MOST_WORKERS else default_limits(_MOST_WORKERS, seconds)


def nominal_cost(collective: Collective, machine: Machine, mesh: Mesh) -> NetworkCost:
    """Return the network cost of a collective on a machine with one link per mesh axis.

    Args:
        collective: The collective.
        machine: Machine of the mesh.
        mesh: The mesh.
    """
    names = collective.axis_names(mesh)
    axes = [a for a in machine.axes if a.size > 1 and (names is None or a.name in names)]
    if not axes or not collective.sent_bytes:
        return NetworkCost()
    # Groups that follow no axes, and permutations, wait for the slowest of the links.
    together = names is not None and "permute" not in collective.kind
    speeds = [axis.bytes_per_second for axis in axes]
    latency = sum(axis.latency for axis in axes)
    seconds = collective.sent_bytes / (sum(speeds) if together else min(speeds))
    busy = tuple(axis.name for axis in axes)
    return NetworkCost(collective.sent_bytes, seconds, busy, expected_seconds=seconds + latency)


def measure(program: AutoProgram, layouts: Sequence[ProgramLayout], mesh: Mesh) -> list[float]:
    """Run the programs of layouts in turns; return the median seconds of each.

    Arguments are zeros.

    Args:
        program: The program.
        layouts: The layouts.
        mesh: Mesh of the devices to run on, with the axes of the program's.
    """
    compiled = [program.lower(layout, mesh).stage.compile() for layout in layouts]
    times: list[list[float]] = [[] for _ in layouts]
    for _ in range(_ROUNDS + 1):
        for layout, run, seconds in zip(layouts, compiled, times, strict=True):
            places = [NamedSharding(mesh, spec) for spec in layout.in_specs]
            seconds.append(_run_once(run, program.program, places))
    return [statistics.median(seconds[1:]) for seconds in times]


def _run_once(compiled: Any, program: Program, places: Sequence[NamedSharding]) -> float:
    """Return the seconds of one run; its arguments are made anew, because it may donate them."""
    zeros = originals.jit(lambda: [_zero(value.aval) for value in program.arguments])()
    values = originals.device_put(zeros, list(places))
    args, kwargs = program.in_tree.unflatten(jax.block_until_ready(values))
    started = time.perf_counter()
    jax.block_until_ready(compiled(*args, **kwargs))
    return time.perf_counter() - started


def _zero(aval: Any) -> Any:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0, impl=aval.dtype._impl), aval.shape)
    return jnp.zeros(aval.shape, aval.dtype)
