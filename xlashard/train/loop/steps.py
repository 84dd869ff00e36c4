"""Training steps, evaluations and checkpoints of a run, up to its end or a stop."""

import math
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.panel import Panel
from rich.text import Text

from xlashard import GlobalBatches
from xlashard.multihost import Watchdog
from xlashard.support.background import run_in_thread
from xlashard.train.checkpoint import Checkpoints, RunMetadata
from xlashard.train.config.schema import to_toml
from xlashard.train.config.settings import Settings
from xlashard.train.data import (
    BatchPlan,
    Corpus,
    TrainingWindows,
    held_out_starts,
    plan_batch,
)
from xlashard.train.errors import Diverged
from xlashard.train.loop.console import Pace, Screen
from xlashard.train.loop.run_folder import METRICS
from xlashard.train.loop.stop import Stop
from xlashard.train.model.layout import Layout
from xlashard.train.model.programs import (
    Programs,
    Recipe,
    State,
    batch_sharding,
    build_programs,
    state_shardings,
)
from xlashard.train.model.transformer import readable, write_text


@dataclass(frozen=True)
class Run:
    """Constants of a run.

    Attributes:
        programs: Programs of an automatic layout, which are compiled before the first state exists.
        check_folder: Raises an error if the folder was renamed or taken over by another launch.
        flush: Writes all records.
    """

    settings: Settings
    layout: Layout
    corpus: Corpus
    recipe: Recipe
    screen: Screen
    folder: Path
    record: Callable[..., None]
    stop: Stop
    watchdog: Watchdog | None
    checkpoints: Checkpoints | None
    programs: Programs | None = None
    check_folder: Callable[[], object] = lambda: None
    flush: Callable[[], object] = lambda: None

    @property
    def state_shardings(self) -> State:
        """Return the shardings of the state."""
        programs = self.programs
        return state_shardings(self.recipe, self.layout) if programs is None else programs.state

    @property
    def batch_sharding(self) -> Any:
        """Return the sharding of a batch [parts, sequences, length + 1]."""
        return batch_sharding(self.layout) if self.programs is None else self.programs.batch

    @property
    def plan(self) -> BatchPlan:
        """Return the plan of a batch in this process."""
        training, length = self.settings.training, self.settings.model.length
        return plan_batch(self.batch_sharding, training.batch, training.accumulate, length)

    def mark_progress(self) -> None:
        """Report progress to the watchdog."""
        if self.watchdog:
            self.watchdog.step()

    def paused(self, reason: str) -> AbstractContextManager[object]:
        """Pause the watchdog inside a block."""
        return self.watchdog.paused(reason) if self.watchdog else nullcontext()


@dataclass
class Progress:
    """Progress of a run, and in the end its outcome.

    Attributes:
        folder: Folder of the results.
        steps: Number of complete steps.
        loss: Training loss of the last step, nats per byte; None without a step.
        held_out: Final loss on the held-out text; None for a stopped run.
        text: Text generated at the end.
        checkpoint: Step of the last checkpoint; None without one.
        stopped: True for a run that stops early.
        signal: Name of the signal that stopped the run; empty for a complete run.
        pace: Speed of the latest steps.
    """

    folder: Path
    steps: int = 0
    loss: float | None = None
    held_out: float | None = None
    text: str = ""
    checkpoint: int | None = None
    stopped: bool = False
    signal: str = ""
    pace: Pace = field(default_factory=lambda: Pace(1, 1))


def train(run: Run, state: State, progress: Progress) -> None:
    """Train from a state to the end of the run or to a stop.

    Args:
        run: Constants of the run.
        state: State after `progress.steps` steps; donated.
        progress: Progress of the run; updated.
    """
    with read_batches(run, progress.steps) as batches:
        programs = run.programs or compile_step(run)
        if programs is None:
            _stop(run, state, progress, batches)
            return
        run.record("compile", seconds=round(programs.seconds, 3))
        loop = _Loop(run, programs, progress, programs.train_step.bind(state), batches)
        loop.steps()
        if progress.stopped:
            _stop(run, loop.state, progress, batches)
            return
        _save(run, loop.state, progress, batches)
        progress.held_out = loop.evaluate()
        if progress.stopped or run.stop.reached():
            _stop(run, loop.state, progress, batches)
            return
    if run.settings.generation.bytes:
        with run.paused("writing text"):
            _write(run, loop.state["parameters"], progress)
    _finish_saving(run)


_COMPARED = 4
"""Number of batches that processes compare at once. Every source has the same length, so that only
the beginning matters; each comparison takes some milliseconds, and each batch host memory."""


def read_batches(run: Run, step: int) -> GlobalBatches:
    """Return the training batches from a step on."""
    plan = run.plan
    windows = TrainingWindows(run.corpus, plan, run.settings.run.seed, step)
    batches = GlobalBatches(windows, plan.sharding, global_shape=plan.shape, check_every=_COMPARED)
    batches.set_state({"batches": step, "source": windows.get_state()})
    return batches


def compile_step(run: Run) -> Programs | None:
    """Choose the layout, if it is automatic, and compile the step; return None at a stop."""
    automatic = run.layout.automatic
    choosing = "Choosing a layout, and compiling" if automatic else "Compiling"
    run.screen.show(f"{choosing} the training step ...")
    programs = _in_thread(run, lambda: build_programs(run.recipe, run.layout, run.settings))
    if run.stop.reached() or programs is None:
        return None
    chosen = "Chosen and compiled" if automatic else "Compiled"
    run.screen.show(f"{chosen} in {programs.seconds:.1f} s")
    return programs


