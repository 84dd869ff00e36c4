"""One report of a test out of those of all processes in which it ran."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ReprEntryNative,
    ReprExceptionInfo,
    ReprFileLocation,
    ReprTraceback,
)

from xlashard.processes import format_processes
from xlashard.testing.launch.output_text import last_lines
from xlashard.testing.pytest_plugin.in_worker import TestResult, is_strict_pass
from xlashard.testing.workers.channel import RemoteException
from xlashard.testing.workers.pool_result import PoolResult

type Outcome = Literal["passed", "skipped", "xfailed", "failed", "lost"]

# Of the output of each process in a report.
_LINES = 200
# Objects of the same kind in two processes differ by it.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class ProcessOutcome:
    """What one process says of the test.

    Attributes:
        process: Which one.
        outcome: How it went there; "lost" if the process can't say.
        told: What pytest tells of it, or a text.
        phase: In which phase: "setup", "call" or "teardown".
        reason: Why it was skipped, or failed as expected.
    """

    process: int
    outcome: Outcome
    told: Any = None
    phase: str = "call"
    reason: str = ""


@dataclass
class MergedReport:
    """What all processes say of it.

    Attributes:
        outcome: How the test went.
        reason: In a line why, if it didn't pass.
        parts: What they say, one by one; who failed first comes first.
        sections: What they wrote, with titles.
        properties: What the test recorded in the first process.
    """

    outcome: Literal["passed", "skipped", "xfailed", "failed"]
    reason: str
    size: int
    parts: list[ProcessOutcome]
    sections: list[tuple[str, str]] = field(default_factory=list)
    properties: list[tuple[str, Any]] = field(default_factory=list)


def merge(config: pytest.Config, result: PoolResult) -> MergedReport:
    """Brings together what the processes of a pod say of a test."""
    parts, sections, properties = [], [], []
    reports = {process: _reports(config, result, process) for process in result.replies}
    for process in result.order():
        parts.append(_part(result, process, reports.get(process, [])))
    for process in range(result.size.processes):
        output = last_lines(result.output(process), _LINES)
        if output.strip():
            sections.append((f"Captured stdout and stderr of process {process}", output))
        for report in reports.get(process, []):
            sections += _own_sections(report, process)
    for report in reports.get(0, []):
        if report.when == "teardown":
            properties = list(report.user_properties)
    outcome, reason = _together(parts)
    return MergedReport(outcome, reason, result.size.processes, parts, sections, properties)


def _reports(config: pytest.Config, result: PoolResult, process: int) -> list[pytest.TestReport]:
    answer = result.replies[process].value
    if not isinstance(answer, TestResult):
        return []
    read = config.hook.pytest_report_from_serializable
    return [read(config=config, data=data) for data in answer.reports]


def _own_sections(report: pytest.TestReport, process: int) -> list[tuple[str, str]]:
    # Those of setup stand in the report of the call again, and both in that of the teardown.
    if report.when != "teardown":
        return []
    return [(f"{title} of process {process}", text) for title, text in report.sections]


def _part(result: PoolResult, process: int, reports: list[pytest.TestReport]) -> ProcessOutcome:
    fate = result.fate(process)
    if fate:
        return ProcessOutcome(process, "lost", fate)
    answer = result.replies[process].value
    if isinstance(answer, RemoteException):
        return ProcessOutcome(process, "failed", answer.traceback)
    if not isinstance(answer, TestResult) or answer.problem:
        return ProcessOutcome(process, "failed", getattr(answer, "problem", str(answer)))
    for report in reports:
        if report.failed and not is_strict_pass(report):
            return ProcessOutcome(process, "failed", report.longrepr, report.when or "call")
    for report in reports:
        if report.skipped:
            if hasattr(report, "wasxfail"):
                return ProcessOutcome(process, "xfailed", reason=report.wasxfail)
            place: Any = report.longrepr
            return ProcessOutcome(
                process, "skipped", place, reason=str(place[2]).removeprefix("Skipped: ")
            )
    return ProcessOutcome(process, "passed")


def _together(
    parts: list[ProcessOutcome],
) -> tuple[Literal["passed", "skipped", "xfailed", "failed"], str]:
    by_outcome = {part.outcome: part for part in reversed(parts)}
    if "failed" in by_outcome:
        return "failed", f"in process {by_outcome['failed'].process}"
    if "xfailed" in by_outcome:
        return "xfailed", by_outcome["xfailed"].reason
    if "lost" in by_outcome:
        part = by_outcome["lost"]
        return "failed", f"process {part.process} {part.told}"
    if "skipped" not in by_outcome:
        return "passed", ""
    reason = by_outcome["skipped"].reason
    if "passed" not in by_outcome:
        return "skipped", reason
    skipped = [part.process for part in parts if part.outcome == "skipped"]
    return (
        "failed",
        f"{format_processes(sorted(skipped))} skipped the test ({reason}) and the others did "
        "not; skip it in all processes or in none",
    )


def update_report(report: pytest.TestReport, merged: MergedReport) -> None:
    """Makes a report of this process tell what the others say."""
    report.sections += merged.sections
    if merged.outcome == "skipped" and isinstance(report.longrepr, tuple):
        told = next(part.told for part in merged.parts if part.outcome == "skipped")
        report.longrepr = (str(told[0]), int(told[1]), str(told[2]))
    if merged.outcome == "failed":
        report.longrepr = _told(report, merged)


def _told(report: pytest.TestReport, merged: MergedReport) -> ExceptionChainRepr:
    groups: dict[str, list[ProcessOutcome]] = {}
    for part in merged.parts:
        if part.outcome in ("failed", "lost"):
            groups.setdefault(_ADDRESS.sub("", f"{part.phase}\n{part.told}"), []).append(part)
    chain = [link for parts in groups.values() for link in _links(parts, merged.size)]
    if not chain:
        chain = [_text_link(merged.reason)]
    path, line, _ = report.location
    crash = next((crash for _, crash, _ in chain if crash is not None), None)
    place = (crash.path, crash.lineno) if crash else (path, (line or 0) + 1)
    message = crash.message if crash else merged.reason
    if groups:
        parts = next(iter(groups.values()))
        gist = crash.message if crash else _gist(parts[0])
        message = f"{_who(parts)}: {gist}"
    # pytest's summary takes what stands in the last link.
    trace, _, description = chain[-1]
    return ExceptionChainRepr(
        [*chain[:-1], (trace, ReprFileLocation(*place, message), description)]
    )


def _who(parts: list[ProcessOutcome]) -> str:
    return format_processes(sorted(part.process for part in parts))


def _gist(part: ProcessOutcome) -> str:
    """A line for a summary of what is told as a text."""
    lines = str(part.told).strip().splitlines()
    marked = [line[1:].strip() for line in lines if line.startswith("E  ")]
    return marked[0] if marked else lines[-1]


type Link = tuple[ReprTraceback, ReprFileLocation | None, str | None]


def _links(parts: list[ProcessOutcome], size: int) -> Iterator[Link]:
    first = parts[0]
    where = f", in {first.phase}" if first.phase != "call" else ""
    head = ReprEntryNative([f"----- {_who(parts)} of {size}{where} -----\n"])
    if isinstance(first.told, ExceptionChainRepr):
        links: list[Link] = list(first.told.chain)
    elif isinstance(first.told, ReprExceptionInfo):
        links = [(first.told.reprtraceback, first.told.reprcrash, None)]
    else:
        links = [_text_link(str(first.told))]
    for number, (trace, crash, description) in enumerate(links):
        entries = [head, *trace.reprentries] if not number else trace.reprentries
        yield ReprTraceback(entries, trace.extraline, trace.style), crash, description


def _text_link(text: str) -> Link:
    entry = ReprEntryNative([f"{text.rstrip()}\n"])
    return ReprTraceback([entry], None, "native"), None, None
