"""Report of the layout that `xlashard preflight --shardings auto` has chosen."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from xlashard.analysis.report.printable import Part, SerializableReport
from xlashard.auto.plan.auto_plan import AutoPlan
from xlashard.auto.plan.plan_text import plan_details, plan_summary
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.predict.sweep.sweep_report import SweepReport
from xlashard.support.documents import ReportFormat


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
    _format = ReportFormat("layout report", 2, "xlashard preflight --shardings auto --json")

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