class _Loop:
    """Loop over steps, with evaluations and checkpoints between them."""

    def __init__(
        self, run: Run, programs: Programs, progress: Progress, step: Any, batches: GlobalBatches
    ) -> None:
        self._run, self._programs, self._progress, self._step = run, programs, progress, step
        self._plan, self._batches = run.plan, batches
        self._evaluation: Any = None
        training = run.settings.training
        progress.pace = Pace(training.batch * run.settings.model.length, training.steps)

    @property
    def state(self) -> State:
        """Return the state after the last dispatched step."""
        return self._step.state

    def steps(self) -> None:
        """Run all steps; metrics of a step are read while the next one runs."""
        run, progress, training = self._run, self._progress, self._run.settings.training
        waiting = None
        run.screen.begin(training.steps, progress.steps)
        if progress.steps:
            self._evaluate_if_due(progress.steps)
        for number in range(progress.steps, training.steps):
            if progress.stopped or run.stop.reached():
                progress.stopped = True
                break
            values = self._step(next(self._batches))
            self._measure(waiting)
            waiting, done = values, number + 1
            saves = self._is_due(run.settings.checkpoint.every, done)
            if saves or self._is_due(training.eval_every, done):
                self._measure(waiting)
                waiting = None
            if saves:
                _save(run, self.state, progress, self._batches)
            self._evaluate_if_due(done)
        self._measure(waiting)
        run.screen.end()

    def evaluate(self) -> float | None:
        """Return the mean loss over windows of the held-out text; None if stopped."""
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
            run.mark_progress()
        loss = float(np.mean([float(x) for x in losses]))
        step = self._progress.steps
        run.record("eval", step=step, loss=loss)
        run.screen.show(f"evaluation after step {step}: loss {loss:.4f}")
        return loss

    def _evaluate_if_due(self, done: int) -> None:
        if self._is_due(self._run.settings.training.eval_every, done):
            self.evaluate()

    def _is_due(self, every: int, done: int) -> bool:
        """Return True if an action is due between steps; the end of the run has its own."""
        return is_due(every, done) and done < self._run.settings.training.steps

    def _measure(self, values: dict[str, Any] | None) -> None:
        """Wait for the metrics of a step, if any, record and show them."""
        if values is None:
            return
        run, progress = self._run, self._progress
        numbers = {name: float(value) for name, value in values.items()}
        done, loss = progress.steps + 1, numbers["loss"]
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss of step {done} is {loss}. Lower optimizer.learning_rate (it is "
                f"{run.settings.optimizer.learning_rate:g}), or raise optimizer.warmup. "
                f"The metrics are in {run.folder}."
            )
        progress.steps, progress.loss = done, loss
        progress.pace.mark(done)
        run.mark_progress()
        run.record("train", step=done, **numbers, tokens_per_second=progress.pace.rate)
        run.screen.step(done, loss, progress.pace)


def is_due(every: int, done: int) -> bool:
    """Return True if an action of period `every` is due; a period of 0 is never due."""
    return every > 0 and done % every == 0


def _save(run: Run, state: State, progress: Progress, batches: GlobalBatches) -> None:
    if run.checkpoints is None or progress.checkpoint == progress.steps:
        return
    metadata = RunMetadata(
        step=progress.steps,
        data=batches.get_state()["source"],
        settings=to_toml(run.settings),
        mesh=dict(run.layout.mesh.shape),
    )
    run.check_folder()
    run.flush()
    with run.paused(f"saving step {metadata.step}"):
        run.checkpoints.save(state, metadata, [run.folder / METRICS])
    progress.checkpoint = progress.steps


def _stop(run: Run, state: State, progress: Progress, batches: GlobalBatches) -> None:
    """Save a checkpoint of the step at which the run stopped."""
    progress.stopped = True
    _save(run, state, progress, batches)
    _finish_saving(run)


def _finish_saving(run: Run) -> None:
    if run.checkpoints:
        with run.paused("saving"):
            run.checkpoints.wait()


def _write(run: Run, parameters: Any, progress: Progress) -> None:
    prompt = run.settings.generation.prompt
    progress.text = readable(write_text(parameters, run.layout, run.settings))
    run.record("text", prompt=prompt, text=progress.text)
    shown = Text(prompt, style="bold")
    shown.append(progress.text, style="not bold")
    run.screen.show(Panel(shown, title="Generated text", title_align="left"))


_COMPILING = "compiling"
"""Name of the thread that compiles."""


def is_compiling(threads: Iterable[threading.Thread]) -> bool:
    """Return True while one of some threads compiles a program of a run, which may have ended."""
    return any(thread.name == _COMPILING for thread in threads)


def _in_thread[T](run: Run, work: Callable[[], T]) -> T | None:
    """Compile beside the main thread; return None if the run is stopped before it is done."""
    # XLA cannot be interrupted: a process that ends before it is done must leave (`is_compiling`).
    result = run_in_thread(work, _COMPILING, daemon=True)
    with run.paused("compiling"):
        return run.stop.unless_stopped(result)
