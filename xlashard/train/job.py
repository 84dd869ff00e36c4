"""The main job: a transformer learns a text over a mesh of devices, and a person can watch it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.panel import Panel
from rich.text import Text

from xlashard.pictures import TreePicture, read_tree
from xlashard.train.checks import check_settings
from xlashard.train.console import Pace, Screen
from xlashard.train.data import Corpus, held_out_windows, put_batch, read_corpus, training_windows
from xlashard.train.errors import Diverged
from xlashard.train.folder import RunFolder
from xlashard.train.generate import readable
from xlashard.train.interrupt import Stop, stop_on_interrupt
from xlashard.train.layout import Layout, build_mesh
from xlashard.train.programs import Programs, build_programs, parameter_count, write_text
from xlashard.train.settings import Settings
from xlashard.train.step import Recipe, make_recipe, state_shardings
from xlashard.wording import in_bytes

_DRAWN = 4
"""Parameters whose place on the mesh is drawn before training, the biggest ones."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        folder: Where its results are.
        steps: Steps that were done and measured.
        loss: Training loss of the last of them, nats per byte; ``None`` where there is none.
        held_out: Loss on the held-out text at the end; ``None`` where the run was stopped.
        text: The text generated at the end.
        interrupted: Somebody stopped the run.
    """

    folder: Path
    steps: int
    loss: float | None
    held_out: float | None
    text: str
    interrupted: bool


def run_job(
    settings: Settings, devices: Sequence[Any], screen: Screen, runs: Path = Path("runs")
) -> Outcome:
    """Trains as the settings say.

    Args:
        settings: The whole run.
        devices: The devices of the mesh.
        screen: Where a person watches.
        runs: The folder in which the run's own folder is made.

    Returns:
        What it came to; also after a Ctrl-C.

    Raises:
        RunError: The settings or the data do not fit, or the loss is no longer finite.
    """
    check_settings(settings)
    layout = Layout(build_mesh(settings.mesh, devices), settings.sharding.rules)
    corpus = read_corpus(settings.data, settings.model.length)
    recipe = make_recipe(settings)
    measured = _Measured()
    with RunFolder(runs, settings) as folder, stop_on_interrupt() as stop:
        run = _Run(settings, layout, corpus, recipe, screen, folder, stop)
        try:
            _introduce(run)
            _train(run, measured)
        except KeyboardInterrupt:
            stop.asked = True
        finally:
            screen.end()
            folder.record("end", interrupted=stop.asked, steps=measured.steps)
    outcome = Outcome(
        folder.path, measured.steps, measured.loss, measured.held_out, measured.text, stop.asked
    )
    _conclude(outcome, screen)
    return outcome


@dataclass(frozen=True)
class _Run:
    """What is fixed while a run is under way."""

    settings: Settings
    layout: Layout
    corpus: Corpus
    recipe: Recipe
    screen: Screen
    folder: RunFolder
    stop: Stop


@dataclass
class _Measured:
    """What is known so far."""

    steps: int = 0
    loss: float | None = None
    held_out: float | None = None
    text: str = ""


def _introduce(run: _Run) -> None:
    """Shows the mesh, the text, and how the parameters lie on the devices."""
    mesh, show = run.layout.mesh, run.screen.show
    axes = " × ".join(f"{name}={size}" for name, size in mesh.shape.items())
    device = mesh.devices.flat[0]
    made = "emulated " if run.settings.devices.emulate else ""
    show(f"Mesh        {axes}: {mesh.devices.size} {made}devices ({device.device_kind})")
    text = run.corpus
    show(
        f"Text        {len(text.train):,} bytes to learn from, {len(text.held_out):,} held out: "
        f"{text.source}"
    )
    shapes = jax.eval_shape(run.recipe.initial_state, 0)
    shardings = state_shardings(run.recipe, run.layout)
    parameters = read_tree(shapes["parameters"], shardings["parameters"])
    count = parameter_count(run.recipe)
    show(f"Parameters  {count:,}: {_held(parameters)}")
    show(f"With AdamW  {_held(read_tree(shapes, shardings))}")
    show(parameters.biggest(_DRAWN, "The biggest parameters"))


def _held(tree: TreePicture) -> str:
    return f"{in_bytes(tree.nbytes)}, {in_bytes(tree.device_bytes)} on each device"


def _train(run: _Run, measured: _Measured) -> None:
    """Compiles, trains, evaluates and writes; returns early where a stop is asked."""
    settings, screen = run.settings, run.screen
    screen.show("Compiling the training step ...")
    programs = build_programs(run.recipe, run.layout, settings)
    screen.show(f"Compiled in {programs.seconds:.1f} s")
    run.folder.record("compile", seconds=round(programs.seconds, 3))
    step = programs.train_step.bind(programs.initial_state(np.uint32(settings.run.seed)))
    _steps(run, programs, step, measured)
    if run.stop.asked:
        return
    parameters = step.state["parameters"]
    measured.held_out = _evaluate(run, programs, parameters, measured.steps)
    if settings.generation.bytes and not run.stop.asked:
        written = write_text(parameters, run.layout, settings)
        measured.text = readable(written)
        run.folder.record("text", prompt=settings.generation.prompt, text=measured.text)
        screen.show(_quoted(settings.generation.prompt, measured.text))


def _steps(run: _Run, programs: Programs, step: Any, measured: _Measured) -> None:
    """All steps. Each is measured while the next one runs, so that the devices never wait."""
    settings, training = run.settings, run.settings.training
    pace = Pace(training.batch * settings.model.length, training.steps)
    waiting = None
    run.screen.begin(training.steps)
    for number in range(training.steps):
        if run.stop.asked:
            break
        values = step(_training_batch(run, programs, number))
        if waiting is not None:
            _measure(run, waiting, pace, measured)
        waiting = values
        done = number + 1
        if training.eval_every and done % training.eval_every == 0 and done < training.steps:
            _measure(run, waiting, pace, measured)
            waiting = None
            _evaluate(run, programs, step.state["parameters"], done)
    if waiting is not None:
        _measure(run, waiting, pace, measured)
    run.screen.end()


def _training_batch(run: _Run, programs: Programs, step: int) -> Any:
    training, length = run.settings.training, run.settings.model.length
    windows = training_windows(
        run.corpus.train, step, training.batch, length, run.settings.run.seed
    )
    return put_batch(windows, training.accumulate, programs.batch)


def _measure(run: _Run, values: dict[str, Any], pace: Pace, measured: _Measured) -> None:
    """Waits for a step's measurements, records and shows them."""
    numbers = {name: float(value) for name, value in values.items()}
    done, loss = measured.steps + 1, numbers["loss"]
    if not math.isfinite(loss):
        raise Diverged(
            f"the loss of step {done} is {loss}. Lower optimizer.learning_rate (it is "
            f"{run.settings.optimizer.learning_rate:g}), or raise optimizer.warmup. "
            f"What was measured is in {run.folder.path}."
        )
    measured.steps, measured.loss = done, loss
    pace.mark(done)
    run.folder.record("train", step=done, **numbers, tokens_per_second=pace.rate)
    run.screen.step(done, loss, pace)


