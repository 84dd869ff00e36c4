"""The pytest plugin, as users run it: pytest in a subprocess, on tests with every outcome."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fork_server import python_command
from tests.message_patterns import naming
from tests.pods.testing.helpers import environment
from xlashard.errors import ArgumentError
from xlashard.pods.testing.launcher import PodSize, ProcessExit
from xlashard.pods.testing.pod_worker import RemoteException, Reply
from xlashard.pods.testing.pytest_plugin.controller import PodMarker
from xlashard.pods.testing.supervision import EndingRules
from xlashard.pods.testing.worker_pool import PoolResult, pod_error

SAMPLE = Path(__file__).with_name("plugin_tests.py")
FIXTURE = """
import pytest

@pytest.fixture
def seven():
    return 7
"""
USES_IT = """
import pytest

@pytest.mark.pod(processes=2)
def test_{name}(seven):
    assert seven == 7
"""


class PytestRun:
    """Output of pytest.

    Attributes:
        text: All of it.
        code: pytest's exit code.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        shutil.copy(SAMPLE, folder / "test_it.py")
        (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
        below = folder / "below"
        below.mkdir(exist_ok=True)
        (below / "conftest.py").write_text(FIXTURE)
        for name in ("first", "second"):
            (below / f"test_{name}.py").write_text(USES_IT.format(name=name))
        plugins = ("xlashard_pytest", "tests.pods.testing.forked_workers", "no:cacheprovider")
        words = [word for name in plugins for word in ("-p", name)]
        clean = environment(XLA_FLAGS="", COLUMNS="100")
        done = subprocess.run(
            [*python_command(clean), "-m", "pytest", *words, "-rA", *options],
            cwd=folder,
            env=clean,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        self.text = done.stdout + done.stderr
        self.code = done.returncode

    def outcome(self, name: str) -> str:
        """Return `PASSED`, `FAILED`, ..."""
        match = re.search(
            rf"^([A-Z]+) (?:\[1\] )?test_it.py::{re.escape(name)}(?: - |$)", self.text, re.M
        )
        return match[1] if match else ""

    def summary(self, name: str) -> str:
        """Return the text after the test's name in the short summary."""
        match = re.search(rf"^FAILED test_it.py::{re.escape(name)} - (.*)$", self.text, re.M)
        return match[1] if match else ""

    def section(self, name: str) -> str:
        """Return the report of a test that did not pass."""
        _, _, rest = self.text.partition(f"_ {name} _")
        return re.split(r"^_{3,} |^=====", rest.partition("\n")[2], maxsplit=1, flags=re.M)[0]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> PytestRun:
    """Run all sample tests once."""
    return PytestRun(tmp_path_factory.mktemp("project"))


pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        "test_without_a_marker_runs_in_one_process",
        "test_passes[1]",
        "test_passes[2]",
        "test_compiles_once",
        "test_expectations_of_a_jax_function",
        "TestInAClass::test_passes[5]",
        "TestInAClass::test_marker_of_a_method_overrides_that_of_the_class",
        "test_module_state_is_shared_by_the_next_test",
        "test_fresh_pod_has_no_module_state",
        "test_processes_survive_an_identical_failure",
        "test_processes_are_replaced_after_a_failure_in_one",
        "test_changes_its_process",
        "test_finds_its_process_unchanged",
        "test_shuts_its_pod_down",
        "test_pod_is_replaced_after_its_shutdown",
        "test_pod_is_replaced_after_an_interrupt",
    ],
)
def test_passing_tests_are_reported(report: PytestRun, name: str) -> None:
    assert report.outcome(name) == "PASSED", report.section(name) or report.text


def test_files_of_a_folder_share_its_fixtures(report: PytestRun) -> None:
    for name in ("first", "second"):
        assert f"PASSED below/test_{name}.py::test_{name}" in report.text


@pytest.mark.parametrize("name", ["test_compiles_too_often", "test_compiles_too_often_in_pods"])
def test_limit_of_compilations_fails_the_test(report: PytestRun, name: str) -> None:
    assert report.outcome(name) == "FAILED"
    assert "total: 1 compilation" in report.section(name) or "total: 2" in report.section(name)
    assert "at teardown" not in report.section(name)


def test_equal_failures_are_reported_once(report: PytestRun) -> None:
    section = report.section("test_fails_everywhere")
    assert "----- processes 0, 1 of 2 -----" in section
    assert (
        section.count("E       AssertionError: assert {'shape': (2, 2)} == {'shape': (2, 3)}") == 1
    )
    assert report.summary("test_fails_everywhere").startswith("processes 0, 1: AssertionError")


