"""The main job on several processes: losses as on one, one checkpoint per stop, and resuming."""

import json
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.train.examples import devices
from tests.train.loop.pods import OwnSignal, signalled, train
from tests.train.loop.test_job import Recorder
from xlashard.multihost import GONE_EXIT_CODE
from xlashard.pods.testing.launcher import Launch, PodSize
from xlashard.train.checkpoint import Checkpoints
from xlashard.train.config.schema import read, to_toml
from xlashard.train.config.settings import Settings
from xlashard.train.loop.job import run_job
from xlashard.train.loop.run_folder import CHECKPOINTS, METRICS, read_run
from xlashard.train.loop.steps import Progress
from xlashard.train.model.layout import Layout, build_mesh
from xlashard.train.model.programs import make_recipe, state_shardings

CLOSE = 1e-4
# Of one process against a pod on the same mesh, by the guide: eight units in the last place of
# float32, where one was the most in 60 steps.
SUMMED_OTHERWISE = 8 * 2.0**-23
PAIR = PodSize(2, 2)
NANO = {
    "run": {"name": "nano"},
    "devices": {"emulate": 4},
    "mesh": {"data": 2, "tensor": 2},
    "sharding": {"rules": {"batch": "data", "vocab": "tensor", "heads": "tensor", "mlp": "tensor"}},
    "model": {"layers": 1, "width": 16, "heads": 2, "kv_heads": 2, "mlp": 32, "length": 16},
    "training": {"steps": 20, "batch": 8, "eval_every": 6, "eval_batches": 1, "log_every": 1},
    "checkpoint": {"every": 5, "keep": 9},
    "generation": {"bytes": 0},
}


# Seconds; threads that beat get little time on a busy machine.
HEARTBEAT = 10
# The pod of `make train-pod`: 4 processes with 2 devices each.
WIDE = PodSize(4, 2)
MIXED = {
    "devices": {"emulate": 8},
    "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
    "sharding": {
        "rules": {
            "batch": ["data", "fsdp"],
            "embed": "fsdp",
            **dict.fromkeys(("vocab", "heads", "kv_heads", "mlp"), "tensor"),
        }
    },
}


def nano(*words: str, **tables: Any) -> Settings:
    return read(Settings, NANO | tables, words)


def written(folder: Path, settings: Settings) -> Path:
    """Write the settings to a file."""
    path = folder / "nano.toml"
    path.write_text(to_toml(settings))
    return path


def alone(settings: Settings, runs: Path, resumed: Any = None) -> Progress:
    """A run of this process by itself."""
    count = settings.devices.emulate
    return run_job(settings, devices(count), Recorder(), runs, resumed)


def losses(folder: Path) -> dict[tuple[str, int], float]:
    """Return all losses that a run has measured; each once."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    measured = [x for x in lines if x["kind"] in ("train", "eval")]
    by_step = {(x["kind"], x["step"]): x["loss"] for x in measured}
    assert len(by_step) == len(measured)
    return by_step


def steps_saved(folder: Path) -> list[int]:
    return Checkpoints(folder / CHECKPOINTS).steps()


def saved(folder: Path, settings: Settings, step: int) -> list[np.ndarray]:
    """Return the arrays of a checkpoint."""
    mesh = build_mesh(settings.mesh, devices(settings.devices.emulate))
    recipe, layout = make_recipe(settings), Layout(mesh, settings.sharding.rules)
    like = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(recipe.initial_state, 0),
        state_shardings(recipe, layout),
    )
    with Checkpoints(folder / CHECKPOINTS) as checkpoints:
        return [np.asarray(x) for x in jax.tree.leaves(checkpoints.restore(like, step).state)]


def continued_alone(launch: Launch, printed: str) -> bool:
    """Continue process 0 once it is the last one."""
    if launch.running != {0}:
        return False
    launch.signal(signal.SIGCONT, [0])
    return True


def assert_same_bits(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    assert [x.tobytes() for x in one] == [x.tobytes() for x in other]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run one process from beginning to end."""
    return alone(nano(**MIXED), tmp_path_factory.mktemp("undisturbed")).folder


