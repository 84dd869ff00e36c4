"""The main job of two processes on a stand-in object store: preempted, killed, and resumed."""

import json
import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.train.loop.pods import OwnSignal, train
from tests.train.loop.test_pods import MIXED, alone, assert_same_bits, nano, saved, written
from xlashard.multihost import GONE_EXIT_CODE
from xlashard.pods.testing.launcher import Launch, PodSize
from xlashard.train.checkpoint import Checkpoints

if TYPE_CHECKING:
    from tests.train.store.server import Bucket

pytestmark = pytest.mark.integration

# Seconds that a cloud gives a job after SIGTERM.
GRACE = 30
# What differs is the store: `tests/train/loop/test_pods.py` has pods of four processes, on a disk.
PAIR = PodSize(2, 4)


def read_losses(text: str) -> dict[tuple[str, int], float]:
    """Return all losses of metrics; each once."""
    measured = [x for x in map(json.loads, text.splitlines()) if x["kind"] in ("train", "eval")]
    losses = {(x["kind"], x["step"]): x["loss"] for x in measured}
    assert len(losses) == len(measured)
    return losses


# Four pods.
@pytest.mark.timeout(600)
def test_pod_is_preempted_killed_and_resumed_with_the_same_losses(
    bucket: "Bucket", store: Path, tmp_path: Path
) -> None:
    settings = nano(**MIXED)
    path = written(tmp_path, settings)
    words = ["--config", str(path), "--runs", "gs://bucket/calm"]
    pod = train(tmp_path, PAIR, *words)
    assert set(pod.codes.values()) == {0}, pod.report()

    bucket.faults.failed, bucket.faults.reset, bucket.faults.delay = 0.01, 0.01, 0.01
    bucket.injected = 0
    chance, called = random.Random(44), list[float]()
    # One command for every start of the job.
    words = ["--config", str(path), "--runs", "gs://bucket/runs", "--auto-resume"]

    def notice(launch: Launch, printed: str) -> bool:
        if "SIGTERM: stopping ..." in printed:
            called.append(time.monotonic())
        return bool(called)

    step, process = chance.randrange(3, 9), chance.randrange(2)
    own = OwnSignal(signal.SIGTERM, process, step)
    pod = train(tmp_path, PAIR, *words, watch=notice, own=own)
    # The code that restarts a job: 128 + SIGTERM.
    assert set(pod.codes.values()) == {143}, pod.report()
    took = max(pod.ended.values()) - called[0]
    print(f"preempted at step {step} by process {process}: ended after {took:.1f} s")
    assert took < GRACE
    stopped = Checkpoints(store / "nano" / "checkpoints").latest()
    assert stopped is not None and stopped >= step
    assert f"Stopped by SIGTERM after step {stopped}" in pod.texts[0]
    assert "--resume gs://bucket/runs/nano" in pod.texts[0]
    assert f"after step {stopped}" in bucket.text("runs/nano/log-1.txt")

    victim = chance.randrange(2)
    pod = train(
        tmp_path, PAIR, *words, own=OwnSignal(signal.SIGKILL, victim, chance.randrange(13, 18))
    )
    assert pod.codes == {n: -9 if n == victim else GONE_EXIT_CODE for n in range(2)}, pod.report()
    assert f"Resuming after step {stopped} of gs://bucket/runs/nano" in pod.texts[0]
    pod = train(tmp_path, PAIR, *words)
    assert set(pod.codes.values()) == {0}, pod.report()

    assert bucket.injected >= 5
    assert not (tmp_path / "runs").exists() and not (tmp_path / "gs:").exists()
    calm, again = (bucket.text(f"{runs}/nano/metrics.jsonl") for runs in ("calm", "runs"))
    assert read_losses(calm) == read_losses(again)
    assert "runs/nano/run.lock" not in bucket.objects
    bucket.faults = type(bucket.faults)()
    assert_same_bits(
        *(saved(store.parent / runs / "nano", settings, 20) for runs in ("calm", "runs"))
    )


def test_process_alone_saves_on_a_store_what_it_saves_on_a_disk(
    bucket: "Bucket", store: Path, tmp_path: Path
) -> None:
    settings = nano(**MIXED)
    there, here = alone(settings, store).folder, alone(settings, tmp_path).folder
    assert read_losses(bucket.text("runs/nano/metrics.jsonl")) == read_losses(
        (here / "metrics.jsonl").read_text()
    )
    assert_same_bits(saved(there, settings, 20), saved(here, settings, 20))
    assert {Path(x).name for x in bucket.objects if x.count("/") == 2} == {
        x.name for x in here.iterdir() if x.is_file()
    }
