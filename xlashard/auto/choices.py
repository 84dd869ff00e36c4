"""Automatic layouts of the candidates of a sweep, and the report of the layout that is chosen."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from xlashard.analysis.report.printable import Part, SerializableReport
from xlashard.auto.auto_program import read_program
from xlashard.auto.auto_shard import auto_shard
from xlashard.auto.plan.auto_plan import AutoPlan
from xlashard.auto.plan.plan_text import plan_details, plan_summary
from xlashard.auto.problem import ProgramLayout
from xlashard.auto.proof import Prover
from xlashard.auto.search import Search
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.predict.preflight.target_loading import (
    TargetProgram,
    load_program,
    user_code_errors,
)
from xlashard.predict.sweep.evaluate import SweepRequest, evaluate_mesh
from xlashard.predict.sweep.sweep_report import SweepReport
from xlashard.predict.sweep.sweep_results import SweepFacts
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.support.documents import ReportFormat
from xlashard.support.formatting import in_bytes

_CLOSE = 1.25
"""Layouts are compiled though their predicted memory exceeds the device's by this factor."""
_LAYOUTS = 2
"""Number of layouts of a candidate to compile."""
_FORMAT = 2


def try_layouts(
    request: SweepRequest, program: TargetProgram, place: BaseTopology
) -> dict[str, Any]:
    """Search the layouts of a candidate, and compile the most promising ones.

    Args:
        request: The request. Its target has `memory`, the share of a device's memory that the
            program may use, `seconds` that the search may take, and `is_proven`: whether layouts
            are compiled, instead of predicted.
        program: The program on the mesh.
        place: The topology.

    Returns:
        Outcome, reason, facts and layout, as in `SweepResult`.
    """
    with user_code_errors(f"{request.title} can't be traced"):
        traced = read_program(
            program.function, program.args, program.kwargs, program.mesh or request.axes, place
        )
    traced = traced.with_rates(request.rates)
    problem = traced.problem(request.target["memory"])

    def order(layout: ProgramLayout) -> tuple[float, float]:
        excess = max(layout.memory_bytes / problem.memory_bytes, _CLOSE)
        return (excess, layout.seconds)

    layouts = sorted(Search(problem, request.target["seconds"]).run(), key=order)
    layout, outcome, how = layouts[0], "not compiled", " predicted"
    seconds, nbytes = layout.seconds, layout.memory_bytes
    if request.target["is_proven"]:
        with Prover(traced, problem.memory_bytes) as prover:
            proven = prover.prove(layouts, _LAYOUTS)[0]
        if proven.compilation is None:
            return {"outcome": "impossible", "reason": proven.reason, "layout": proven.layout.name}
        layout, outcome, how = proven.layout, "fits", ""
        seconds, nbytes = proven.seconds, proven.memory_bytes
    reason = ""
    if nbytes > problem.memory_bytes:
        reason = f"{in_bytes(nbytes)} of {in_bytes(problem.memory_bytes)}{how}"
        outcome = "out of memory"
    tokens = None if program.workload is None else program.workload.tokens
    facts = SweepFacts(
        chips=place.chips,
        seconds=seconds,
        bound=None,
        total_bytes=round(nbytes),
        available_bytes=round(problem.memory_bytes),
        compile_seconds=0.0,
        tokens_per_second=tokens / seconds if tokens and seconds else None,
        chip=place.chip.name,
        links=place.chip.links,
    )
    answer = {"outcome": outcome, "reason": reason, "layout": layout.name}
    return {**answer, "facts": asdict(facts)}


def run_target(values: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate a `module:function` in its automatic layout on one mesh of a sweep.

    Args:
        values: The request, as JSON.
    """
    return evaluate_mesh(SweepRequest.from_json(values), _with_layout)


def _with_layout(request: SweepRequest, place: BaseTopology) -> TargetProgram:
    program = load_program(request.target["name"], place, request.axes)
    mesh = program.mesh or request.axes
    args, kwargs = program.args, program.kwargs
    plan = auto_shard(
        program.function, *args, mesh=mesh, topology=place, rates=request.rates, **kwargs
    )
    return TargetProgram(plan.lower_program(), program.mesh, workload=program.workload)


@dataclass(frozen=True, repr=False)
class LayoutReport(SerializableReport):
    """Layout that was chosen for a program, with its preflight. Written by `xlashard preflight`.

    Attributes:
        title: Source of the program: settings file, or `module:function`.
        tried: Meshes, batches and remat policies that were tried; None if there was no choice.
        plan: The layout.
        report: Preflight of the program with the layout.
    """

    _kind = "preflight"
    _footer = PreflightReport._footer
    _format = ReportFormat("layout report", _FORMAT, "xlashard preflight --shardings auto --json")

    title: str
    tried: SweepReport | None
    plan: AutoPlan
    report: PreflightReport

    def parts(self) -> Iterator[Part]:
        """Yield what was tried, the layout, and the preflight."""
        if self.tried is not None:
            yield from self.tried.tables()
        yield from plan_summary(self.plan)
        for section in plan_details(self.plan):
            yield replace(section, view="full")
        yield from self.report.parts()

    def page_name(self) -> str:
        """Return the name of the program on a page."""
        return self.title

    def page_title(self) -> str:
        """Return the title of its page."""
        return f"{self.title} on {self.plan.devices}"

    def __repr__(self) -> str:
        return f"<LayoutReport of {self.title}: {self.plan.outcome}; print it>"