def test_output_and_logs_by_process(report: PytestRun) -> None:
    section = report.section("test_fails_everywhere")
    for number in (0, 1):
        _, _, own = section.partition(f"Captured stdout and stderr of process {number}")
        lines = own.splitlines()[1:5]
        assert lines == [
            f"set up in {number}",
            f"printed by {number}",
            "written to the descriptor",
            f"torn down in {number}",
        ]
        assert f"logged by {number}" in own.partition(f"log call of process {number}")[2]


def test_failure_in_one_process_shows_stacks_of_its_peers(report: PytestRun) -> None:
    section = report.section("test_fails_in_one")
    assert "----- process 1 of 2 -----" in section
    assert "AssertionError: only the first is right" in section
    assert re.search(r"- process 0 of 2 -+\n.* 5 s ", section)
    assert "in _handle_array_process_allgather" in section
    assert "in test_fails_in_one" in section
    assert "_pytest/" not in section


def test_killed_process_shows_signal_and_output(report: PytestRun) -> None:
    section = report.section("test_is_killed")
    assert re.search(r"- process 1 of 2 -+\n.*before the others.*SIGKILL", section)
    assert re.search(r"stdout and stderr of process 1 -+\nlast words$", section, re.M)


def test_reason_of_a_new_pod_is_reported(report: PytestRun) -> None:
    _, _, passes = report.text.partition("= PASSES =")
    _, _, section = passes.partition("_ test_shuts_its_pod_down _")
    for number in (0, 1):
        _, _, own = section.partition(f"Why process {number} was replaced afterwards")
        assert "jax.distributed was shut down" in own.partition("Why")[0]
    assert "to the standard error" in passes
    assert "KeyboardInterrupt" in report.section("test_is_interrupted")


def test_timeout_of_a_test_shows_all_stacks(report: PytestRun) -> None:
    section = report.section("test_takes_too_long")
    assert re.search(r"- processes 0, 1 of 2 -+\n.* 3 s", section)
    assert section.count("in waits_for_ever") == 2


def test_broken_fixture_shows_its_phase(report: PytestRun) -> None:
    section = report.section("test_is_broken_in_setup")
    assert "processes 0, 1 of 2, in setup" in section
    assert "LookupError: no such thing" in section


def test_skips_and_expected_failures(report: PytestRun) -> None:
    assert re.search(r"SKIPPED \[1\] test_it.py:\d+: not on a pod", report.text)
    assert re.search(r"SKIPPED \[1\] test_it.py:\d+: not at all", report.text)
    assert report.outcome("test_fails_as_expected") == "XFAIL"
    assert "[XPASS(strict)] fixed" in report.section("test_passes_unexpectedly")


def test_skip_in_one_process_fails(report: PytestRun) -> None:
    assert report.outcome("test_skips_in_one") == "FAILED"
    assert re.search(naming("process 1", "(not here)"), report.section("test_skips_in_one"))


def test_debugger_is_rejected(report: PytestRun) -> None:
    section = report.section("test_calls_breakpoint")
    assert ">       breakpoint()" in section
    assert re.search(naming("PodError", "print()", "xlashard pod -n 2 -d 2"), section)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "test_has_an_unknown_marker_argument",
            "takes no 'proceses'; valid arguments are processes, devices, timeout",
        ),
        (
            "test_has_an_invalid_process_count",
            "processes is '2'; it must be a whole number of 1 or more",
        ),
        ("test_has_a_positional_marker_argument", "takes its arguments by name"),
        ("TestOfUnittest::test_is_refused", "don't derive from unittest.TestCase"),
    ],
)
def test_invalid_markers_are_reported_early(report: PytestRun, name: str, text: str) -> None:
    assert report.outcome(name) == "ERROR"
    section = report.section(f"ERROR at setup of {name.replace('::', '.')}")
    assert text in section
    assert "Traceback" not in section and "During handling" not in section


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ({"processes": 0}, "processes is 0;"),
        ({"processes": True}, "processes is True;"),
        ({"devices": 1.5}, "devices is 1.5;"),
        ({"timeout": "60"}, "timeout is '60';"),
        ({"timeout": 0}, "timeout is 0;"),
        ({"timeout": float("nan")}, "timeout is nan;"),
        ({"timeout": 10**16}, "timeout is 10000000000000000;"),
        ({"timeout": True}, "timeout is True;"),
        ({"fresh": "no"}, "fresh is 'no';"),
        ({"device": 2}, "no 'device'; valid arguments are processes, devices, timeout, fresh"),
    ],
)
def test_invalid_marker_arguments_are_refused(arguments: dict[str, Any], fact: str) -> None:
    item: Any = SimpleNamespace(get_closest_marker=lambda _: pytest.mark.pod(**arguments).mark)
    with pytest.raises(ArgumentError, match=naming(fact, "@pytest.mark.pod(")):
        PodMarker.of_test(item)


