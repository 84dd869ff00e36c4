"""pytest session inside a worker of a pod, which runs tests on request."""

import itertools
import os
import pdb
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from xlashard.errors import PodError
from xlashard.pods.testing.pod_worker import RemoteException, Reply, pack, receive, travels
from xlashard.pods.testing.pytest_plugin.process_state import ProcessState
from xlashard.support.background import flush_output

PLUGIN_NAME = "xlashard_pytest_inside"
"""Registered name of the plugin below, by which `xlashard_pytest` detects a worker."""


@dataclass(frozen=True)
class WorkerPytestSetup:
    """Configuration of the outer pytest.

    Attributes:
        options: Its options, by name.
        file: The first file from which a test is requested.
    """

    options: dict[str, Any]
    file: str


# Options of the outer pytest that must not apply to workers: distribution, selection and reporting.
_OUTSIDE = {
    "capture": "no",
    "collectonly": False,
    "cov_source": [],
    "dist": "no",
    "failedfirst": False,
    "last_failed_no_failures": "all",
    "lf": False,
    "log_file": os.devnull,
    "looponfail": False,
    "maxfail": 0,
    "newfirst": False,
    "numprocesses": None,
    "stepwise": False,
    "stepwise_skip": False,
    "timeout": 0,
    "tx": [],
    "xmlpath": None,
}


def worker_options(config: pytest.Config) -> dict[str, Any]:
    """Return those options of the outer pytest that affect how a test runs."""
    options = {name: value for name, value in vars(config.option).items() if travels(value)}
    options.pop("file_or_dir", None)
    options |= {name: value for name, value in _OUTSIDE.items() if name in options}
    options["plugins"] = [*options.get("plugins", []), "no:terminal", "no:cacheprovider"]
    options["rootdir"] = str(config.rootpath)
    if config.inipath is not None:
        options["inifilename"] = str(config.inipath)
    return options


@dataclass(frozen=True)
class TestRequest:
    """Request to run one test.

    Attributes:
        file: File of the test.
        nodeid: Node id of the test.
        tmp_path: Folder of the `tmp_path` fixture, shared by all processes; None if the test does
            not use it.
    """

    __test__ = False

    file: str
    nodeid: str
    tmp_path: str | None


@dataclass(frozen=True)
class HealthCheck:
    """Request to run a collective with the other processes, between two tests."""


@dataclass(frozen=True)
class TestResult:
    """Result of the test in this process.

    Attributes:
        reports: Serialized pytest reports of setup, call and teardown, as far as the test ran.
        problem: Reason why the test could not run; "" if it ran.
    """

    __test__ = False

    reports: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""


def serve(channel: socket.socket, setup: WorkerPytestSetup) -> NoReturn:
    """Run tests until the launcher exits, in a pytest session for each file in turn."""
    inside = _Inside(channel)
    file: str | None = setup.file
    sessions = itertools.count()
    try:
        while file is not None:
            # pytest empties the folder for temporary files at the start of a session.
            folder = f"{setup.options['basetemp']}-{next(sessions)}"
            inside.base_folder = Path(folder)
            config = pytest.Config.fromdictargs({**setup.options, "basetemp": folder}, [file])
            config.pluginmanager.register(inside, PLUGIN_NAME)
            config.hook.pytest_cmdline_main(config=config)
            file = inside.take_next_file()
        problem: object = "pytest exited unexpectedly"
    except BaseException as error:
        problem = RemoteException.of(error)
    channel.sendall(pack(Reply(False, problem)))
    os._exit(3)


class _Inside:
    """Plugin that replaces pytest's own loop over the tests."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._started = False
        self._pending: TestRequest | None = None
        self._reports: list[pytest.TestReport] = []
        self._errors: list[str] = []
        self._tmp_path: str | None = None
        self._stopped_early = False
        self._state = ProcessState()
        self.base_folder = Path()

    def take_next_file(self) -> str | None:
        """Return the file whose request ended the last session; None if it ended by itself.

        Every file has a session of its own, because pytest attaches the fixtures of a `conftest.py`
        to the nodes of the first collection: a second one in the same session would miss them.
        """
        self._errors.clear()
        return None if self._pending is None else self._pending.file

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        # No terminal is available for a debugger.
        pdb.set_trace = sys.breakpointhook = _refuse_to_debug

    @pytest.fixture
    def tmp_path(self, request: pytest.FixtureRequest) -> Path:
        """Return the folder for the test, shared by all processes of its pod."""
        assert self._tmp_path is not None
        return Path(self._tmp_path)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        request, self._pending = self._pending, None
        self._state.watch_functions()
        if not self._started:
            self._started = True
            self._channel.sendall(pack(Reply(True, None)))
        while True:
            try:
                request = request or receive(self._channel)
            except EOFError:
                os._exit(0)
            if isinstance(request, HealthCheck):
                self._channel.sendall(pack(self._check_health()))
                request = None
                continue
            if request.file != session.config.args[0]:
                self._pending = request
                return True
            # A test may have deleted the folder of temporary files with what lies above it.
            self.base_folder.mkdir(parents=True, exist_ok=True)
            with self._state.restoring() as reasons:
                answer = self._run(session, items, request)
            flush_output()
            if self._stopped_early:
                reasons.append("pytest was interrupted, and its fixtures remain set up")
            reply = Reply(self._is_well(answer), answer, self._place(), tuple(reasons))
            self._channel.sendall(pack(reply))
            request = None

    def _check_health(self) -> Reply:
        try:
            self._state.run_collective()
        except Exception as error:
            return Reply(False, RemoteException.of(error))
        return Reply(True, None)

    def _run(
        self, session: pytest.Session, items: dict[str, pytest.Item], request: TestRequest
    ) -> TestResult:
        self._reports.clear()
        self._stopped_early = False
        self._tmp_path = request.tmp_path
        item = items.get(request.nodeid)
        if item is None:
            return TestResult(problem=self._why_missing(items, request))
        try:
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        except BaseException as error:
            self._stopped_early = True
            return TestResult(problem=RemoteException.of(error).traceback)
        to_dict = session.config.hook.pytest_report_to_serializable
        return TestResult([to_dict(config=session.config, report=one) for one in self._reports])

    def _why_missing(self, items: dict[str, pytest.Item], request: TestRequest) -> str:
        if self._errors:
            return "\n".join(self._errors)
        near = [nodeid for nodeid in items if nodeid.partition("[")[0] in request.nodeid]
        return (
            f"this process of the pod did not collect {request.nodeid}, only "
            f"{', '.join(near) or 'other tests'}; test names must be equal in all processes: do "
            "not parametrize over a set, the process or its devices"
        )

    def _is_well(self, answer: TestResult) -> bool:
        return not answer.problem and all(
            report.passed or is_strict_pass(report) for report in self._reports
        )

    def _place(self) -> str:
        """Return the location at which the test failed; "" if it passed.

        Processes that failed at different locations are out of step.
        """
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
    """Return whether an expected failure passed, which the outer pytest reports itself."""
    return report.failed and str(report.longrepr).startswith("[XPASS(strict)]")


def _refuse_to_debug(*_: object, **__: object) -> NoReturn:
    __tracebackhide__ = True
    raise PodError(  # no-catalogue: raised inside pytest
        "a debugger needs a terminal, which the processes of a pod do not have; use print(), or "
        "run the script yourself: xlashard pod -n 2 -d 2 -- python script.py"
    )
