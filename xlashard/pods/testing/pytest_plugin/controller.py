"""Tests on pods in the pytest process that the user started: pools of workers, merged reports."""

import dataclasses
import re
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ReprEntryNative,
    ReprExceptionInfo,
    ReprFileLocation,
    ReprTraceback,
)

from xlashard.errors import ArgumentError, LaunchError, PodError
from xlashard.pods.testing.emulated_devices import check_seconds, check_whole
from xlashard.pods.testing.launcher import PodSize
from xlashard.pods.testing.pod_command import PrefixPrinter
from xlashard.pods.testing.pod_worker import ChannelHandover, FunctionName, RemoteException
from xlashard.pods.testing.pytest_plugin.in_worker import (
    HealthCheck,
    TestRequest,
    TestResult,
    WorkerPytestSetup,
    is_strict_pass,
    worker_options,
)
from xlashard.pods.testing.supervision import EndingRules, last_lines
from xlashard.pods.testing.worker_pool import PoolResult, WorkerPool, pod_error
from xlashard.support.formatting import format_processes

_TIMEOUT = 180.0
_EXAMPLE = "@pytest.mark.pod(processes=2, devices=4)"
# Seconds for a collective of all processes. A pod that needs longer is replaced.
_HEALTH_TIMEOUT = 30.0
# Idle processes occupy some hundred MB each.
_MOST_IDLE = 4
# Output lines of each process in a report.
_LINES = 200
# Object addresses differ between processes.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

type Outcome = Literal["passed", "skipped", "xfailed", "failed", "lost"]


@dataclasses.dataclass(frozen=True)
class PodMarker:
    """Arguments of a `pod` marker.

    Attributes:
        processes: Number of processes.
        devices: Number of devices per process.
        timeout: Seconds for the test, including the start of the pod.
        fresh: Whether the test requires new processes.
    """

    processes: int = 2
    devices: int = 1
    timeout: float = _TIMEOUT
    fresh: bool = False

    @classmethod
    def of_test(cls, item: pytest.Item) -> "PodMarker":
        """Return the arguments of the closest marker of a test.

        Raises:
            ArgumentError: An argument is unknown or invalid.
        """
        marker = item.get_closest_marker("pod")
        assert marker is not None
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in marker.kwargs if name not in known]
        if marker.args or unknown:
            what = f"takes no {unknown[0]!r}" if unknown else "takes its arguments by name"
            raise ArgumentError(  # no-catalogue: raised inside pytest
                f"it {what}; valid arguments are {', '.join(known)}: {_EXAMPLE}"
            )
        pod = cls(**marker.kwargs)
        check_whole("processes", pod.processes, 1, _EXAMPLE)
        check_whole("devices", pod.devices, 1, _EXAMPLE)
        check_seconds("timeout", pod.timeout, "@pytest.mark.pod(timeout=60)")
        if not isinstance(pod.fresh, bool):
            raise ArgumentError(  # no-catalogue: raised inside pytest
                f"fresh is {pod.fresh!r}; it must be True or False: @pytest.mark.pod(fresh=True)"
            )
        return pod

    @property
    def size(self) -> PodSize:
        """Size of the pod."""
        return PodSize(self.processes, self.devices)


