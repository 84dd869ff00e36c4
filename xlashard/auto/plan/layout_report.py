"""Report of a search for a layout: what was tried, the plan, and the preflight of its program."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from xlashard.auto.plan.auto_plan import AutoPlan
from xlashard.auto.plan.plan_model import Outcome
from xlashard.auto.plan.plan_text import COLOURS, plan_sections, plan_summary
from xlashard.documents import ReportFormat
from xlashard.pjit.report.html import render_page
from xlashard.pjit.report.tables import Page, SerializableReport, section, table
from xlashard.preflights.render.html import environment
from xlashard.preflights.report.preflight_report import PreflightReport
from xlashard.wording import in_amount, in_bytes, in_seconds

_FORMAT = 1
_REASON = 60


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
        reason = " ".join(self.reason.split())
        short = reason if len(reason) <= _REASON else f"{reason[: _REASON - 1]}…"
        return f"{self.outcome}: {short}" if short else self.outcome


@dataclass(frozen=True, repr=False)
class LayoutReport(SerializableReport):
    """Layout that was chosen for a program, with its preflight. Written by `xlashard preflight`.

    Attributes:
        title: Source of the program: settings file, or `module:function`.
        tried: Programs that were tried, the most promising first; empty if there was no choice.
        plan: The layout.
        report: Preflight of the program with the layout.
    """

    _format = ReportFormat("layout report", _FORMAT, "xlashard preflight --shardings auto --json")

    title: str
    tried: tuple[TriedLayout, ...]
    plan: AutoPlan
    report: PreflightReport

    def _sections(self, page: Page) -> Iterator[RenderableType | None]:
        if self.tried:
            yield _tried(self)
        yield from (
            plan_sections(self.plan, page) if page.is_full else plan_summary(self.plan, page)
        )
        yield from self.report._sections(page)

    def to_html(self) -> str:
        """Return the report as a self-contained HTML page, to be written in UTF-8."""
        template = environment(__package__ or "").get_template("layout.html")
        title = f"{self.title} on {self.plan.devices}"
        return render_page(
            template,
            title=title,
            kind="preflight",
            names=[self.title],
            reports=[self.report],
            dicts=[self.to_dict()],
            plan=self.plan,
            tried=self.tried,
        )

    def __repr__(self) -> str:
        return f"<LayoutReport of {self.title}: {self.plan.outcome}; print it>"


def _tried(report: LayoutReport) -> RenderableType:
    columns: dict[str, list[RenderableType]] = {
        "": ["→" if t.is_chosen else "" for t in report.tried],
        "mesh": [Text(t.axes, "bold" if t.is_chosen else "") for t in report.tried],
        ">batch": ["" if t.batch is None else f"{t.batch:,}" for t in report.tried],
        "remat": [t.remat for t in report.tried],
        "layout": [t.layout for t in report.tried],
        ">step": ["" if t.seconds is None else _step(t, t.seconds) for t in report.tried],
        ">tokens/s": [
            "" if t.tokens_per_second is None else in_amount(t.tokens_per_second)
            for t in report.tried
        ],
        ">memory": ["" if t.total_bytes is None else in_bytes(t.total_bytes) for t in report.tried],
        "verdict": [Text(t.verdict, COLOURS[t.outcome]) for t in report.tried],
    }
    known = {name: column for name, column in columns.items() if any(map(str, column))}
    body = table(list(known), list(zip(*known.values(), strict=True)))
    return section("Tried", "~ predicted by the search, the others compiled", body)


def _step(tried: TriedLayout, seconds: float) -> str:
    """Return the time of a step, marked if it is a prediction."""
    # A byte above the memory costs more than any time, so the sum of both is no time.
    if tried.outcome != "not compiled":
        return in_seconds(seconds)
    return "" if (tried.total_bytes or 0) > tried.available_bytes else f"~ {in_seconds(seconds)}"
