"""pytest inside a process of a pod: runs the tests that pytest outside asks for, one by one."""

import os
import pdb
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from xlashard.errors import PodError
from xlashard.testing.workers.channel import RemoteException, Reply, pack, receive

PLUGIN_NAME = "xlashard_pytest_inside"
"""By this name the plugin below is registered; `xlashard_pytest` knows by it where it is."""


@dataclass(frozen=True)
class WorkerPytestSetup:
    """How pytest outside was started.

    Attributes:
        options: Its options, by name.
        file: The first file that will be asked for.
    """

    options: dict[str, Any]
    file: str


@dataclass(frozen=True)
class TestRequest:
    """One test to run.

    Attributes:
        file: In which it is.
        nodeid: Its name.
        tmp_path: The folder that stands for it in all processes; None if it doesn't ask for one.
    """

    __test__ = False

    file: str
    nodeid: str
    tmp_path: str | None


@dataclass(frozen=True)
class TestResult:
    """What became of it here.

    Attributes:
        reports: pytest's reports of setup, call and teardown, as far as it came, as dictionaries.
        problem: Why it could not be run at all; "" if it was.
    """

    __test__ = False

    reports: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""


def serve(channel: socket.socket, setup: WorkerPytestSetup) -> NoReturn:
    """Runs tests until the launcher is gone."""
    try:
        config = pytest.Config.fromdictargs(setup.options, [setup.file])
        config.pluginmanager.register(_Inside(channel), PLUGIN_NAME)
        config.hook.pytest_cmdline_main(config=config)
        problem: object = "pytest ended before it was told to"
    except BaseException as error:
        problem = RemoteException.of(error)
    channel.sendall(pack(Reply(False, problem)))
    os._exit(3)


class _Inside:
    """The plugin that replaces pytest's own loop over the tests."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._items: dict[str, pytest.Item] = {}
        self._files: dict[str, list[str]] = {}
        self._reports: list[pytest.TestReport] = []
        self._errors: list[str] = []
        self._tmp_path: str | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        # There is no terminal on which one could answer.
        pdb.set_trace = sys.breakpointhook = _refuse_to_debug

    @pytest.fixture
    def tmp_path(self, request: pytest.FixtureRequest) -> Path:
        """A folder for the test, the same one in all processes of its pod."""
        assert self._tmp_path is not None
        return Path(self._tmp_path)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._keep(session.config.args[0], session.items)
        self._channel.sendall(pack(Reply(True, None)))
        while True:
            try:
                request = receive(self._channel)
            except EOFError:
                os._exit(0)
            answer = self._run(session, request)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            self._channel.sendall(pack(Reply(self._is_well(answer), answer, self._place())))

    def _run(self, session: pytest.Session, request: TestRequest) -> TestResult:
        self._reports.clear()
        self._tmp_path = request.tmp_path
        if request.file not in self._files:
            self._errors.clear()
            self._keep(request.file, session.perform_collect([request.file]))
        item = self._items.get(request.nodeid)
        if item is None:
            return TestResult(problem=self._why_missing(request))
        try:
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        except BaseException as error:
            return TestResult(problem=RemoteException.of(error).traceback)
        to_dict = session.config.hook.pytest_report_to_serializable
        return TestResult([to_dict(config=session.config, report=one) for one in self._reports])

    def _keep(self, file: str, items: Sequence[Any]) -> None:
        self._files[file] = list(self._errors)
        self._items |= {item.nodeid: item for item in items}

    def _why_missing(self, request: TestRequest) -> str:
        if self._files[request.file]:
            return "\n".join(self._files[request.file])
        near = [nodeid for nodeid in self._items if nodeid.partition("[")[0] in request.nodeid]
        return (
            f"this process of the pod collected no test {request.nodeid}, but "
            f"{', '.join(near) or 'none of that name'}; names must be the same in all processes: "
            "no parametrisation over a set, or by the process or its devices"
        )

    def _is_well(self, answer: TestResult) -> bool:
        return not answer.problem and all(
            report.passed or is_strict_pass(report) for report in self._reports
        )

    def _place(self) -> str:
        """Where the test ended early: it did so in all processes, or they are out of step."""
        for report in self._reports:
            if not report.passed:
                crash = getattr(report.longrepr, "reprcrash", None)
                place = f"{crash.path}:{crash.lineno}" if crash else str(report.longrepr)
                return f"{report.when} {place}"
        return ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._errors.append(report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)


def is_strict_pass(report: pytest.TestReport) -> bool:
    """Whether a test passed that was marked to fail; pytest outside says so by itself."""
    return report.failed and str(report.longrepr).startswith("[XPASS(strict)]")


def _refuse_to_debug(*_: object, **__: object) -> NoReturn:
    __tracebackhide__ = True
    raise PodError(  # no-catalogue: raised inside pytest
        "a debugger needs a terminal, and the processes of a pod have none; write what you want to "
        "see with print(), or run the script by hand: xlashard pod -n 2 -d 2 -- python script.py"
    )