def prepare(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Prepare tests to run in workers, where their fixtures are created.

    Raises:
        UsageError: pytest was started with an option that needs a terminal.
    """
    if config.getoption("usepdb") or config.getoption("trace"):
        option = "--pdb" if config.getoption("usepdb") else "--trace"
        raise pytest.UsageError(  # no-catalogue: raised inside pytest
            f"{option} needs a terminal, and the processes of a pod have none: leave out the tests "
            f'on pods ({items[0].nodeid}{" and others" if len(items) > 1 else ""}) with -m "not '
            f'pod", or leave out {option}'
        )
    for item in items:
        if isinstance(item, pytest.Function):
            wants_folder = "tmp_path" in item.fixturenames
            item.fixturenames = ["tmp_path_factory", *(["tmp_path"] if wants_folder else [])]


def check(item: pytest.Item) -> None:
    """Fail a test with an invalid marker."""
    if not isinstance(item, pytest.Function) or issubclass(item.cls or object, unittest.TestCase):
        pytest.fail(
            f"{item.nodeid}: only functions, and methods of classes that don't derive from "
            "unittest.TestCase, run on pods; write def test_it(): with @pytest.mark.pod",
            pytrace=False,
        )
    try:
        PodMarker.of_test(item)
    except ArgumentError as error:
        problem = f"{item.nodeid}: invalid marker pod: {error}"
        raise pytest.fail.Exception(problem, pytrace=False) from None  # no-catalogue: in pytest


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass
class MergedReport:
    """Outcome of the test in all processes.

    Attributes:
        outcome: Overall outcome; a lost process fails the test.
        reason: One-line reason, if the test did not pass.
        size: Number of processes.
        parts: Outcome of each process, earliest failure first.
        sections: Captured output, with titles.
        properties: Properties that the test recorded in the first process.
    """

    outcome: Outcome
    reason: str
    size: int
    parts: list[ProcessOutcome]
    sections: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    properties: list[tuple[str, Any]] = dataclasses.field(default_factory=list)


_MERGED = pytest.StashKey[MergedReport]()


class PodTestFailed(Exception):
    """A test failed in a process of its pod; the report of that process replaces this error."""


class PoolCache:
    """Worker pools of a test run, which later tests reuse where possible."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._pools: dict[PodSize, WorkerPool] = {}
        self._started = 0
        self._live = config.getoption("capture") == "no"

    def run(self, item: pytest.Function) -> None:
        """Run a test and raise its outcome."""
        requested = PodMarker.of_test(item)
        pool = self._pool(item, requested)
        if isinstance(pool, str):
            pytest.fail(pool, pytrace=False)
        folder = item.funcargs.get("tmp_path")
        request = TestRequest(str(item.path), item.nodeid, None if folder is None else str(folder))
        result = pool.request(request, EndingRules(requested.timeout))
        _base_folder(item).mkdir(mode=0o700, parents=True, exist_ok=True)
        if requested.fresh:
            self._end(requested.size)
        merged = _merge(self._config, result)
        if self._live:
            merged.sections.clear()
        item.stash[_MERGED] = merged
        item.user_properties.extend(merged.properties)
        if merged.outcome == "skipped":
            pytest.skip(merged.reason)
        if merged.outcome == "xfailed":
            pytest.xfail(merged.reason)
        if merged.outcome == "failed":
            raise PodTestFailed(merged.reason)  # no-catalogue: raised inside pytest

    def complete(
        self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> None:
        """Insert the merged outcome into the report of a test."""
        merged = item.stash.get(_MERGED, None)
        if merged is not None and call.when == "call":
            _update_report(report, merged)

    def _pool(self, item: pytest.Function, requested: PodMarker) -> WorkerPool | str:
        """Return the workers for a test, or the reason why they could not start."""
        for size, pool in list(self._pools.items()):
            if not pool.usable or (requested.fresh and size == requested.size):
                self._end(size)
        # Most recently used pool last.
        pool = self._pools.pop(requested.size, None)
        if pool is not None:
            pool.request(HealthCheck(), EndingRules(_HEALTH_TIMEOUT))
        if pool is None or not pool.usable:
            self._make_room(requested.processes)
            try:
                pool = self._start(item, requested)
            except (PodError, LaunchError) as error:
                return str(error)
        self._pools[requested.size] = pool
        return pool

    def _make_room(self, processes: int) -> None:
        for size in list(self._pools):
            if processes + sum(size.processes for size in self._pools) <= _MOST_IDLE:
                return
            self._end(size)

    def _end(self, size: PodSize) -> None:
        self._pools.pop(size).close()

    def _start(self, item: pytest.Function, requested: PodMarker) -> WorkerPool:
        printer = PrefixPrinter(sys.stdout, sys.stdout, requested.processes)
        pool = WorkerPool(
            requested.size, on_output=printer.show if self._live else lambda printed: None
        )
        self._started += 1
        base = _base_folder(item) / f"pod{self._started}"
        base.mkdir()
        options = worker_options(self._config)
        name = FunctionName("xlashard.pods.testing.pytest_plugin.in_worker", "serve", None)
        setups = [
            ChannelHandover(
                name, WorkerPytestSetup({**options, "basetemp": str(base / str(n))}, str(item.path))
            )
            for n in range(requested.processes)
        ]
        began = pool.request_each(setups, EndingRules(_TIMEOUT))
        if not began.well:
            # no-catalogue: raised inside pytest
            raise pod_error("pytest did not start in the processes of the pod", began)
        return pool

    def close(self) -> None:
        """Terminate all processes."""
        for size in list(self._pools):
            self._end(size)


def _base_folder(item: pytest.Function) -> Path:
    """Return the folder of temporary files, which a test may have deleted."""
    temporary: Any = item.funcargs["tmp_path_factory"]
    return temporary.getbasetemp()


def _merge(config: pytest.Config, result: PoolResult) -> MergedReport:
    """Merge the reports of all processes of a pod."""
    sections, properties = [], []
    reports = {process: _reports(config, reply.value) for process, reply in result.replies.items()}
    parts = [_part(result, process, reports.get(process, [])) for process in result.order()]
    for process in range(result.size.processes):
        output = last_lines(result.output(process), _LINES)
        if output.strip():
            sections.append((f"Captured stdout and stderr of process {process}", output))
        # The report of the call repeats the sections of setup, and that of teardown both.
        for report in (each for each in reports.get(process, []) if each.when == "teardown"):
            sections += [(f"{title} of process {process}", text) for title, text in report.sections]
            properties = properties if process else list(report.user_properties)
    for process, reasons in result.damage.items():
        sections.append((f"Why process {process} was replaced afterwards", "\n".join(reasons)))
    outcome, reason = _together(parts)
    return MergedReport(outcome, reason, result.size.processes, parts, sections, properties)


def _reports(config: pytest.Config, answer: object) -> list[pytest.TestReport]:
    read = config.hook.pytest_report_from_serializable
    data_of_reports = answer.reports if isinstance(answer, TestResult) else []
    return [read(config=config, data=data) for data in data_of_reports]


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


def _together(parts: list[ProcessOutcome]) -> tuple[Outcome, str]:
    """Return the overall outcome, and its reason unless the test passed."""
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
    skipped = [part for part in parts if part.outcome == "skipped"]
    return (
        "failed",
        f"{_process_numbers(skipped)} skipped the test ({reason}), but the other "
        "processes did not; skip it in all processes",
    )


def _update_report(report: pytest.TestReport, merged: MergedReport) -> None:
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
    chain = chain or [_text_link(merged.reason)]
    path, line, _ = report.location
    crash = next((crash for _, crash, _ in chain if crash is not None), None)
    place = (crash.path, crash.lineno) if crash else (path, (line or 0) + 1)
    message = merged.reason
    if groups:
        parts = next(iter(groups.values()))
        message = f"{_process_numbers(parts)}: {crash.message if crash else _gist(parts[0])}"
    # pytest's summary uses the last link.
    trace, _, description = chain[-1]
    last = (trace, ReprFileLocation(*place, message), description)
    return ExceptionChainRepr([*chain[:-1], last])


def _process_numbers(parts: list[ProcessOutcome]) -> str:
    return format_processes(sorted(part.process for part in parts))


def _gist(part: ProcessOutcome) -> str:
    """Return the summary line of a failure text."""
    lines = str(part.detail).strip().splitlines()
    marked = [line[1:].strip() for line in lines if line.startswith("E  ")]
    return marked[0] if marked else lines[-1]


type _Link = tuple[ReprTraceback, ReprFileLocation | None, str | None]


def _links(parts: list[ProcessOutcome], size: int) -> Iterator[_Link]:
    first = parts[0]
    where = f", in {first.phase}" if first.phase != "call" else ""
    head = ReprEntryNative([f"----- {_process_numbers(parts)} of {size}{where} -----\n"])
    if isinstance(first.detail, ExceptionChainRepr):
        links: list[_Link] = list(first.detail.chain)
    elif isinstance(first.detail, ReprExceptionInfo):
        links = [(first.detail.reprtraceback, first.detail.reprcrash, None)]
    else:
        links = [_text_link(str(first.detail))]
    for number, (trace, crash, description) in enumerate(links):
        entries = [head, *trace.reprentries] if not number else trace.reprentries
        yield ReprTraceback(entries, trace.extraline, trace.style), crash, description


def _text_link(text: str) -> _Link:
    entry = ReprEntryNative([f"{text.rstrip()}\n"])
    return ReprTraceback([entry], None, "native"), None, None
