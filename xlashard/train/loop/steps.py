"""The steps of a run, its evaluations and its checkpoints, up to its end or a stop."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.panel import Panel
from rich.text import Text

from xlashard.multihost import Watchdog
from xlashard.train.checkpoint import About, Checkpoints
from xlashard.train.config.settings import Settings
from xlashard.train.config.toml import to_toml
from xlashard.train.data import BatchPlan, Corpus, held_out_starts, plan_batch, training_starts
from xlashard.train.errors import Diverged
from xlashard.train.loop.console import Pace, Screen
from xlashard.train.loop.run_folder import Records
from xlashard.train.loop.stop import Stop
from xlashard.train.model.layout import Layout
from xlashard.train.model.programs import Programs, build_programs, readable, write_text
from xlashard.train.model.step import Recipe, State


@dataclass(frozen=True)
class Run:
    """What is fixed while a run is under way."""

    settings: Settings
    layout: Layout
    corpus: Corpus
    recipe: Recipe
    screen: Screen
    folder: Path
    records: Records
    stop: Stop
    watchdog: Watchdog | None
    checkpoints: Checkpoints | None

    def gets_on(self) -> None:
        """Tells the watchdog that a step, or a batch of an evaluation, is done."""
        if self.watchdog:
            self.watchdog.step()

    def busy(self, reason: str) -> AbstractContextManager[object]:
        """A stretch in which the watchdog expects no steps."""
        return self.watchdog.paused(reason) if self.watchdog else nullcontext()


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        steps: Steps that were done and measured.
        loss: Training loss of the last of them.
        held_out: Loss on the held-out text at the end.
        text: The text written at the end.
        saved: The step of the last checkpoint; None where there is none.
        stopped: The run ends before its end.
    """

    steps: int = 0
    loss: float | None = None
    held_out: float | None = None
    text: str = ""
    saved: int | None = None
    stopped: bool = False
    pace: Pace = field(default_factory=lambda: Pace(1, 1))


def train(run: Run, state: State, progress: Progress) -> None:
    """Trains from a state on to the end, or to where the run is stopped.

    Args:
        run: What is fixed.
        state: After `progress.steps` steps. Its buffers are given up.
        progress: How far the run is; kept up to date.
    """
    run.screen.show("Compiling the training step ...")
    programs = _in_thread(run, lambda: build_programs(run.recipe, run.layout, run.settings))
    if run.stop.reached() or programs is None:
        _stop(run, state, progress)
        return
    run.screen.show(f"Compiled in {programs.seconds:.1f} s")
    run.records.record("compile", seconds=round(programs.seconds, 3))
    loop = _Loop(run, programs, progress, programs.train_step.bind(state))
    loop.steps()
    if progress.stopped:
        _stop(run, loop.state, progress)
        return
    loop.save()
    progress.held_out = loop.evaluate()
    if progress.stopped or run.stop.reached():
        _stop(run, loop.state, progress)
        return
    if run.settings.generation.bytes:
        with run.busy("writing text"):
            _write(run, loop.state["parameters"], progress)
    _finish_saving(run)


