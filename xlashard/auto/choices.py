"""Choice among programs, such as meshes, batches and remat policies, by their best layouts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xlashard.auto.auto_program import AutoProgram
from xlashard.auto.auto_shard import auto_shard
from xlashard.auto.plan.layout_report import TriedLayout
from xlashard.auto.problem import AutoProblem, ProgramLayout
from xlashard.auto.proof import ProvenLayout, Prover
from xlashard.auto.search import Search
from xlashard.errors import XlashardError
from xlashard.hardware.base_topology import BaseTopology
from xlashard.preflights.sweep.evaluate import SweepRequest, evaluate_mesh
from xlashard.preflights.target_loading import TargetProgram, load_program

_CLOSE = 1.25
"""Programs are compiled though their predicted memory exceeds the device's by this factor."""
_PROVEN = 3
"""Number of programs to compile."""
_LAYOUTS = 2
"""Number of layouts of each to compile."""


@dataclass(frozen=True)
class LayoutChoice:
    """Program to choose.

    Attributes:
        mesh: Mesh axes with their sizes.
        make: Returns the program, traced for the mesh, and the tokens of a step, by which the times
            of different batches compare; None if they are unknown.
        batch: Sequences of a step; None if the program has no such setting.
        remat: Remat policy; empty if the program has none.
    """

    mesh: tuple[tuple[str, int], ...]
    make: Callable[[], tuple[AutoProgram, int | None]]
    batch: int | None = None
    remat: str = ""


@dataclass(frozen=True, eq=False)
class PredictedChoice:
    """Choice with the layouts that a search found, or the reason why there are none.

    Attributes:
        choice: The choice.
        tried: Its line in the report.
        program: The program; None if it can't be made.
        problem: The problem of its layout; None likewise.
        layouts: Layouts, the most promising first.
        tokens: Tokens of a step; None if they are unknown.
    """

    choice: LayoutChoice
    tried: TriedLayout
    program: AutoProgram | None = None
    problem: AutoProblem | None = None
    layouts: tuple[ProgramLayout, ...] = ()
    tokens: int | None = None

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key: programs that may fit first, the fastest per token first."""
        if self.problem is None:
            return 2, 0.0
        best = self.layouts[0]
        if best.memory_bytes > _CLOSE * self.problem.memory_bytes:
            return 1, best.memory_bytes
        return 0, best.seconds / (self.tokens or 1)


def predict(
    choices: Iterable[LayoutChoice], memory: float, time_limit: float
) -> list[PredictedChoice]:
    """Search layouts for each of several programs; return them, the most promising first.

    Programs that can't be made, such as those whose mesh doesn't divide them, come last.

    Args:
        choices: The programs.
        memory: Share of a device's memory that a program may use.
        time_limit: Seconds that a search may take.
    """
    found = (_predicted(choice, memory, time_limit) for choice in choices)
    return sorted(found, key=lambda p: p.rank)


def _predicted(choice: LayoutChoice, memory: float, time_limit: float) -> PredictedChoice:
    tried = TriedLayout(choice.mesh, choice.batch, choice.remat)
    try:
        program, tokens = choice.make()
    except XlashardError as error:
        return PredictedChoice(choice, replace(tried, outcome="refused", reason=str(error)))
    problem = program.problem(memory)

    def order(layout: ProgramLayout) -> tuple[float, float]:
        excess = max(layout.memory_bytes / problem.memory_bytes, _CLOSE)
        return (excess, layout.seconds)

    layouts = sorted(Search(problem, time_limit).run(), key=order)
    best = layouts[0]
    line = replace(
        tried,
        layout=best.name,
        seconds=best.seconds,
        tokens_per_second=_rate(tokens, best.seconds),
        total_bytes=round(best.memory_bytes),
        available_bytes=round(problem.memory_bytes),
    )
    return PredictedChoice(choice, line, program, problem, tuple(layouts), tokens)


def prove(
    predicted: Sequence[PredictedChoice],
) -> tuple[PredictedChoice, list[TriedLayout]]:
    """Compile the most promising programs; return the best of them, and a line for each program.

    While none of them fits, the next ones are compiled.

    Args:
        predicted: Programs with layouts, the most promising first; at least one can be made.
    """
    proven: dict[int, tuple[PredictedChoice, ProvenLayout]] = {}
    for number, each in enumerate(predicted):
        if each.program is None or (number >= _PROVEN and any(p.fits for _, p in proven.values())):
            break
        proven[number] = each, _proof(each)
    best = min(proven, key=lambda n: _rank(*proven[n]))
    lines = [
        _line(*proven[number]) if number in proven else each.tried
        for number, each in enumerate(predicted)
    ]
    lines[best] = replace(lines[best], is_chosen=True)
    return predicted[best], lines


def _proof(each: PredictedChoice) -> ProvenLayout:
    """Return the best of the compiled layouts of a program."""
    program, problem = each.program, each.problem
    assert program is not None
    assert problem is not None
    with Prover(program, problem.memory_bytes) as prover:
        return prover.prove(each.layouts, _LAYOUTS)[0]


def _rank(each: PredictedChoice, proven: ProvenLayout) -> tuple[int, float]:
    group, value = proven.rank
    return group, value / (each.tokens or 1) if proven.fits else value


def _line(each: PredictedChoice, proven: ProvenLayout) -> TriedLayout:
    """Return the line of a program that was compiled."""
    if proven.compilation is None:
        return replace(
            each.tried,
            outcome="refused",
            reason=proven.reason,
            seconds=None,
            tokens_per_second=None,
            total_bytes=None,
        )
    return replace(
        each.tried,
        layout=proven.layout.name,
        outcome="fits" if proven.fits else "out of memory",
        seconds=proven.seconds,
        tokens_per_second=_rate(each.tokens, proven.seconds),
        total_bytes=proven.memory_bytes,
    )


def _rate(tokens: int | None, seconds: float) -> float | None:
    """Return the tokens per second; None if the tokens of a step are unknown."""
    return tokens / seconds if tokens and seconds else None


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
    return TargetProgram(plan.lower(), program.mesh, workload=program.workload)
