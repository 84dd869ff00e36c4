"""Jobs on all workers of a TPU."""

import os
import signal
import threading
from collections.abc import Callable

import pytest

from tests.cli.cloud.conftest import Cloud
from tests.message_patterns import naming
from tests.waiting import wait_for
from xlashard.cli.cloud.jobs import logs, run
from xlashard.cli.cloud.tpu import create, run_on_all, set_up, worker_script
from xlashard.errors import CloudError

pytestmark = pytest.mark.slow


@pytest.fixture
def tpu(cloud: Cloud) -> Cloud:
    create(cloud.session())
    return cloud


def start_only(cloud: Cloud, command: str) -> None:
    """Start a job as `run` does, without following it, as when a laptop is closed."""
    session = cloud.session()
    set_up(session, range(2))
    run_on_all(session, range(2), worker_script("start", "20260101", "1", command), "start on")


def in_background(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def press_ctrl_c(cloud: Cloud) -> threading.Thread:
    """Press Ctrl-C when both workers have printed `ready`."""

    def press() -> None:
        wait_for(lambda: all("ready" in cloud.log(n) for n in range(2)), "the workers")
        os.kill(os.getpid(), signal.SIGINT)

    return in_background(press)


def test_output_of_all_workers_is_logged_and_shown(
    tpu: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tpu.session(run__command="sh job.sh; printf 'no newline'")) == 0
    assert [tpu.log(n) for n in range(2)] == [f"hello from {n}\nno newline" for n in range(2)]
    shown = sorted(capsys.readouterr().out.splitlines())
    assert shown == [*("[0] hello from 0", "[0] no newline", "[1] hello from 1", "[1] no newline")]
    assert tpu.reports[-1].startswith("done on 2 workers; logs in ")
    wait_for(lambda: not tpu.running(), "the end of the processes")


def test_log_is_complete_after_a_broken_connection(tpu: Cloud) -> None:
    tpu.breaks = {0: [40, 100, 1500], 1: [4]}
    assert run(tpu.session(run__command="for i in $(seq 300); do echo line $i; done")) == 0
    lines = "".join(f"line {number}\n" for number in range(1, 301))
    assert tpu.log(0) == lines and tpu.log(1) == lines


def test_the_first_failure_stops_the_other_workers(tpu: Cloud) -> None:
    script = (
        "if [ $XLASHARD_POD_PROCESS_ID = 1 ]; then echo about to fail; exit 3; fi; "
        "trap 'echo stopped; exit 143' TERM; sleep 60 & wait"
    )
    assert run(tpu.session(run__command=script, run__grace=0.5)) == 3
    assert tpu.reports[-1].startswith("worker 1 failed first: exit code 3\n")
    assert tpu.reports[-1].endswith("about to fail")
    assert "stopped" in tpu.log(0)
    wait_for(lambda: not tpu.running(), "the end of the processes")


def test_logs_can_be_followed_again_also_after_the_end(tpu: Cloud) -> None:
    with pytest.raises(CloudError, match=naming("one", "run.py --name=one")):
        set_up(tpu.session(), range(2))
        logs(tpu.session())
    start_only(tpu, "echo started; sleep 0.3; echo done; exit 4")
    for _ in range(2):  # The second time, the job has ended.
        assert logs(tpu.session()) == 4
        assert [tpu.log(n) for n in range(2)] == ["started\ndone\n"] * 2


def test_an_earlier_job_is_stopped(tpu: Cloud) -> None:
    start_only(tpu, "trap '' TERM; sleep 60 & sleep 60")
    assert tpu.running()
    assert run(tpu.session(run__command="true", run__grace=0.1)) == 0
    wait_for(lambda: not tpu.running(), "the end of the processes")


def test_a_job_leaves_no_process_in_the_background(tpu: Cloud) -> None:
    assert run(tpu.session(run__command="(trap '' TERM; sleep 60) & echo done")) == 0
    wait_for(lambda: not tpu.running(), "the end of the processes")


def test_ctrl_c_stops_the_job_on_all_workers(tpu: Cloud) -> None:
    presser = press_ctrl_c(tpu)
    script = "trap 'echo bye; exit 5' TERM; echo ready; sleep 60 & wait"
    assert run(tpu.session(run__command=script)) == 130
    presser.join()
    assert "stopping the job on all workers" in " ".join(tpu.reports)
    assert [tpu.log(n) for n in range(2)] == ["ready\nbye\n"] * 2
    wait_for(lambda: not tpu.running(), "the end of the processes")


def test_ctrl_c_of_logs_leaves_the_job_running(tpu: Cloud) -> None:
    start_only(tpu, "echo ready; sleep 60")
    presser = press_ctrl_c(tpu)
    assert logs(tpu.session()) == 130
    presser.join()
    assert tpu.running()


def test_killed_job_exits_with_75(tpu: Cloud) -> None:
    start_only(tpu, "sleep 60")
    for worker in range(2):
        tpu.kill("HOME", str(tpu.home(worker)))
    assert logs(tpu.session()) == 75


def test_permanently_unreachable_worker_is_reported(tpu: Cloud) -> None:
    set_up(tpu.session(), range(2))
    start_only(tpu, "sleep 60")
    tpu.unreachable = {1: 99}
    assert logs(tpu.session(run__grace=0.1)) == 1
    assert "worker 1 is unreachable (Connection closed by remote host)" in tpu.reports[-1]


def test_preempted_tpu_is_detected(tpu: Cloud) -> None:
    def preempt() -> None:
        wait_for(lambda: "ready" in tpu.log(0), "the job")
        tpu.preempt()

    thread = in_background(preempt)
    assert run(tpu.session(run__command="echo ready; sleep 60")) == 1
    thread.join()
    assert tpu.reports[-1] == "the job was lost: one is PREEMPTED"
