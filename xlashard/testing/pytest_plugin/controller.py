"""Control of tests on pods from the pytest process that the user started."""

import dataclasses
import os
import sys
import unittest
from typing import Any

import pytest

from xlashard.errors import LaunchError, PodError
from xlashard.testing.launcher import PodSize
from xlashard.testing.pod_command import PrefixPrinter
from xlashard.testing.pod_worker import ChannelHandover, FunctionName, travels
from xlashard.testing.pytest_plugin.in_worker import TestRequest, WorkerPytestSetup
from xlashard.testing.pytest_plugin.merge_reports import MergedReport, merge, update_report
from xlashard.testing.supervision import EndingRules
from xlashard.testing.worker_pool import WorkerPool, pod_error

_TIMEOUT = 180.0
# Idle processes occupy some hundred MB each.
_MOST_IDLE = 4
_MERGED = pytest.StashKey[MergedReport]()


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
            ValueError: The arguments are invalid.
        """
        marker = item.get_closest_marker("pod")
        assert marker is not None
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in marker.kwargs if name not in known]
        if marker.args or unknown:
            what = f"takes no {unknown[0]!r}" if unknown else "takes its arguments by name"
            # no-catalogue: raised inside pytest
            raise ValueError(f"it {what}; valid arguments are {', '.join(known)}")
        asked = cls(**marker.kwargs)
        for name in ("processes", "devices"):
            value = getattr(asked, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                # no-catalogue: raised inside pytest
                raise ValueError(f"{name} is {value!r}, not a whole number of 1 or more")
        if not isinstance(asked.timeout, int | float) or asked.timeout <= 0:
            # no-catalogue: raised inside pytest
            raise ValueError(f"timeout is {asked.timeout!r}, not a number of seconds above 0")
        return asked

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
    is_function = isinstance(item, pytest.Function)
    if not is_function or (item.cls and issubclass(item.cls, unittest.TestCase)):
        pytest.fail(
            f"{item.nodeid}: only functions, and methods of classes that don't derive from "
            "unittest.TestCase, run on pods; write def test_it(): with @pytest.mark.pod",
            pytrace=False,
        )
    problem = ""
    try:
        PodMarker.of_test(item)
    except ValueError as error:
        problem = str(error)
    if problem:
        pytest.fail(
            f"{item.nodeid}: invalid marker pod: {problem}. Write for example:\n"
            "  @pytest.mark.pod(processes=2, devices=4)",
            pytrace=False,
        )


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
        asked = PodMarker.of_test(item)
        pool = self._pool(item, asked)
        if isinstance(pool, str):
            pytest.fail(pool, pytrace=False)
        folder = item.funcargs.get("tmp_path")
        request = TestRequest(str(item.path), item.nodeid, None if folder is None else str(folder))
        result = pool.request(request, EndingRules(asked.timeout))
        if asked.fresh:
            self._end(asked.size)
        merged = merge(self._config, result)
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
            update_report(report, merged)

    def _pool(self, item: pytest.Function, asked: PodMarker) -> WorkerPool | str:
        """Return the workers for a test, or the reason why they could not start."""
        for size, pool in list(self._pools.items()):
            if not pool.usable or (asked.fresh and size == asked.size):
                self._end(size)
        # Most recently used pool last.
        pool = self._pools.pop(asked.size, None)
        if pool is None:
            self._make_room(asked.processes)
            try:
                pool = self._start(item, asked)
            except (PodError, LaunchError) as error:
                return str(error)
        self._pools[asked.size] = pool
        return pool

    def _make_room(self, processes: int) -> None:
        for size in list(self._pools):
            if processes + sum(size.processes for size in self._pools) <= _MOST_IDLE:
                return
            self._end(size)

    def _end(self, size: PodSize) -> None:
        self._pools.pop(size).close()

    def _start(self, item: pytest.Function, asked: PodMarker) -> WorkerPool:
        printer = PrefixPrinter(sys.stdout, sys.stdout, asked.processes)
        pool = WorkerPool(
            asked.size, on_output=printer.show if self._live else lambda printed: None
        )
        self._started += 1
        temporary: Any = item.funcargs["tmp_path_factory"]
        base = temporary.getbasetemp() / f"pod{self._started}"
        base.mkdir()
        options = _options(self._config)
        name = FunctionName("xlashard.testing.pytest_plugin.in_worker", "serve", None)
        setups = [
            ChannelHandover(
                name, WorkerPytestSetup({**options, "basetemp": str(base / str(n))}, str(item.path))
            )
            for n in range(asked.processes)
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


def _options(config: pytest.Config) -> dict[str, Any]:
    """Return those options of the outer pytest that affect how a test runs."""
    options = {name: value for name, value in vars(config.option).items() if travels(value)}
    options.pop("file_or_dir", None)
    options |= {name: value for name, value in _OUTSIDE.items() if name in options}
    options["plugins"] = [*options.get("plugins", []), "no:terminal", "no:cacheprovider"]
    options["rootdir"] = str(config.rootpath)
    if config.inipath is not None:
        options["inifilename"] = str(config.inipath)
    return options
