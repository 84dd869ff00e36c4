"""A job that resumes when its TPU is preempted: the loop alone, and with all its steps."""

import os
import signal
from dataclasses import dataclass, field, replace

import pytest

from tests.cli.cloud.conftest import Cloud
from tests.cli.cloud.test_jobs import in_background
from tests.waiting import wait_for
from xlashard.cli.cloud.jobs import Next, keep_running, watch
from xlashard.errors import CloudError

LOST, BROKEN = (1, Next.RECREATE), (75, Next.RESTART)
DONE, FAILED, STOPPED = (0, Next.STOP), (3, Next.STOP), (130, Next.STOP)
REFUSED = CloudError("no capacity")


@dataclass
class Script:
    """Actions that follow a script, and a record of them and of the pauses."""

    makes: list[CloudError]
    runs: list[tuple[int, Next]]
    steps: list[str] = field(default_factory=list)

    def make(self) -> None:
        self.steps.append("make")
        if self.makes:
            raise self.makes.pop(0)

    def run(self, attempt: int) -> tuple[int, Next]:
        self.steps.append(f"run {attempt}")
        return self.runs.pop(0)

    def play(self, cloud: Cloud, **settings: object) -> int:
        session = replace(
            cloud.session(watch__pause=10.0, **settings),
            sleep=lambda seconds: self.steps.append(f"wait {seconds:g}"),
        )
        remove = lambda: self.steps.append("remove")  # noqa: E731
        return keep_running(session, self.make, self.run, remove)


LOOPS = {
    "done at once": ([], [DONE], 0, "make, run 1, remove"),
    "a job that fails is not repeated": ([], [FAILED], 3, "make, run 1, remove"),
    "interrupted": ([], [STOPPED], 130, "make, run 1, remove"),
    "preempted twice": (
        [],
        [LOST, LOST, DONE],
        0,
        "make, run 1, remove, wait 10, make, run 2, remove, wait 10, make, run 3, remove",
    ),
    "a worker is lost, the TPU is ready": ([], [BROKEN, DONE], 0, "make, run 1, run 2, remove"),
    "no capacity for a while": (
        [REFUSED, REFUSED, REFUSED],
        [DONE],
        0,
        "make, remove, wait 10, make, remove, wait 20, make, remove, wait 40, make, run 4, remove",
    ),
}


@pytest.mark.parametrize(("makes", "runs", "code", "steps"), LOOPS.values(), ids=LOOPS.keys())
def test_watch_loop_repeats_steps_until_an_exit_code(
    cloud: Cloud, makes: list, runs: list, code: int, steps: str
) -> None:
    script = Script(list(makes), list(runs))
    assert script.play(cloud) == code
    assert ", ".join(script.steps) == steps


def test_watch_loop_stops_after_the_maximum_number_of_tries(cloud: Cloud) -> None:
    script = Script([], [LOST] * 3)
    assert script.play(cloud, watch__tries=3) == 1
    assert script.steps.count("make") == 3 and script.steps[-1] == "remove"
    assert cloud.reports[-1] == "gave up after 3 attempts"


def test_watch_with_keep_does_not_delete_the_tpu(cloud: Cloud) -> None:
    script = Script([], [DONE])
    assert script.play(cloud, watch__keep=True) == 0
    assert script.steps == ["make", "run 1"]


def test_invalid_request_is_not_retried(cloud: Cloud) -> None:
    script = Script([CloudError("no such type", code=2)], [])
    with pytest.raises(CloudError, match="no such type"):
        script.play(cloud)
    assert script.steps == ["make"]


@pytest.mark.slow
def test_a_lost_worker_of_a_ready_tpu_restarts_the_job(cloud: Cloud) -> None:
    """As when its memory is full or the VM restarts: its processes are killed."""

    def kill() -> None:
        ready = cloud.home(1) / "job" / "ready"
        wait_for(ready.exists, "the job")
        cloud.kill("HOME", str(cloud.home(1)))

    killer = in_background(kill)
    script = "if [ $LAUNCHER_ATTEMPT = 2 ]; then echo again; exit; fi; touch ready; sleep 60"
    assert watch(cloud.session(run__command=script, run__grace=0.1)) == 0
    killer.join()
    assert cloud.log(1) == "again\n"
    assert "a worker was lost, but the TPU is ready: restarting the job" in cloud.reports
    assert cloud.verbs().count("create") == 1


@pytest.mark.slow
def test_ctrl_c_while_waiting_deletes_the_tpu(cloud: Cloud) -> None:
    def press() -> None:
        wait_for(lambda: "waiting: one is CREATING" in cloud.reports, "the request")
        os.kill(os.getpid(), signal.SIGINT)

    cloud.final = "CREATING"
    presser = in_background(press)
    with pytest.raises(KeyboardInterrupt):
        watch(cloud.session(run__command="true"))
    presser.join()
    assert cloud.verbs()[-1] == "delete"


CONFIG = """
[devices]
emulate = 2
[mesh]
data = 2
[sharding.rules]
batch = "data"
[model]
layers = 1
width = 16
heads = 2
kv_heads = 2
mlp = 16
length = 16
[training]
steps = 400
batch = 4
eval_every = 0
[checkpoint]
every = 2
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_training_is_resumed_after_a_preemption(cloud: Cloud) -> None:
    cloud.hosts, runs = 1, cloud.folder / "bucket"
    cloud.write_code(one_toml=CONFIG)

    def preempt() -> None:
        wait_for(lambda: list(runs.glob("one/checkpoints/[0-9]*")), "a checkpoint")
        cloud.preempt()
        # Few steps remain for the next start.
        names = os.listdir(runs / "one" / "checkpoints")
        saved = [int(name) for name in names if name.isdigit()]
        config = runs / "one" / "config.toml"
        config.write_text(config.read_text().replace("steps = 400", f"steps = {max(saved) + 4}"))

    thread = in_background(preempt)
    command = f"python -m xlashard train --config one.toml --runs {runs}"
    code = watch(cloud.session(run__command=f"{command} --auto-resume", tpu__accelerator="v4-8"))
    thread.join()
    assert code == 0, (cloud.reports, cloud.log(0))
    assert "the TPU was preempted: one is PREEMPTED" in cloud.reports
    assert "Resuming after step" in cloud.log(0)
    assert os.listdir(runs) == ["one"]
    verbs = [verb for verb in cloud.verbs() if verb in ("create", "delete")]
    assert verbs == ["create", "delete", "create", "delete"]
    wait_for(lambda: not cloud.running(), "the end of the processes")


def test_a_training_run_without_auto_resume_is_reported(cloud: Cloud) -> None:
    session = cloud.session(run__command="xlashard train --config a.toml", tpu__accelerator="v4-9")
    with pytest.raises(CloudError, match="v4-9"):
        watch(session)
    assert "add --auto-resume" in cloud.reports[0]
