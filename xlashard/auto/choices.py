"""Choice among programs, such as meshes, batches and remat policies, by their best layouts.

The report of a choice lists what was tried, the plan, and the preflight of its program.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xlashard.analysis.report.cells import Span, TableCell, join_cell
from xlashard.analysis.report.parts import Column, Section
from xlashard.analysis.report.printable import Part, SerializableReport
from xlashard.auto.auto_program import AutoProgram
from xlashard.auto.auto_shard import auto_shard
from xlashard.auto.plan.auto_plan import AutoPlan
from xlashard.auto.plan.plan_model import Outcome
from xlashard.auto.plan.plan_text import OUTCOME_STYLES, outcome_text, plan_details, plan_summary
from xlashard.auto.problem import AutoProblem, ProgramLayout
from xlashard.auto.proof import ProvenLayout, Prover
from xlashard.auto.search import Search
from xlashard.errors import XlashardError
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.predict.preflight.target_loading import TargetProgram, load_program
from xlashard.predict.sweep.evaluate import SweepRequest, evaluate_mesh
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.support.documents import ReportFormat
from xlashard.support.formatting import in_amount, in_bytes, in_seconds

_CLOSE = 1.25
"""Programs are compiled though their predicted memory exceeds the device's by this factor."""
_PROVEN = 3
"""Number of programs to compile."""
_LAYOUTS = 2
"""Number of layouts of each to compile."""
_FORMAT = 1


@dataclass(frozen=True)
class TriedLayout:
    """Program that was tried, in its best layout.

    Attributes:
        mesh: Mesh axes with their sizes.
        batch: Sequences of a step; None if the program has no such setting.
        remat: Remat policy; empty if the program has none.
        layout: Name of the layout.
        outcome: Verdict; `not compiled` if others were more promising.
        seconds: Time of a step, predicted if it wasn't compiled; None if no layout was found.
        tokens_per_second: Tokens of a step by its time; None if they are unknown.
        total_bytes: Memory of a device; None if no layout was found.
        available_bytes: Memory of a device that the program may use.
        reason: Why there is no layout, or empty.
        is_chosen: True for the program of the plan.
    """

    mesh: tuple[tuple[str, int], ...]
    batch: int | None = None
    remat: str = ""
    layout: str = ""
    outcome: Outcome = "not compiled"
    seconds: float | None = None
    tokens_per_second: float | None = None
    total_bytes: int | None = None
    available_bytes: int = 0
    reason: str = ""
    is_chosen: bool = False

    @property
    def axes(self) -> str:
        """Mesh axes with their sizes, those of more than one device: `data=8 model=2`."""
        longer = [(name, size) for name, size in self.mesh if size > 1] or self.mesh
        return " ".join(f"{name}={size}" for name, size in longer)

    @property
    def verdict(self) -> str:
        """Outcome with what exceeds the memory, or with the reason."""
        if self.total_bytes is not None and self.total_bytes > self.available_bytes:
            excess = f"{in_bytes(self.total_bytes - self.available_bytes)} too much"
            return f"{self.outcome}: {excess}" if self.outcome == "out of memory" else excess
        return outcome_text(self.outcome, self.reason)


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
    predictions = (_predicted(choice, memory, time_limit) for choice in choices)
    return sorted(predictions, key=lambda p: p.rank)


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
    return TargetProgram(plan.lower_program(), program.mesh, workload=program.workload)


@dataclass(frozen=True, repr=False)
class LayoutReport(SerializableReport):
    """Layout that was chosen for a program, with its preflight. Written by `xlashard preflight`.

    Attributes:
        title: Source of the program: settings file, or `module:function`.
        tried: Programs that were tried, the most promising first; empty if there was no choice.
        plan: The layout.
        report: Preflight of the program with the layout.
    """

    _kind = "preflight"
    _footer = PreflightReport._footer
    _format = ReportFormat("layout report", _FORMAT, "xlashard preflight --shardings auto --json")

    title: str
    tried: tuple[TriedLayout, ...]
    plan: AutoPlan
    report: PreflightReport

    def parts(self) -> Iterator[Part]:
        """Yield what was tried, the layout, and the preflight."""
        yield _TRIED.with_rows(self.tried)
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


def _step_cell(tried: TriedLayout) -> TableCell | None:
    """Return the time of a step, marked if it is a prediction."""
    seconds = tried.seconds
    is_predicted = tried.outcome == "not compiled"
    # A byte above the memory costs more than any time, so the sum of both is no time.
    if seconds is None or (is_predicted and (tried.total_bytes or 0) > tried.available_bytes):
        return None
    return join_cell(f"{'~ ' * is_predicted}{in_seconds(seconds)}", key=seconds)


def _rate_cell(tried: TriedLayout) -> TableCell | None:
    rate = tried.tokens_per_second
    return None if rate is None else join_cell(in_amount(rate), key=rate)


_TRIED = Section[TriedLayout](
    "tried",
    "Tried",
    "~ predicted by the search, the others compiled",
    columns=(
        Column("", lambda t: "→" if t.is_chosen else "", "", "chosen"),
        Column("mesh", lambda t: Span(t.axes, "strong" if t.is_chosen else "name")),
        Column(
            ">batch",
            lambda t: None if t.batch is None else join_cell(f"{t.batch:,}", key=t.batch),
            tip="Sequences of a step",
        ),
        Column("remat", "remat"),
        Column("layout", "layout"),
        Column(">step", _step_cell, tip="Predicted, if it wasn't compiled"),
        Column(">tokens/s", _rate_cell),
        Column(">memory", "total_bytes", "bytes", "On each device"),
        Column("verdict", lambda t: Span(t.verdict, OUTCOME_STYLES[t.outcome])),
    ),
    row_name=lambda t: f"{t.axes} {t.batch or ''} {t.remat}",
    most=10**6,
)