class _Loop:
    """The steps and what comes between them."""

    def __init__(self, run: Run, programs: Programs, progress: Progress, step: Any) -> None:
        self._run, self._programs, self._progress, self._step = run, programs, progress, step
        training, length = run.settings.training, run.settings.model.length
        self._plan: BatchPlan = plan_batch(
            programs.batch, training.batch, training.accumulate, length
        )
        self._evaluation: Any = None
        progress.pace = Pace(training.batch * length, training.steps)

    @property
    def state(self) -> State:
        """After the last step that was begun."""
        return self._step.state

    def steps(self) -> None:
        """All steps. Each is measured while the next one runs, so that the devices never wait."""
        run, progress, training = self._run, self._progress, self._run.settings.training
        waiting = None
        run.screen.begin(training.steps, progress.steps)
        if progress.steps:
            self._evaluate_if_due(progress.steps)
        for number in range(progress.steps, training.steps):
            if progress.stopped or run.stop.reached():
                progress.stopped = True
                break
            values = self._step(self._batch(number))
            if waiting is not None:
                self._measure(waiting)
            waiting = values
            done = number + 1
            if self._is_due(run.settings.checkpoint.every, done):
                self._measure(waiting)
                waiting = None
                self.save()
            if self._is_due(training.eval_every, done):
                if waiting is not None:
                    self._measure(waiting)
                waiting = None
                self._evaluate_if_due(done)
        if waiting is not None:
            self._measure(waiting)
        run.screen.end()

    def save(self) -> None:
        """Begins to save the state; what was measured of its steps is written already."""
        _save(self._run, self.state, self._progress)

    def evaluate(self) -> float | None:
        """Mean loss over evenly chosen windows of the held-out text; None where it was stopped."""
        run, training = self._run, self._run.settings.training
        parameters = self.state["parameters"]
        text, length = run.corpus.held_out, run.settings.model.length
        losses = []
        for number in range(training.eval_batches):
            starts = held_out_starts(len(text), number, training.batch, length)
            batch = self._plan.put(text, starts)
            if self._evaluation is None:
                self._evaluation = _in_thread(
                    run,
                    lambda batch=batch: self._programs.evaluate.lower(parameters, batch).compile(),
                )
            if run.stop.reached() or self._evaluation is None:
                self._progress.stopped = True
                return None
            losses.append(self._evaluation(parameters, batch))
            run.gets_on()
        loss = float(np.mean([float(x) for x in losses]))
        step = self._progress.steps
        run.records.record("eval", step=step, loss=loss)
        run.screen.show(f"evaluation after step {step}: loss {loss:.4f}")
        return loss

    def _evaluate_if_due(self, done: int) -> None:
        if self._is_due(self._run.settings.training.eval_every, done):
            self.evaluate()

    def _is_due(self, every: int, done: int) -> bool:
        """Whether something between steps is to be done; the end has its own."""
        return is_due(every, done) and done < self._run.settings.training.steps

    def _batch(self, step: int) -> Any:
        run, text = self._run, self._run.corpus.train
        count, length = run.settings.training.batch, run.settings.model.length
        return self._plan.put(
            text, training_starts(len(text), step, count, length, run.settings.run.seed)
        )

    def _measure(self, values: dict[str, Any]) -> None:
        """Waits for a step's measurements, records and shows them."""
        run, progress = self._run, self._progress
        numbers = {name: float(value) for name, value in values.items()}
        done, loss = progress.steps + 1, numbers["loss"]
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss of step {done} is {loss}. Lower optimizer.learning_rate (it is "
                f"{run.settings.optimizer.learning_rate:g}), or raise optimizer.warmup. "
                f"What was measured is in {run.folder}."
            )
        progress.steps, progress.loss = done, loss
        progress.pace.mark(done)
        run.gets_on()
        run.records.record("train", step=done, **numbers, tokens_per_second=progress.pace.rate)
        run.screen.step(done, loss, progress.pace)


def is_due(every: int, done: int) -> bool:
    """Whether what comes every so many steps comes now; 0 is never."""
    return every > 0 and done % every == 0


def _save(run: Run, state: State, progress: Progress) -> None:
    if run.checkpoints is None or progress.saved == progress.steps:
        return
    seed, mark = run.settings.run.seed, run.corpus.mark
    about = About(
        step=progress.steps,
        data={"step": progress.steps, "seed": seed, "text": mark},
        settings=to_toml(run.settings),
        mesh=dict(run.layout.mesh.shape),
    )
    with run.busy(f"saving step {about.step}"):
        run.checkpoints.save(state, about)
    progress.saved = progress.steps


def _stop(run: Run, state: State, progress: Progress) -> None:
    """Leaves a checkpoint of the step at which the run was stopped."""
    progress.stopped = True
    _save(run, state, progress)
    _finish_saving(run)


def _finish_saving(run: Run) -> None:
    if run.checkpoints:
        with run.busy("saving"):
            run.checkpoints.wait()


def _write(run: Run, parameters: Any, progress: Progress) -> None:
    prompt = run.settings.generation.prompt
    progress.text = readable(write_text(parameters, run.layout, run.settings))
    run.records.record("text", prompt=prompt, text=progress.text)
    shown = Text(prompt, style="bold")
    shown.append(progress.text, style="not bold")
    run.screen.show(Panel(shown, title="Written by the model", title_align="left"))


_COMPILING = "compiling"
"""Name of the thread that compiles."""


def is_compiling() -> bool:
    """Return True while a thread of a run, which may have ended, compiles a program."""
    return any(thread.name == _COMPILING for thread in threading.enumerate())


def _in_thread[T](run: Run, work: Callable[[], T]) -> T | None:
    """Compile beside the main thread; return None if the run is stopped before it is done."""
    result: Future[T] = Future()

    def do() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    # XLA cannot be interrupted: a process that ends before it is done must leave (`is_compiling`).
    threading.Thread(target=do, name=_COMPILING, daemon=True).start()
    with run.busy("compiling"):
        return run.stop.unless_stopped(result)
