"""Pods of real processes that wait for, monitor and end with their peers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.processes import ROOT, free_port, run_pod
from tests.message_patterns import naming
from xlashard.pods.testing.launcher import Launch, LaunchPlan, PodSize
from xlashard.pods.testing.supervision import EndingRules, PodRun, run_to_end

HERE = Path(__file__).parent


def ran(script: str, processes: int, *args: str, grace: float = 15, **variables: str) -> PodRun:
    """Run a script in a pod of one device per process."""
    rules = EndingRules(timeout=200, grace=grace)
    return run_pod([str(HERE / script), *args], PodSize(processes, 1), rules, **variables)


def reports(output: str, *facts: str) -> int:
    """Return how many lines of an output have all of these facts."""
    return sum(re.match(naming(*facts), line) is not None for line in output.splitlines())


@pytest.mark.integration
def test_join_timeout_of_a_single_host_shows_the_launch_command() -> None:
    variables = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "JAX_COORDINATOR_PORT": str(free_port()),
    }
    done = subprocess.run(
        [sys.executable, "-c", "from xlashard import multihost; multihost.initialize()"],
        env={**os.environ, **variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    missing = r"processes 1, 2, 3"
    waiting = rf"process 0 of 4: still waiting for {missing} \((\d+) s\)\. Start it"
    over = rf"process 0 of 4 has waited (\d+) s for {missing}\. Start it in all 4: srun"
    first, last = (re.search(text, done.stderr) for text in (waiting, over))
    assert first and last and 5 <= int(first[1]) <= int(last[1]) < 60 and int(last[1]) >= 10, (
        done.stderr
    )
    assert "srun --ntasks=4 python -c 'from xlashard import multihost; " in done.stderr


@pytest.mark.integration
def test_barriers_and_watchdogs_in_a_pod(tmp_path: Path) -> None:
    done = ran("pod_liveness.py", 3, XLASHARD_TEST_FOLDER=str(tmp_path))
    assert done.verdict.well, done.report()
    assert all("all is well" in output for output in done.outputs)


@pytest.mark.integration
def test_forked_children_leave_the_pod_of_their_parents() -> None:
    # Without the fork server, whose processes end before Python frees the runtime.
    command = [sys.executable, str(HERE / "pod_forks.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    plan = LaunchPlan(command, PodSize(2, 2), environment=environment, one_stream=True)
    done = run_to_end(Launch(plan), EndingRules(timeout=200, grace=15))
    assert done.verdict.well, done.report()
    assert all("as before" in output for output in done.outputs), done.report()


@pytest.mark.integration
@pytest.mark.parametrize("victim", [0, 1], ids=["the coordinator", "another"])
def test_a_killed_process_ends_its_peers(victim: int) -> None:
    done = ran("pod_ending.py", 3, "killed", str(victim))
    codes = list(done.verdict.codes)
    assert codes.pop(victim) == -9, done.report()
    # By themselves: within the launcher's grace of 15 s, and JAX's heartbeat timeout of 20 s.
    assert codes == [75, 75] and not done.verdict.ended, done.report()
    facts = [f"process {victim} of 3", "gone", "connection closed"] + ["coordinator"] * (not victim)
    for process, output in enumerate(done.outputs):
        if process != victim:
            assert reports(output, "xlashard: ", *facts), output
            assert f"Process {process} ends" in output and "--resume" in output
            assert "not reached" not in output


@pytest.mark.integration
def test_waiting_for_an_ended_process_raises() -> None:
    done = ran("pod_ending.py", 3, "raised", "1")
    assert list(done.verdict.codes) == [1, 1, 1] and not done.verdict.ended, done.report()
    for process in (0, 2):
        facts = ("DeadlockError: barrier 'end of the epoch'", "process 1 has ended")
        assert reports(done.outputs[process], *facts, "(ValueError: no such file)"), done.report()


@pytest.mark.integration
@pytest.mark.parametrize("victim", [0, 1], ids=["the coordinator", "another"])
def test_collective_with_a_failed_process_exits(victim: int) -> None:
    done = ran("pod_ending.py", 2, "failed", str(victim))
    other = 1 - victim
    codes = (done.verdict.codes[victim], done.verdict.codes[other])
    assert codes == (1, 75) and not done.verdict.ended, done.report()
    # Gloo may or may not have noticed the closed connection.
    facts = (f"xlashard: process {victim} of 2", "(KeyError: 'missing')", f"Process {other} ends")
    places = [("pod_ending.py:", "in <module>: float(step(x))"), ("was in a collective",)]
    assert any(reports(done.outputs[other], *facts, *place) for place in places), done.report()
    assert "Polled an error" not in done.outputs[victim], "nothing of JAX's comes after"


@pytest.mark.integration
def test_collective_with_a_finished_process_is_reported() -> None:
    done = ran("pod_ending.py", 2, "over", "1")
    facts = ("xlashard: ", "process 1 of 2 has completed", "process 0 is in pod_ending.py:")
    assert reports(done.outputs[0], *facts) == 1, done.report()


@pytest.mark.integration
def test_finished_process_exits_cleanly_when_process_0_fails() -> None:
    done = ran("pod_ending.py", 2, "left", "1")
    assert done.verdict.codes == (1, 75), done.report()
    assert "has ended (its program has completed)" in done.outputs[0]
    facts = ("xlashard: process 0 of 2", "(DeadlockError: ", "process 1 ")
    assert reports(done.outputs[1], *facts), done.report()
    assert "Fatal Python error" not in done.outputs[1], done.report()


@pytest.mark.integration
def test_finished_processes_wait_for_the_program_of_a_peer() -> None:
    done = ran("pod_ending.py", 3, "early", "2")
    assert done.verdict.codes == (0, 0, 0), done.report()
    assert "not reached by all" in done.outputs[2]


@pytest.mark.integration
def test_watchdog_with_crash_ends_the_process() -> None:
    done = ran("pod_ending.py", 2, "crash", "1")
    assert set(done.verdict.codes) <= {70, 75} and 70 in done.verdict.codes, done.report()
    assert any("xlashard: the watchdog ends process" in output for output in done.outputs)
    assert all("process 1 is stuck in pod_ending.py" in output for output in done.outputs)


@pytest.mark.integration
def test_signal_and_command_name_each_process_of_a_hung_pod(tmp_path: Path) -> None:
    variables = {"XLASHARD_TEST_FOLDER": str(tmp_path), "JAX_ENABLE_RECOVERABILITY": "1"}
    done = ran("pod_hangs.py", 4, grace=120, **variables)
    assert done.verdict.codes == (0, 0, -9, 0), done.report()
    report = (tmp_path / "watchdog-0-1.txt").read_text()
    verdict, _, stacks = report.partition("process 1 is stuck")[2].partition("\n\n")
    stuck, *lines = verdict.splitlines()
    lines = [line for line in lines if "made a step just now" not in line]
    # Stopped in Python, dead, other code, in a collective of devices, in one of hosts.
    assert re.match(r" in pod_hangs.py:\d+ in main: time.sleep\(300\)", stuck), report
    patterns = [
        r"process 2 \(pid \d+ on .*\) is dead: ",
        r"process 3 \(pid \d+ on .*\) has other code: network \(network.py\) is (\w{8}), and "
        r"(?!\1)\w{8} in processes 0, 1(, 2)?$",
        r"process 0 waits in pod_hangs.py:\d+ in main: (float\(loss\)|loss = .*) at step 2, for "
        r"the result of train_step \(pod_hangs.py:\d+\)",
        r"process 3 waits in pod_hangs.py:\d+ in main: .* at step 2 \(barrier 'epoch' "
        r"\(pod_hangs.py:\d+\)\)",
    ]
    assert len(lines) == len(patterns), report
    assert all(map(re.match, patterns, lines)), report
    assert re.findall(r"^process (\d), thread 'MainThread':", stacks, re.M) == ["1", "3", "0"]

    _, addresses, in_json, in_table = done.outputs[0].split("\n--- ")
    assert set(re.findall(r"'(\w+)'", addresses)) <= {
        "0100007F",
        "0000000000000000FFFF00000100007F",
    }
    code, _, text = in_json.partition("\n")
    job = json.loads(text)
    rows = job["processes"]
    assert (code, job["count"]) == ("1", 4) and "pod_hangs.py" in job["command"]
    assert [row["answers"] for row in rows] == [True, True, False, True]
    assert [bool(row["other_code"]) for row in rows] == [False, False, False, True]
    assert rows[0]["awaits"].startswith("train_step (pod_hangs.py:")
    assert rows[0]["progress"]["step"] == 2 and rows[0]["resident_bytes"] > 50 << 20
    assert rows[3]["collective"]["waiting"] and rows[3]["collective"]["what"] == "barrier 'epoch'"
    assert {"jax", "jaxlib", "Python"} <= set(rows[2]["versions"])
    assert "2     " in in_table and "is dead: " in in_table and "has other code: " in in_table
