"""A job that goes on when its TPU is taken away: the loop by itself, and with all that it does."""

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cloud.conftest import Cloud
from xlashard.cloud.resuming import Resumption, resumption_of, start_or_resume
from xlashard.cloud.retrying import Backoff
from xlashard.cloud.watching import After, Doings, Ended, Limits, how_to_resume, keep_going, watch
from xlashard.errors import CloudError

LOST, BROKEN = Ended(After.LOST, 1, "one is PREEMPTED"), Ended(After.BROKEN, 75)
DONE, FAILED, STOPPED = Ended(After.DONE, 0), Ended(After.FAILED, 3), Ended(After.STOPPED, 130)
REFUSED = CloudError("no capacity")


@dataclass
class Played:
    """The loop with a clock that tells its waits, and doings that follow a script."""

    makes: list[CloudError | None]
    runs: list[Ended]
    done: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def now(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        self.done.append(f"wait {seconds:g}")

    def make(self) -> None:
        self.done.append("make")
        error = self.makes.pop(0) if self.makes else None
        if error:
            raise error

    def run(self, attempt: int) -> Ended:
        self.done.append(f"run {attempt}")
        return self.runs.pop(0)

    def play(self, tries: int = 9, keep: bool = False) -> int:
        doings = Doings(self.make, self.run, lambda: self.done.append("remove"))
        limits = Limits(tries, Backoff(10, most=60), keep)
        return keep_going(doings, limits, self, self.said.append)


LOOPS = {
    "done at once": ([], [DONE], 0, "make, run 1, remove"),
    "a job that fails is not cured by another TPU": ([], [FAILED], 3, "make, run 1, remove"),
    "somebody stops it": ([], [STOPPED], 130, "make, run 1, remove"),
    "taken away twice": (
        [],
        [LOST, LOST, DONE],
        0,
        "make, run 1, remove, wait 10, make, run 2, remove, wait 10, make, run 3, remove",
    ),
    "a worker is gone, and the TPU is there": ([], [BROKEN, DONE], 0, "make, run 1, run 2, remove"),
    "there is no capacity for a while": (
        [REFUSED, REFUSED, REFUSED],
        [DONE],
        0,
        "make, remove, wait 10, make, remove, wait 20, make, remove, wait 40, make, run 4, remove",
    ),
}


@pytest.mark.parametrize(("makes", "runs", "code", "steps"), LOOPS.values(), ids=LOOPS.keys())
def test_the_loop(makes: list, runs: list[Ended], code: int, steps: str) -> None:
    played = Played(list(makes), list(runs))
    assert played.play() == code
    assert ", ".join(played.done) == steps


def test_the_loop_gives_up() -> None:
    played = Played([], [LOST] * 3)
    assert played.play(tries=3) == 1
    assert played.done.count("make") == 3 and played.done[-1] == "remove"
    assert played.said[-1] == "gave up after 3 tries"


def test_waits_grow_to_a_limit() -> None:
    played = Played([REFUSED] * 6, [])
    assert played.play(tries=6) == 1
    waits = [step for step in played.done if step.startswith("wait")]
    assert waits == ["wait 10", "wait 20", "wait 40", "wait 60", "wait 60"]


def test_the_tpu_may_be_kept() -> None:
    played = Played([], [DONE])
    assert played.play(keep=True) == 0
    assert "remove" not in played.done


def test_a_wrong_request_is_not_made_again() -> None:
    wrong = CloudError("no such type", code=2)
    played = Played([wrong], [])
    with pytest.raises(CloudError, match="no such type"):
        played.play()
    assert played.done == ["make"]


NO_WAY = [
    "python train.py",
    "xlashard train --resume runs/one",
    "xlashard train",
    "xlashard pod -n 2 -- echo train",
    "xlashard train --config a.toml && echo done",
    "xlashard train --config 'a.toml",
]


@pytest.mark.parametrize("command", NO_WAY)
def test_commands_that_do_not_say_how_they_go_on(command: str) -> None:
    assert resumption_of(command) is None


def test_how_a_training_run_goes_on() -> None:
    found = resumption_of(
        "env A=1 python -m xlashard train --set run.seed=3 --config=configs/1b.toml --runs /mnt/r "
        "--name 'my run'"
    )
    # `python -m xlashard train` is `xlashard train`, too.
    assert found == Resumption(
        "env A=1 python -m xlashard train --set run.seed=3 --runs /mnt/r "
        '--resume "${last%/checkpoints/*}"',
        "'/mnt/r/my run'/checkpoints/[0-9]* '/mnt/r/my run'-*/checkpoints/[0-9]*",
    )


def test_the_newest_checkpoint_decides(tmp_path: Path) -> None:
    script = start_or_resume(
        "echo start",
        Resumption('echo "resume ${last%/checkpoints/*}"', f"{tmp_path}/*/checkpoints/[0-9]*"),
    )
    run = f"bash -c {_quoted(script)}"
    assert os.popen(run).read() == "start\n"
    for age, name in enumerate(("one", "one-2")):
        folder = tmp_path / name / "checkpoints" / "00000002"
        folder.mkdir(parents=True)
        os.utime(folder, (1000 * age, 1000 * age))
    (tmp_path / "one-3" / "checkpoints" / ".saving-00000009").mkdir(parents=True)
    newest = f"{tmp_path}/one-2"
    assert os.popen(run).read() == f"going on from {newest}/checkpoints/00000002\nresume {newest}\n"


def _quoted(script: str) -> str:
    return "'" + script.replace("'", "'\\''") + "'"


def test_half_a_way_to_go_on(cloud: Cloud) -> None:
    with pytest.raises(CloudError, match=r"--resume needs --checkpoints.*--resume='python"):
        how_to_resume(cloud.session(watch__resume="python train.py --resume"))
    with pytest.raises(CloudError, match="--checkpoints needs --resume"):
        how_to_resume(cloud.session(watch__checkpoints="/mnt/*"))


@pytest.mark.slow
def test_a_lost_worker_without_a_preemption_starts_the_job_again(cloud: Cloud) -> None:
    """Its processes are killed, as when its memory is full or it restarts."""

    def kill() -> None:
        home = cloud.folder / "homes" / "one--1"
        while not (ready := list(home.glob("job/ready"))):
            time.sleep(0.01)
        ready[0].unlink()
        for pid in _supervisors(home):
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    script = "if [ $LAUNCHER_ATTEMPT = 2 ]; then echo again; exit; fi; touch ready; sleep 60"
    assert watch(cloud.session(run__command=script)) == 0
    killer.join()
    assert cloud.log("1") == "again\n"
    said = " ".join(cloud.said)
    assert "nothing says how the job goes on" in said
    assert "the job broke off, and the TPU is there" in said
    assert cloud.verbs().count("compute tpus tpu-vm create one") == 1


def _supervisors(home: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"supervise" in words and str(home / ".xlashard" / "agent.py").encode() in words:
            found.append(int(path.parent.name))
    return found


CONFIG = """
[devices]
emulate = 4
[mesh]
data = 4
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
def test_training_goes_on_where_a_preemption_has_ended_it(cloud: Cloud) -> None:
    runs = cloud.folder / "bucket"
    cloud.write_code(one_toml=CONFIG)

    def take_away() -> None:
        while not list(runs.glob("one/checkpoints/[0-9]*")):
            if over.wait(0.01):
                return
        # From here on few steps are left.
        cloud.preempt()
        config = runs / "one" / "config.toml"
        config.write_text(config.read_text().replace("steps = 400", "steps = 20"))

    over = threading.Event()
    taker = threading.Thread(target=take_away)
    taker.start()
    command = f"python -m xlashard train --config one.toml --runs {runs}"
    code = watch(cloud.session(run__command=command, tpu__capacity="spot"))
    over.set()
    taker.join()
    log = cloud.log("0")
    assert code == 0, (cloud.said, log, cloud.log("1"))
    assert "the TPU was taken away: one is PREEMPTED" in cloud.said
    assert log.count("going on from") == 1 and "Going on after step" in log
    assert os.listdir(runs) == ["one"]
    verbs = [verb.removeprefix("compute tpus tpu-vm ") for verb in cloud.verbs()]
    assert [v for v in verbs if v in ("create one", "delete one")] == 2 * [
        "create one",
        "delete one",
    ]
    assert cloud.running() == []