def test_marker_accepts_an_infinite_timeout() -> None:
    mark = pytest.mark.pod(devices=2, timeout=float("inf")).mark
    item: Any = SimpleNamespace(get_closest_marker=lambda _: mark)
    assert PodMarker.of_test(item) == PodMarker(2, 2, float("inf"))


def test_outcome_counts(report: PytestRun) -> None:
    assert "11 failed, 19 passed, 2 skipped, 1 xfailed, 4 errors" in report.text
    assert report.code == 1
    assert "never reached" not in report.text.replace('AssertionError("never reached")', "")


def test_live_output_is_prefixed(tmp_path: Path) -> None:
    report = PytestRun(tmp_path, "-s", "-x", "-k", "fails_everywhere or fails_in_one")
    assert "[0] printed by 0\n" in report.text and "[1] printed by 1\n" in report.text
    assert report.outcome("test_fails_everywhere") == "FAILED"
    assert not report.outcome("test_fails_in_one")
    assert "Captured stdout" not in report.text


def test_xdist_reports_are_equal(tmp_path: Path) -> None:
    report = PytestRun(tmp_path, "-n", "1", "-k", "passes[1] or everywhere or skips_itself")
    assert report.outcome("test_passes[1]") == "PASSED"
    assert "----- processes 0, 1 of 2 -----" in report.section("test_fails_everywhere")
    assert report.summary("test_fails_everywhere").startswith("processes 0, 1: AssertionError")
    assert "Captured stdout and stderr of process 1" in report.section("test_fails_everywhere")
    assert "SKIPPED [1] test_it.py" in report.text


def test_debugging_options_are_rejected_early(tmp_path: Path) -> None:
    report = PytestRun(tmp_path, "--pdb")
    assert report.code == pytest.ExitCode.USAGE_ERROR
    assert re.search(naming("--pdb", '-m "not pod"'), report.text)
    passing = PytestRun(tmp_path, "--pdb", "-m", "not pod", "-k", "not too_often")
    assert passing.code == pytest.ExitCode.OK


def test_pytest_starts_without_jax() -> None:
    check = "import sys, xlashard_pytest; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", check], env=environment(), capture_output=True, text=True, check=True
    )
    assert not {"jax", "numpy", "xlashard"} & set(done.stdout.split())


def result(**facts: object) -> PoolResult:
    """Return the outcome of a request to two processes."""
    return PoolResult(PodSize(2, 1), EndingRules(9, 4), **facts)  # pyright: ignore[reportArgumentType]


def test_fate_describes_a_process_without_a_reply() -> None:
    ended = result(replies={0: Reply(True, 3)}, ended=[ProcessExit(1, -11)])
    assert ended.fate(0) == ""
    assert ended.fate(1) == "ended, before the others: killed by SIGSEGV"
    assert result(late=(1,), timed_out=True).fate(1) == "still ran after 9 s"
    paused = result(late=(0, 1), paused=(1,), timed_out=True)
    assert paused.fate(1) == "was stopped by a signal (SIGSTOP) after 9 s"
    assert result(late=(1,)).fate(1) == "still ran 4 s after another process had failed"


def test_in_step_requires_the_same_location() -> None:
    same = {n: Reply(False, RemoteException("text", None), "a.py:3") for n in (0, 1)}
    assert result(replies=same).in_step
    assert not result(
        replies={**same, 1: Reply(False, RemoteException("text", None), "a.py:4")}
    ).in_step
    assert not result(replies={**same, 1: Reply(True, None)}).in_step
    assert not result(replies={0: Reply(True, None)}).in_step


def test_pod_error_groups_failures_and_lists_outputs() -> None:
    replies = {n: Reply(False, RemoteException("ValueError: no", ValueError("no"))) for n in (1, 0)}
    error = pod_error("it failed", result(replies=replies, outputs={1: b"one\n"}, heard=[1, 0]))
    assert str(error) == (
        "it failed\n--- processes 0, 1 of 2 ---\nValueError: no\n--- output of process 1 ---\none"
    )
    assert isinstance(error.errors[0], ValueError)
    assert error.outputs == {0: "", 1: "one\n"}
