"""`pod`: functions and scripts in real processes, and the reports of their failures."""

import functools
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from tests.core.processes import pod_python
from tests.fork_server import python_command
from tests.message_patterns import naming
from tests.pods.testing import pod_functions as functions
from tests.pods.testing.helpers import ROOT, environment
from xlashard.errors import ArgumentError, PodError
from xlashard.pods.testing import worker_pool
from xlashard.pods.testing.pod_worker import name_of
from xlashard.pods.testing.supervision import is_paused
from xlashard.testing import EmulatedPod, pod

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).with_name("pod_script.py")
# The last bytes of 127.0.0.1, alone and within an address of IPv6, as the kernel writes them.
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


@pytest.fixture(scope="module")
def pair() -> Iterator[EmulatedPod]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_pool, "_python", pod_python)
        with pod(processes=2, devices_per_process=2, grace=1) as pair:
            yield pair


def test_results_are_ordered_by_process(pair: EmulatedPod) -> None:
    assert pair.run(functions.place) == [(0, 2, 4), (1, 2, 4)]
    assert pair.run(functions.gathered, 3) == [6, 6]
    assert pair.run(functools.partial(functions.gathered, times=2), 5) == [20, 20]
    assert pair.run(jax.process_index) == [0, 1]


def test_pod_accepts_an_infinite_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "_python", pod_python)
    assert pod(processes=1, timeout=math.inf).run(jax.process_count) == [1]


def test_processes_are_reused_between_calls(pair: EmulatedPod) -> None:
    pair.run(functions.keep, "something")
    assert pair.run(functions.keep, None) == ["something"] * 2


def test_failure_shows_every_process(pair: EmulatedPod) -> None:
    pair.run(functions.keep, "before the failure")
    with pytest.raises(PodError) as caught:
        pair.run(functions.fail_in, 1)
    error = caught.value
    text = str(error)
    assert text.startswith("fail_in failed in a pod of 2 × 2 devices\n--- process 1 of 2 ---")
    assert 'raise KeyError("a key")' in text and "KeyError: 'a key'" in text
    assert re.search(r"--- process 0 of 2 ---\n.* 1 s ", text)
    assert "in fail_in" in error.outputs[0].partition("Current thread")[2]
    assert "worker.py" not in text
    assert list(error.tracebacks) == [1]
    assert isinstance(error.__cause__, KeyError) and error.errors == {1: error.__cause__}
    # The state of the processes is unknown, so the next call starts new ones.
    assert pair.run(functions.keep, None) == [None, None]


def test_identical_failure_keeps_the_processes(pair: EmulatedPod) -> None:
    pair.run(functions.keep, "before the failure")
    with pytest.raises(
        PodError, match="(?s)processes 0, 1 of 2 ---.*Unreadable: 1 and 2"
    ) as caught:
        pair.run(functions.fail_unreadably)
    assert not caught.value.errors
    with pytest.raises(PodError, match=r"SystemExit: 3"):
        pair.run(functions.leave)
    assert pair.run(functions.keep, None) == ["before the failure"] * 2


def test_unpicklable_results_are_reported(pair: EmulatedPod) -> None:
    with pytest.raises(PodError, match=naming("give_a_function", "builtins.function", "pickled")):
        pair.run(functions.give_a_function)
    with pytest.raises(PodError, match=r"returned .*Array, .*addressable_data\(0\)"):
        pair.run(functions.give_a_global_array)


def test_only_loopback_ports_are_open(pair: EmulatedPod) -> None:
    coordinator, other = pair.run(functions.listening)
    assert coordinator and other
    assert {*coordinator, *other} <= LOOPBACK