@pytest.mark.integration
def test_pod_losses_equal_one_process_and_resume_in_a_different_size(
    tmp_path: Path, undisturbed: Path
) -> None:
    path = written(tmp_path, nano(**MIXED))
    # One of the processes gets the signal, and all stop at one step.
    pod = train(
        *(tmp_path, WIDE, "--config", str(path)),
        own=OwnSignal(signal.SIGTERM, process=3, step=8),
    )
    assert set(pod.codes.values()) == {143}, pod.report()
    assert "each with 2 devices, reading 2 of the 8 sequences of a batch" in pod.texts[0]
    assert "SIGTERM: stopping ..." in pod.texts[0]
    folder = tmp_path / "runs" / "nano"
    step = steps_saved(folder)[-1]
    assert steps_saved(folder) == sorted({*range(5, step, 5), step})
    stopped = f"Stopped by SIGTERM after step {step}"
    assert stopped in pod.texts[0]
    for number in (1, 2, 3):
        assert stopped in (folder / f"log-{number}.txt").read_text()
    assert "xlashard train --resume runs/nano" in pod.texts[0]
    expected = losses(undisturbed)
    for key, loss in losses(folder).items():
        assert loss == pytest.approx(expected[key], rel=SUMMED_OTHERWISE), key
    assert 8 <= max(at for _, at in losses(folder)) == step < 20

    # Half the processes: sums between processes have one order, however many there are.
    other = tmp_path / "other"
    other.mkdir()
    half = train(
        *(other, PodSize(2, 4), "--config", str(path)),
        own=OwnSignal(signal.SIGTERM, process=1, step=8),
    )
    assert set(half.codes.values()) == {143}, half.report()
    measured, again = losses(folder), losses(other / "runs" / "nano")
    both = measured.keys() & again.keys()
    assert len(both) > 8 and all(measured[key] == again[key] for key in both)

    # One process instead of four; and half the devices, so on another mesh.
    for number, words in enumerate([[], ["devices.emulate=4", "mesh.data=1"]]):
        copy = shutil.copytree(folder, tmp_path / str(number))
        middle = read_run(copy, words)
        run_on = alone(middle.settings, tmp_path, middle)
        assert (run_on.folder, run_on.signal, run_on.steps) == (copy, "", 20)
        assert losses(copy).keys() == expected.keys()
        for key, loss in losses(copy).items():
            assert loss == pytest.approx(expected[key], rel=CLOSE), key


@pytest.mark.integration
def test_stop_during_compilation_saves_the_initial_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
    path = written(tmp_path, nano())
    pod = train(
        *(tmp_path, PAIR, "--config", str(path)),
        own=OwnSignal(signal.SIGTERM, process=1, step=0),
    )
    assert set(pod.codes.values()) == {143}, pod.report()
    assert "Stopped by SIGTERM after step 0." in pod.texts[0]
    assert steps_saved(tmp_path / "runs" / "nano") == [0]


@pytest.mark.integration
def test_stop_during_an_evaluation_ends_the_evaluation(tmp_path: Path) -> None:
    # An evaluation that would take hours.
    settings = nano("training.eval_batches=1000000", "training.eval_every=3", "checkpoint.every=0")
    path = written(tmp_path, settings)
    pod = train(
        *(tmp_path, PAIR, "--config", str(path)),
        watch=signalled("step  3/20", signal.SIGTERM, 1),
    )
    assert set(pod.codes.values()) == {143}, pod.report()
    folder = tmp_path / "runs" / "nano"
    assert steps_saved(folder) == [3]
    assert [kind for kind, _ in losses(folder)] == ["train"] * 3


