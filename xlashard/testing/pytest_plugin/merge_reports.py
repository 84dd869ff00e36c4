"""Merging of the reports of all processes of a test into one report."""

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
from xlashard.testing.pod_worker import RemoteException
from xlashard.testing.pytest_plugin.in_worker import TestResult, is_strict_pass
from xlashard.testing.supervision import last_lines
from xlashard.testing.worker_pool import PoolResult

type Outcome = Literal["passed", "skipped", "xfailed", "failed", "lost"]

# Output lines of each process in a report.
_LINES = 200
# Object addresses differ between processes.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class ProcessOutcome:
    """Outcome of the test in one process.

    Attributes:
        process: Index of the process.
        outcome: Outcome in this process; "lost" if the process did not report one.
        detail: pytest's representation of the failure, or a text.
        phase: Phase of the outcome: "setup", "call" or "teardown".
        reason: Why the test was skipped, or failed as expected.
    """

    process: int
    outcome: Outcome
    detail: Any = None
    phase: str = "call"
    reason: str = ""


@dataclass
class MergedReport:
    """Outcome of the test in all processes.

    Attributes:
        outcome: Overall outcome.
        reason: One-line reason, if the test did not pass.
        parts: Outcome of each process, earliest failure first.
        sections: Captured output, with titles.
        properties: Properties that the test recorded in the first process.
    """

    outcome: Literal["passed", "skipped", "xfailed", "failed"]
    reason: str
    size: int
    parts: list[ProcessOutcome]
    sections: list[tuple[str, str]] = field(default_factory=list)
    properties: list[tuple[str, Any]] = field(default_factory=list)


def merge(config: pytest.Config, result: PoolResult) -> MergedReport:
    """Merge the reports of all processes of a pod."""
    sections, properties = [], []
    reports = {process: _reports(config, result, process) for process in result.replies}
    parts = [_part(result, process, reports.get(process, [])) for process in result.order()]
    for process in range(result.size.processes):
        output = last_lines(result.output(process), _LINES)
        if output.strip():
            sections.append((f"Captured stdout and stderr of process {process}", output))
        # The report of the call repeats the sections of setup, and that of teardown both.
        for report in (each for each in reports.get(process, []) if each.when == "teardown"):
            sections += [(f"{title} of process {process}", text) for title, text in report.sections]
            properties = properties if process else list(report.user_properties)
    outcome, reason = _together(parts)
    return MergedReport(outcome, reason, result.size.processes, parts, sections, properties)


def _reports(config: pytest.Config, result: PoolResult, process: int) -> list[pytest.TestReport]:
    answer = result.replies[process].value
    if not isinstance(answer, TestResult):
        return []
    read = config.hook.pytest_report_from_serializable
    return [read(config=config, data=data) for data in answer.reports]


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
        return "failed", f"process {part.process} {part.detail}"
    if "skipped" not in by_outcome:
        return "passed", ""
    reason = by_outcome["skipped"].reason
    if "passed" not in by_outcome:
        return "skipped", reason
    skipped = [part.process for part in parts if part.outcome == "skipped"]
    return (
        "failed",
        f"{format_processes(sorted(skipped))} skipped the test ({reason}), but the other "
        "processes did not; skip it in all processes",
    )


def update_report(report: pytest.TestReport, merged: MergedReport) -> None:
    """Replace the content of a local report by the merged one."""
    report.sections += merged.sections
    if merged.outcome == "skipped" and isinstance(report.longrepr, tuple):
        detail = next(part.detail for part in merged.parts if part.outcome == "skipped")
        report.longrepr = (str(detail[0]), int(detail[1]), str(detail[2]))
    if merged.outcome == "failed":
        report.longrepr = _failure_repr(report, merged)


def _failure_repr(report: pytest.TestReport, merged: MergedReport) -> ExceptionChainRepr:
    groups: dict[str, list[ProcessOutcome]] = {}
    for part in merged.parts:
        if part.outcome in ("failed", "lost"):
            groups.setdefault(_ADDRESS.sub("", f"{part.phase}\n{part.detail}"), []).append(part)
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
    # pytest's summary uses the last link.
    trace, _, description = chain[-1]
    return ExceptionChainRepr(
        [*chain[:-1], (trace, ReprFileLocation(*place, message), description)]
    )


def _who(parts: list[ProcessOutcome]) -> str:
    return format_processes(sorted(part.process for part in parts))


def _gist(part: ProcessOutcome) -> str:
    """Return the summary line of a failure text."""
    lines = str(part.detail).strip().splitlines()
    marked = [line[1:].strip() for line in lines if line.startswith("E  ")]
    return marked[0] if marked else lines[-1]


type Link = tuple[ReprTraceback, ReprFileLocation | None, str | None]


def _links(parts: list[ProcessOutcome], size: int) -> Iterator[Link]:
    first = parts[0]
    where = f", in {first.phase}" if first.phase != "call" else ""
    head = ReprEntryNative([f"----- {_who(parts)} of {size}{where} -----\n"])
    if isinstance(first.detail, ExceptionChainRepr):
        links: list[Link] = list(first.detail.chain)
    elif isinstance(first.detail, ReprExceptionInfo):
        links = [(first.detail.reprtraceback, first.detail.reprcrash, None)]
    else:
        links = [_text_link(str(first.detail))]
    for number, (trace, crash, description) in enumerate(links):
        entries = [head, *trace.reprentries] if not number else trace.reprentries
        yield ReprTraceback(entries, trace.extraline, trace.style), crash, description


def _text_link(text: str) -> Link:
    entry = ReprEntryNative([f"{text.rstrip()}\n"])
    return ReprTraceback([entry], None, "native"), None, None
