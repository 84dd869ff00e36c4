"""The pytest plugin of xlashard: tests marked `pod` run in every process of an emulated pod.

pytest loads plugins when it starts, in every project of an environment, and a test suite may have
something to set before JAX is imported. So this is a package of its own, which imports neither JAX
nor xlashard until the first test needs a pod. What it does then stands in `xlashard.testing`.
"""

import importlib
import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

_MARKER = (
    "pod(processes=2, devices=1, timeout=180, fresh=False): run the test's body in every process "
    "of an emulated pod, each with so many CPU devices"
)
_INSIDE = "xlashard_pytest_inside"
_POOL = pytest.StashKey[Any]()


def pytest_configure(config: pytest.Config) -> None:
    """Makes the marker known."""
    config.addinivalue_line("markers", _MARKER)


def _is_outside(config: pytest.Config) -> bool:
    """Whether this is pytest as a person started it, not in a process of a pod."""
    return not config.pluginmanager.has_plugin(_INSIDE)


def _pods() -> Any:
    return importlib.import_module("xlashard.testing.pytest_plugin.controller")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the fixtures of tests on pods from being made here."""
    if not _is_outside(config):
        return
    marked = [item for item in items if item.get_closest_marker("pod") is not None]
    if marked and not config.getoption("collectonly"):
        _pods().prepare(config, marked)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuses wrong markers before anything is started."""
    if _is_outside(item.config) and item.get_closest_marker("pod") is not None:
        _pods().check(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs the body in the processes of a pod, in place of this one."""
    config = pyfuncitem.config
    if not _is_outside(config) or pyfuncitem.get_closest_marker("pod") is None:
        return None
    if _POOL not in config.stash:
        config.stash[_POOL] = _pods().PoolCache(config)
    config.stash[_POOL].run(pyfuncitem)
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Puts what every process says in place of what is known here."""
    report = yield
    if report.failed and "xlashard" in sys.modules and "XLA_FLAGS" in os.environ:
        note = importlib.import_module("xlashard.testing.emulated_devices").late_flags_text()
        if note:
            report.sections.append(("XLA_FLAGS was set too late", note))
    if _POOL in item.config.stash:
        item.config.stash[_POOL].complete(item, call, report)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ends the processes."""
    if _POOL in session.config.stash:
        session.config.stash[_POOL].close()