def test_killed_and_suspended_processes_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    # The launcher sees the state of its own children only, not that of a forked process.
    monkeypatch.setattr(worker_pool, "_python", lambda size, environment: [sys.executable])
    with pod(processes=2, grace=1, timeout=120) as pair:
        with pytest.raises(PodError, match=naming("process 1 of 2 ---\nended", "SIGKILL")):
            pair.run(functions.die)
        monkeypatch.setattr(worker_pool, "time", ClockOfStopped(pair))
        with pytest.raises(PodError) as caught:
            pair.run(functions.stop)
    assert re.search(r"--- process 1 of 2 ---\n.*\(SIGSTOP\).* 120 s", str(caught.value))
    assert re.search(r"--- process 0 of 2 ---\n.* 120 s", str(caught.value))
    assert all("in stop" in output for output in caught.value.outputs.values())


class ClockOfStopped:
    """Clock on which a timeout elapses once one process of a pod is stopped and the other waits."""

    def __init__(self, pair: EmulatedPod) -> None:
        self._pair, self._ahead = pair, 0.0

    def monotonic(self) -> float:
        pool = self._pair._pool
        pids = [] if pool is None else pool._launch.pids
        if len(pids) == 2 and is_paused(pids[1]):
            self._ahead = 1000.0
        return time.monotonic() + self._ahead


def test_scripts_detect_the_pod() -> None:
    done = pod(processes=2, devices_per_process=3).run_script(SCRIPT)
    assert [output.splitlines()[-1] for output in done.outputs] == [
        "process 0 of 2 has 3",
        "process 1 of 2 has 3",
    ]
    assert done.verdict.well


def test_failing_script_is_reported() -> None:
    with pytest.raises(PodError) as caught:
        pod(processes=2).run_script(SCRIPT, "fail")
    assert re.search(naming("pod_script.py", "2 × 1 device", "process 1"), str(caught.value))
    assert "process 1 gives up" in caught.value.outputs[1]
    done = pod(processes=2).run_script(SCRIPT, "fail", check=False)
    assert done.verdict.codes == (1, 1)


def test_exception_exits_while_peers_wait() -> None:
    script = SCRIPT.with_name("raising_script.py")
    two = pod(processes=2, grace=1, environment={"PYTHONPATH": str(ROOT)})
    done = two.run_script(script, check=False)
    verdict = done.verdict
    assert (verdict.timed_out, verdict.codes[1]) == ((), 1)
    # Process 0, which detects the loss of its peer, may end faster.
    assert 1 in [end.process for end in verdict.failed]
    assert "ValueError: no more" in done.outputs[1]
    # The program's exit handlers have run, and JAX's client logs no error.
    assert done.outputs[1].rstrip().endswith("at the end")
    assert "fatal" not in done.outputs[1].lower()


PROGRAM = """
import jax
from xlashard.testing import pod

def double(x):
    return 2 * x + jax.process_index()

if __name__ == "__main__":
    print(pod(processes=2).run(double, 4))
"""


def test_functions_of_the_main_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [*python_command(environment()), str(tmp_path / "program.py")],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[8, 9]\n", done.stderr


UNGUARDED = """
from xlashard.testing import pod

def work():
    return 1

print(pod(processes=2).run(work))
"""


def test_pod_started_at_import_time(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(UNGUARDED)
    done = subprocess.run(
        [*python_command(environment()), str(tmp_path / "program.py")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1 and not done.stdout
    facts = naming("pod().run", "program.py", "if __name__ == '__main__':")
    assert re.search(facts, done.stderr)


def a_function() -> None:
    """Defined at the top of a module that pytest imports by its path."""


def test_functions_without_a_module_name() -> None:
    number = 3

    def inner() -> int:
        return number

    assert name_of(a_function).file == __file__
    with pytest.raises(ArgumentError, match=naming("inner", "test_pods.py", "(number)")):
        name_of(inner)
    with pytest.raises(ArgumentError, match=r"\(number\) as arguments: pod.run\(work, number\)"):
        name_of(inner)
    with pytest.raises(ArgumentError, match=r"a lambda \(in .*pass that: pod.run\(work\)"):
        name_of(lambda: 3)


def test_repr() -> None:
    assert repr(pod(3, 2)) == "pod(processes=3, devices_per_process=2)"
