"""Every kind of report in every view, from fixed values."""

import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from tests.analysis.explain.test_text import HERE, collective, report
from tests.goldens import check_golden, check_no_others, join_sections
from tests.predict.preflight.examples import FITTING, OUT_OF_MEMORY, SMALL
from tests.predict.sweep.test_sweep_results import FOUND
from xlashard.analysis.explain.comparison import compare_programs
from xlashard.analysis.explain.model import DonationReport, ValueReport
from xlashard.analysis.explain.script_report import (
    OmittedPrograms,
    ScriptProgram,
    ScriptReport,
    compare_scripts,
)
from xlashard.analysis.recompile.call_differences import CallDifference
from xlashard.analysis.recompile.recompile_report import Explanation, RecompileReport
from xlashard.auto.layout_report import LayoutReport
from xlashard.auto.plan.auto_plan import AutoPlan
from xlashard.auto.plan.plan_model import HeldMemory, PlannedConstraint, PlannedLayout
from xlashard.hlo.collectives import CollectiveTotal
from xlashard.predict.preflight.report.comparison import PreflightReports, compare
from xlashard.predict.sweep.sweep_report import SweepReport
from xlashard.predict.sweep.sweep_results import (
    ChipPrice,
    SkippedTopology,
    SweepFacts,
    SweepResult,
    ranked,
)

GOLDENS = Path(__file__).parent / "goldens"
MIB = 2**20

PROGRAM = report(
    unmet=FITTING.unmet,
    repeated=FITTING.repeated,
    constants=FITTING.constants,
    forgotten="the sharding of arguments",
    donations=(
        DonationReport("state['w']", True, "result[0]['w']", MIB),
        DonationReport("lost", True, "", 2 * MIB),
        DonationReport("batch", False, "result[1]", 3 * MIB),
    ),
    collectives=(
        collective(),
        collective("all-reduce", 9, conditional=True, asynchronous=True, times_known=False),
        collective(argument="params['w']", op_name="params['w']", groups=((0, 3), (1, 2))),
    ),
)
SCRIPT = ScriptReport(
    "train.py",
    "failed",
    "exit code 1",
    (
        ScriptProgram("step", "train.py:3", "train.py:9", 3, report()),
        ScriptProgram("step", "train.py:3", "train.py:9", 2, PROGRAM),
        ScriptProgram("odd", "train.py:4", "train.py:8", 0, None, "the reason"),
    ),
    OmittedPrograms(3, 7, "add", 2048),
)
INPUT = ValueReport("w", (8, 4), "float32", "P('data')", "auto", 128, 16, 1, runner_up="P()")
PLAN = AutoPlan(
    name="step",
    devices="v5e:2x4",
    mesh=(("data", 8),),
    outcome="fits",
    memory_bytes=2**34,
    inputs=(INPUT, replace(INPUT, path="x", decided_by="caller", runner_up="")),
    outputs=(replace(INPUT, path="result", runner_up=""),),
    constraints=(PlannedConstraint("dot_general", "result", 0, "float32[8,4]", "P()", HERE, (3,)),),
    layouts=(
        PlannedLayout("data", "fits", 0.1, 2**30, 0.125, 2**31),
        PlannedLayout("whole", "refused", 0.2, 2**32, reason="compiling step failed: the reason"),
        PlannedLayout("other", "not compiled", 0.3, 2**33),
    ),
    collectives=(CollectiveTotal("all-gather", "data", 1, 2, 0, 0, MIB, MIB),),
    shares=(("matrix", 0.1), ("ici", 0.025)),
    fingerprint="0",
    unforeseen=(collective(seconds=0.5, network="ici"),),
    gap=0.02,
    least_seconds=0.09,
    unknown_primitives=("mystery",),
    held=(HeldMemory("w", "float32[8,4]", 128), HeldMemory("sin", "f32[8]", 32, HERE)),
    smallest_slice="v5e-16",
)
TRIED = (
    SweepResult(
        *("a", "v5e:2x4", 1, (("data", 8),), "fits", ""),
        facts=SweepFacts(8, 0.5, None, 2**33, 2**34, 0.0, 1e6),
        **{"batch": 64, "remat": "full", "layout": "data"},
    ),
    SweepResult("b", "v5e:2x4", 1, (("data", 4), ("model", 2)), "impossible", "8 heads in 16"),
)
MISSES = (
    Explanation(1, "compilation", "a.py", 3, 0.01, 0.02, 1.5, "the compiler", "first", None, ()),
    Explanation(
        *(2, "tracing", "a.py", 4, 0.01, None, None, None, "differs", 1),
        (CallDifference("shape", "x", "float32[8]", "float32[9]"),),
    ),
)
REPORTS = {
    "program": PROGRAM,
    "program_comparison": compare_programs(report(), PROGRAM),
    "script": SCRIPT,
    "script_comparison": compare_scripts(replace(SCRIPT, programs=SCRIPT.programs[:1]), SCRIPT),
    "preflight": FITTING,
    "preflight_out_of_memory": OUT_OF_MEMORY,
    "preflight_comparison": compare(FITTING, OUT_OF_MEMORY),
    "preflights": PreflightReports((FITTING, OUT_OF_MEMORY, SMALL)),
    "sweep": SweepReport(
        *("steps:make", "sweeps", ranked(FOUND), 2),
        prices=(ChipPrice("v5e", 1.2, "USD"),),
        skipped_topologies=(SkippedTopology("v5e:1x1", 1, "no mesh of these axes"),),
    ),
    "plan": PLAN,
    "layout": LayoutReport("steps:make", SweepReport("steps:make", "", TRIED), PLAN, SMALL),
    "recompile": RecompileReport("step", MISSES, (), 0, ("pad x to one size",)),
}


