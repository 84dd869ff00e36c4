import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.train.examples import devices, settings, shallow
from xlashard.train.config.settings import Settings
from xlashard.train.errors import Diverged, RunError
from xlashard.train.loop import stop
from xlashard.train.loop.console import Pace
from xlashard.train.loop.job import run_job
from xlashard.train.loop.steps import Progress


class Recorder:
    """Screen that records, and acts at a step."""

    def __init__(self, at: int = 0, action: Any = None) -> None:
        self.shown: list[Any] = []
        self.steps: list[tuple[int, float]] = []
        self.ended = 0
        self._at, self._action = at, action

    def show(self, thing: Any) -> None:
        self.shown.append(thing)

    def begin(self, steps: int, done: int = 0) -> None:
        self.total, self.done = steps, done

    def step(self, done: int, loss: float, pace: Pace) -> None:
        self.steps.append((done, loss))
        if done == self._at:
            self._action()

    def end(self) -> None:
        self.ended += 1

    @property
    def text(self) -> str:
        return "\n".join(x for x in self.shown if isinstance(x, str))


def run(screen: Recorder, folder: Path, asked: Settings) -> Progress:
    return run_job(asked, devices(8), screen, folder)


def records(outcome: Progress) -> list[dict[str, Any]]:
    text = (outcome.folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_run_reports_and_stores_all_results(tmp_path: Path) -> None:
    screen = Recorder()
    outcome = run(screen, tmp_path, shallow())
    assert (outcome.steps, outcome.signal, outcome.checkpoint) == (4, "", 4)
    assert [done for done, _ in screen.steps] == [1, 2, 3, 4]
    assert screen.total == 4
    assert screen.ended >= 1
    assert outcome.loss == screen.steps[-1][1]
    assert len(outcome.text) <= 8
    kinds = [record["kind"] for record in records(outcome)]
    assert kinds == [
        *["compile", "train", "train", "eval", "train", "train", "eval", "text", "end"]
    ]
    third = records(outcome)[4]
    assert third["step"] == 3
    assert third["loss"] == screen.steps[2][1]
    assert third["tokens_per_second"] > 0
    assert {"learning_rate", "gradient_norm"} <= set(third)
    assert {path.name for path in outcome.folder.iterdir()} == {
        "checkpoints",
        "config.toml",
        "loss.png",
        "metrics.jsonl",
    }
    for part in (
        "data=2 × fsdp=2 × tensor=2: 8 emulated devices",
        "Parameters  ",
        "on each device",
        "Compiled in",
        f"Final training loss {outcome.loss:.4f}",
        f"Final evaluation loss {outcome.held_out:.4f}",
        str(outcome.folder),
    ):
        assert part in screen.text


@pytest.mark.slow
def test_a_run_can_be_repeated_exactly(tmp_path: Path) -> None:
    words = "generation.bytes=20"
    first, second = (run(Recorder(), tmp_path, shallow(words)) for _ in range(2))
    assert first.folder != second.folder
    assert (first.loss, first.held_out, first.text) == (second.loss, second.held_out, second.text)
    other = run(Recorder(), tmp_path, shallow(words, "run.seed=1"))
    assert other.loss != first.loss
    assert other.text != first.text


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_interrupt_keeps_the_recorded_metrics(tmp_path: Path) -> None:
    screen = Recorder(at=2, action=interrupt)
    outcome = run(screen, tmp_path, shallow("training.steps=50", "training.eval_every=0"))
    assert outcome.signal == "SIGINT"
    # The running step is measured, too; a second thread receives the signal meanwhile.
    steps = outcome.steps
    assert 3 <= steps < 50
    assert outcome.checkpoint == steps
    assert outcome.held_out is None
    assert [r["step"] for r in records(outcome) if r["kind"] == "train"] == [*range(1, steps + 1)]
    assert records(outcome)[-1] == {"kind": "end", "interrupted": True, "steps": steps}
    assert (outcome.folder / "loss.png").exists()
    assert f"Stopped by SIGINT after step {steps}" in screen.text
    assert f"xlashard train --resume {outcome.folder}" in screen.text


@pytest.mark.slow
def test_two_interrupts_stop_immediately_and_keep_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "_SAME_SIGNAL", 0.0)

    def twice() -> None:
        interrupt()
        interrupt()

    screen = Recorder(at=2, action=twice)
    outcome = run(screen, tmp_path, shallow("training.steps=50", "training.eval_every=0"))
    assert (outcome.signal, outcome.steps, outcome.checkpoint) == ("SIGINT", 2, None)
    assert screen.ended >= 1
    assert (outcome.folder / "loss.png").exists()


@pytest.mark.slow
def test_a_diverging_run_raises(tmp_path: Path) -> None:
    words = ("optimizer.learning_rate=1e38", "optimizer.clip=1e30", "training.steps=30")
    screen = Recorder()
    with pytest.raises(Diverged, match=r"Lower optimizer\.learning_rate \(it is 1e\+38\)"):
        run(screen, tmp_path, shallow(*words))
    assert all(math.isfinite(loss) for _, loss in screen.steps)
    assert (tmp_path / "small" / "loss.png").exists()


@pytest.mark.devices(8)
def test_invalid_settings_are_reported_before_the_folder_is_created(tmp_path: Path) -> None:
    wrong = [
        ("model.kv_heads=1", r"model\.kv_heads = 1 .*tensor=2[\s\S]*kv_heads = 2"),
        ("data.paths=nowhere.txt", "nowhere.txt.*--data PATH"),
        ("model.length=100000", r"511,868 bytes.*model\.length .*100001"),
        ("run.name=a/b", r"run\.name .*'a/b'"),
    ]
    for word, expected in wrong:
        with pytest.raises(RunError, match=expected):
            run(Recorder(), tmp_path, settings(word))
    with pytest.raises(RunError, match=r"\[mesh\] data=2 × fsdp=2 × tensor=2 .*8 devices.* 4"):
        run_job(settings(), devices(4), Recorder(), tmp_path)
    assert list(tmp_path.iterdir()) == []
