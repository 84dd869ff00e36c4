"""The processes of a sweep: a failure affects one job only, and no process is left running."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import all_gone, wait_for
from xlashard.workers import job_pool
from xlashard.workers.job_pool import (
    JobPool,
    WorkerJob,
    WorkerLimits,
    default_limits,
)

ROOT = Path(__file__).resolve().parents[2]
RUNNERS = "tests.predict.sweep.runners"


def behaving(*ways, **more):
    return [
        WorkerJob(f"{i} {way}", f"{RUNNERS}:behave", {"how": way, **more})
        for i, way in enumerate(ways)
    ]


def ran(jobs, **limits):
    with JobPool(WorkerLimits(**limits)) as pool:
        return {job.key: found for job, found in pool.run(jobs)}


def test_processes_are_reused_for_several_jobs():
    jobs = [WorkerJob(str(n), f"{RUNNERS}:square", {"number": n}) for n in range(12)]
    found = ran(jobs, workers=2)
    assert {key: answer["number"] for key, answer in found.items()} == {
        str(n): n * n for n in range(12)
    }
    pids = {answer["pid"] for answer in found.values()}
    assert 1 <= len(pids) <= 2 and os.getpid() not in pids
    assert all_gone(pids, 0)


@pytest.mark.slow
def test_processes_are_kept_between_series_of_jobs():
    running, answered = 0, []

    def jobs():
        nonlocal running
        for n in range(6):
            # A job is taken when a process is idle.
            assert running < 2
            running += 1
            yield WorkerJob(str(n), f"{RUNNERS}:square", {"number": n})

    with JobPool(WorkerLimits(workers=2)) as pool:
        for _, answer in pool.run(jobs()):
            running -= 1
            answered.append(answer["pid"])
        assert len(answered) == 6
        ((_, again),) = pool.run([WorkerJob("a", f"{RUNNERS}:square", {"number": 1})])
        assert again["pid"] in answered
        # An aborted series leaves no answer for the next one.
        unfinished = pool.run(behaving("well", "wait"))
        next(unfinished)
        unfinished.close()
        assert [job.key for job, _ in pool.run(behaving("well"))] == ["0 well"]
    assert all_gone({*answered, again["pid"]}, 0)


@pytest.mark.slow
def test_forked_child_leaves_the_workers_to_its_parent_and_starts_its_own():
    def square(pool):
        ((_, answer),) = pool.run([WorkerJob("a", f"{RUNNERS}:square", {"number": 3})])
        return answer["pid"]

    with JobPool(WorkerLimits(workers=1)) as pool:
        pid = square(pool)
        child = os.fork()
        if not child:
            own = square(pool)
            pool.close()
            os._exit(0 if own != pid else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert square(pool) == pid


@pytest.mark.slow
def test_failure_affects_only_its_own_job():
    found = ran(behaving("raise", "die", "well", "leave", "well"), workers=1)
    reasons = {key.split()[1]: answer["reason"] for key, answer in found.items()}
    assert [answer["outcome"] for answer in found.values()] == [
        *("failed", "failed", "fits", "failed", "fits")
    ]
    assert reasons["raise"] == "ValueError: no such thing"
    assert "SIGKILL" in reasons["die"] and "out of memory" in reasons["die"]
    assert reasons["die"].endswith("a line / the last words")
    assert "exit code 3" in reasons["leave"]


@pytest.mark.slow
def test_real_time_signal_is_reported_by_number():
    found = ran(behaving("die", "well", signal=signal.SIGRTMIN + 1), workers=1)
    assert f"signal {signal.SIGRTMIN + 1}" in found["0 die"]["reason"]
    assert found["1 well"]["outcome"] == "fits"


@pytest.mark.slow
def test_a_worker_that_is_stopped_or_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(job_pool, "_STOPPED_SECONDS", 0.1)
    found = ran(behaving("stop", "well"), workers=1)
    assert re.search(r"process \d+ was stopped for 0.1 s, as by SIGSTOP", found["0 stop"]["reason"])
    assert found["1 well"]["outcome"] == "fits"
    monkeypatch.setattr(job_pool, "_IDLE_SECONDS", 0.1)
    (reason,) = [answer["reason"] for answer in ran(behaving("wait"), workers=1).values()]
    assert re.search(r"process \d+ used no CPU for 0.1 s", reason)


def test_time_in_which_a_worker_computes_or_the_pool_is_stopped_does_not_count(monkeypatch):
    activity = iter([("S", 1), ("S", 1), ("T", 2), ("S", 2), ("S", 3), ("S", 3)])
    monkeypatch.setattr(job_pool, "_read_activity", lambda pid: next(activity))
    monkeypatch.setattr(
        job_pool.time, "monotonic", iter([0, 500, 1000, 1500, *range(2000, 2003)]).__next__
    )
    stall = job_pool._Stall()
    assert [stall.observe(1) for _ in range(6)] == [""] * 6
    assert (stall._idle, stall._stopped) == (1.0, 0.0)


@pytest.mark.slow
def test_worker_beyond_its_memory_or_time_limit_is_ended():
    large = behaving("grow", "well", bytes=300 * 2**20)
    found = ran(large, workers=1, bytes=150 * 2**20)
    assert found["0 grow"]["reason"] == ("compiling it exceeded 150.0 MiB of this machine's memory")
    assert found["1 well"]["outcome"] == "fits"
    found = ran(behaving("wait", "well"), workers=1, seconds=1.0)
    assert found["0 wait"]["reason"] == "it timed out after 1 s"
    assert found["0 wait"]["seconds"] >= 1
    assert found["1 well"]["outcome"] == "fits"


def test_job_with_a_missing_runner_fails():
    (found,) = ran([WorkerJob("a", f"{RUNNERS}:nothing", {})], workers=1).values()
    assert found["outcome"] == "failed" and "nothing" in found["reason"]


@pytest.mark.slow
def test_workers_end_with_the_iterator(tmp_path):
    pool = JobPool(WorkerLimits(workers=2))
    answers = pool.run(behaving("well", "wait", "wait", mark=str(tmp_path)))
    _, first = next(answers)
    assert first["outcome"] == "fits"
    wait_for(lambda: any(tmp_path.iterdir()), "process that waits")
    answers.close()
    pids = [int(file.name) for file in tmp_path.iterdir()]
    assert pids and all_gone(pids, 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_interrupted_sweep_leaves_no_process(tmp_path, number):
    command = [sys.executable, "-m", "tests.predict.sweep.stopped", str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True
    ) as sweep:
        try:
            wait_for(lambda: len(list(tmp_path.iterdir())) == 2, "second process")
            pids = [int(file.name) for file in tmp_path.iterdir()]
            sweep.send_signal(number)
            sweep.wait(60)
        finally:
            sweep.kill()
    assert all_gone(pids)
    assert sweep.returncode in (-number, 130, 1)


def test_default_worker_count_fits_cpus_and_memory(monkeypatch):

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for free, workers in ((7 * 2**30, 2), (2**30, 1), (400 * 2**30, 16), (0, 16)):
        monkeypatch.setattr(job_pool, "read_available_memory", lambda free=free: free)
        limits = default_limits()
        assert limits.workers == workers and limits.bytes * workers <= free
    assert default_limits(3).workers == 3
