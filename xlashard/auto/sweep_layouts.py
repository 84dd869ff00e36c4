"""Automatic layouts of the candidates of a sweep: searched, and the most promising compiled."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from xlashard.auto.auto_program import read_program
from xlashard.auto.auto_shard import auto_shard
from xlashard.auto.problem import ProgramLayout
from xlashard.auto.proof import Prover
from xlashard.auto.search import Search
from xlashard.predict.preflight.target_loading import (
    TargetProgram,
    load_program,
    user_code_errors,
)
from xlashard.predict.sweep.evaluate import SweepRequest, evaluate_mesh
from xlashard.predict.sweep.sweep_results import SweepFacts
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.support.formatting import in_bytes

# Layouts whose predicted memory exceeds the device's by less rank by their time alone: predictions
# of memory may err by as much, and a compilation has the last word.
_MEMORY_EXCESS = 1.25
# Layouts of a candidate to compile. A sweep has many candidates, and each layout takes as long as a
# preflight.
_COMPILED_LAYOUTS = 2


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

    def rank(layout: ProgramLayout) -> tuple[float, float]:
        return max(layout.memory_bytes / problem.memory_bytes, _MEMORY_EXCESS), layout.seconds

    layouts = sorted(Search(problem, request.target["seconds"]).run(), key=rank)
    layout, outcome, how = layouts[0], "not compiled", " predicted"
    seconds, nbytes = layout.seconds, layout.memory_bytes
    if request.target["is_proven"]:
        with Prover(traced, problem.memory_bytes) as prover:
            proven = prover.prove(layouts, _COMPILED_LAYOUTS)[0]
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
    return {"outcome": outcome, "reason": reason, "layout": layout.name, "facts": asdict(facts)}


def run_target(values: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate a `module:function` in its automatic layout on one mesh of a sweep.

    Args:
        values: The request, as JSON.
    """
    return evaluate_mesh(SweepRequest.from_json(values), _load_with_layout)


def _load_with_layout(request: SweepRequest, place: BaseTopology) -> TargetProgram:
    program = load_program(request.target["name"], place, request.axes)
    settings: dict[str, Any] = {
        "mesh": program.mesh or request.axes,
        "topology": place,
        "rates": request.rates,
    }
    plan = auto_shard(program.function, *program.args, **settings, **program.kwargs)
    return TargetProgram(plan.lower_program(), program.mesh, workload=program.workload)