def _evaluate(run: _Run, programs: Programs, parameters: Any, step: int) -> float:
    """Mean loss over evenly chosen windows of the held-out text."""
    training, length = run.settings.training, run.settings.model.length
    losses = []
    for number in range(training.eval_batches):
        windows = held_out_windows(run.corpus.held_out, number, training.batch, length)
        batch = put_batch(windows, training.accumulate, programs.batch)
        losses.append(programs.evaluate(parameters, batch))
    loss = float(np.mean([float(x) for x in losses]))
    run.folder.record("eval", step=step, loss=loss)
    run.screen.show(f"evaluation after step {step}: loss {loss:.4f}")
    return loss


def _quoted(prompt: str, text: str) -> Any:
    shown = Text(prompt, style="bold")
    shown.append(text, style="not bold")
    return Panel(shown, title="Written by the model", title_align="left")


def _conclude(outcome: Outcome, screen: Screen) -> None:
    if outcome.interrupted:
        screen.show(f"Stopped after step {outcome.steps}; what was measured is kept.")
    if outcome.loss is not None:
        screen.show(f"Final training loss {outcome.loss:.4f} nats per byte")
    if outcome.held_out is not None:
        screen.show(f"Final evaluation loss {outcome.held_out:.4f} nats per byte")
    screen.show(f"Results in {outcome.folder}")
