"""pytest plugin of xlashard: tests on emulated pods, and a limit of a test's compilations.

Tests marked `pod` run in every process of an emulated pod.

pytest loads plugins at startup, in every project of an environment, and a test suite may have to
set options before JAX is imported. This package is therefore separate, and imports neither JAX nor
xlashard until a test needs a pod. The implementation is in `xlashard.testing`.
"""

import importlib
import os
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any

import pytest

_MARKER = (
    "pod(processes=2, devices=1, timeout=180, fresh=False): run the test's body in every process "
    "of an emulated pod, each with so many CPU devices"
)
_INSIDE = "xlashard_pytest_inside"
_POOL = pytest.StashKey[Any]()
_GUARDS = pytest.StashKey[ExitStack]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


def _is_outside(config: pytest.Config) -> bool:
    """Return whether this is the pytest that the user started, not one in a process of a pod."""
    return not config.pluginmanager.has_plugin(_INSIDE)


def _pods() -> Any:
    return importlib.import_module("xlashard.pods.testing.pytest_plugin.controller")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Prevent the fixtures of tests on pods from being created in this process."""
    if not _is_outside(config):
        return
    marked = [item for item in items if item.get_closest_marker("pod") is not None]
    if marked and not config.getoption("collectonly"):
        _pods().prepare(config, marked)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Reject invalid markers before anything is started."""
    if _is_outside(item.config) and item.get_closest_marker("pod") is not None:
        _pods().check(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the test body in the processes of a pod instead of this process."""
    config = pyfuncitem.config
    if not _is_outside(config) or pyfuncitem.get_closest_marker("pod") is None:
        return None
    if _POOL not in config.stash:
        config.stash[_POOL] = _pods().PoolCache(config)
    config.stash[_POOL].run(pyfuncitem)
    return True


@pytest.fixture
def assert_compiles(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Limit the compilations of jitted functions from its call to the end of the test.

    It takes the arguments of `xlashard.testing.assert_compiles`.
    """
    guards = request.node.stash.setdefault(_GUARDS, ExitStack())
    testing = importlib.import_module("xlashard.testing")

    def limit(*args: Any, **kwargs: Any) -> None:
        guards.enter_context(testing.assert_compiles(*args, **kwargs))

    return limit


@pytest.hookimpl(wrapper=True, specname="pytest_pyfunc_call")
def pytest_check_compilations(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Check the limits of a test's compilations as a part of the test, not of its teardown."""
    with pyfuncitem.stash.setdefault(_GUARDS, ExitStack()):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Replace the local report by the merged report of every process."""
    report = yield
    has_both = bool(sys.modules.get("jax")) and "xlashard" in sys.modules
    if report.failed and has_both and "XLA_FLAGS" in os.environ:
        note = importlib.import_module("xlashard.pods.testing.emulated_devices").late_flags_text()
        if note:
            report.sections.append(("XLA_FLAGS was set too late", note))
    if _POOL in item.config.stash:
        item.config.stash[_POOL].complete(item, call, report)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Terminate the processes."""
    if _POOL in session.config.stash:
        session.config.stash[_POOL].close()