class _Text(HTMLParser):
    """Visible text of a page, with a line for each row, sentence and figure, but of no chips."""

    _BLOCKS = frozenset({"p", "tr", "h1", "h2", "h3", "dt", "li", "a", "text", "svg", "label"})
    _SILENT = frozenset({"script", "style"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.lines: list[str] = [""]
        self._silent = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        is_silent = tag in self._SILENT or dict(attrs).get("class") == "planes"
        self._silent = self._silent or (tag if is_silent else "")
        if tag in self._BLOCKS:
            self.lines.append("")
        if tag in ("td", "dd"):
            self.lines[-1] += " | "

    def handle_endtag(self, tag: str) -> None:
        self._silent = "" if tag == self._silent else self._silent
        if tag in self._BLOCKS or tag in ("table", "dd"):
            self.lines.append("")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.lines[-1] += data

    def __str__(self) -> str:
        lines = (" ".join(line.split()).removeprefix("| ") for line in self.lines)
        return "\n".join(filter(None, lines))


def _printed(shown, width: int, *, all: bool = False) -> str:
    file = io.StringIO()
    shown.print(console=Console(file=file, width=width, color_system=None), all=all)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_in_every_view(name: str, update_goldens: bool) -> None:
    shown = REPORTS[name]
    views = {
        "terminal, 80 columns": _printed(shown, 80),
        "terminal, 120 columns, all": _printed(shown, 120, all=True),
        "Markdown": shown.to_markdown(),
        "notebook": str(_Text(shown._repr_html_())),
        # Of several reports, those of the other panels have goldens of their own.
        "page": str(_Text("".join(re.split('(class="panel")', shown.to_html())[:3]))),
    }
    check_golden(GOLDENS / f"{name}.txt", join_sections(views), update=update_goldens)


def test_no_other_goldens(update_goldens: bool) -> None:
    check_no_others(GOLDENS, {f"{name}.txt" for name in REPORTS}, update=update_goldens)


@pytest.mark.parametrize("name", REPORTS)
def test_every_section_row_and_program_of_a_page_has_an_id_of_its_own(name: str) -> None:
    page = REPORTS[name].to_html()
    places = re.findall(r'<(section|tr role="row"|div)((?: [a-z-]+="[^"]*")*)', page)
    sections = [attributes for _, attributes in places if "class=" in attributes]
    assert all("id=" in a for a in sections if 'class="card ' in a or 'class="verdict' in a)
    bodies = re.findall(r"(?s)<tbody.*?</tbody>", page)
    assert all(body.count("<tr ") == body.count('<tr role="row" id="') for body in bodies)
    ids = re.findall(r' id="([^"]*)"', page)
    assert all(ids) and len(set(ids)) == len(ids)
    links = re.findall(r'href="#([^"]*)"', page)
    assert set(links) <= set(ids)