@pytest.mark.integration
def test_failed_process_ends_its_peers_with_its_error(tmp_path: Path) -> None:
    path = written(tmp_path, nano("data.paths=['text.txt']"))
    for number, word in enumerate(["one ", "two "]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "text.txt").write_text(word * 200)
    words = (tmp_path, PAIR, "--config", str(path))
    pod = train(*words, apart=True)
    assert set(pod.codes.values()) == {2}, pod.report()
    for text in pod.texts.values():
        assert "error: process 1 reads another text (760+40 bytes, " in text
    (tmp_path / "1" / "text.txt").unlink()
    pod = train(*words, apart=True)
    assert pod.codes == {0: 1, 1: 2}, pod.report()
    assert "error: process 1 failed: text.txt does not exist" in pod.texts[0]
    pod = train(*words, "--set", "run.seed={process}", apart=True)
    for text in pod.texts.values():
        assert "process 1 has other settings than process 0: run.seed = 0 is 1 there" in text


@pytest.mark.integration
def test_folder_that_cannot_be_made_ends_every_process(tmp_path: Path) -> None:
    path = written(tmp_path, nano())
    pod = train(tmp_path, PAIR, "--config", str(path), "--runs", str(path))
    assert pod.codes == {0: 2, 1: 2}, pod.report()
    for text in pod.texts.values():
        assert "nano.toml/nano for the results cannot be created" in text


@pytest.mark.integration
def test_200_steps_with_kills_equal_200_uninterrupted_steps(tmp_path: Path) -> None:
    settings = nano("training.steps=200", "training.eval_every=60", "checkpoint.every=20")
    settings = read(
        Settings,
        NANO | {"devices": {"emulate": 2}, "mesh": {"data": 2, "tensor": 1}},
        ["training.steps=200", "training.eval_every=60", "checkpoint.every=20"],
    )
    calm = alone(settings, tmp_path / "calm").folder
    path, folder = written(tmp_path, settings), tmp_path / "runs" / "nano"
    chance, words = random.Random(5), ["--config", str(path)]
    for begin, end in ((21, 60), (61, 190)):
        victim, step = chance.randrange(2), chance.randrange(begin, end)
        kill = OwnSignal(signal.SIGKILL, victim, step)
        pod = train(tmp_path, PodSize(2, 1), *words, own=kill)
        assert pod.codes == {victim: -9, 1 - victim: GONE_EXIT_CODE}, pod.report()
        # Not after the heartbeat time of 100 s, but at once.
        assert pod.ended[1 - victim] - pod.ended[victim] < 50
        assert re.search(f"process {victim} of 2.* is gone", pod.texts[1 - victim])
        words = ["--resume", "runs/nano"]
    # A first process that is stopped for longer than the heartbeat; it goes on when the other one
    # has ended.
    pod = train(
        *(tmp_path, PodSize(2, 1), *words, "--set", f"pod.heartbeat={HEARTBEAT}"),
        own=OwnSignal(signal.SIGSTOP, process=0, step=195),
        watch=continued_alone,
    )
    assert pod.codes == {0: GONE_EXIT_CODE, 1: GONE_EXIT_CODE}, pod.report()
    pod = train(tmp_path, PodSize(2, 1), *words)
    assert set(pod.codes.values()) == {0}, pod.report()
    assert_same_bits(saved(folder, settings, 200), saved(calm, settings, 200))
    assert losses(folder) == losses(calm)


@pytest.mark.integration
def test_pod_trains_in_the_layout_chosen_by_one_process(tmp_path: Path) -> None:
    few = "training.steps=3"
    path = written(tmp_path, nano(few, "sharding=auto"))
    pod = train(tmp_path, PAIR, "--config", str(path), layout="data: fsdp, tensor: tensor")
    assert set(pod.codes.values()) == {0}, pod.report()
    assert "each with 2 devices, reading 4 of the 8 sequences of a batch" in pod.texts[0]
    measured = losses(tmp_path / "runs" / "nano")
    assert measured == pytest.approx(losses(alone(nano(few), tmp_path).folder), rel=CLOSE)
