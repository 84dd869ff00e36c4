"""Training job: set up a run, train, and report the outcome."""

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from xlashard.analysis.pictures.sharding_picture import TreePicture, read_tree
from xlashard.core.processes import RENDEZVOUS, Barrier, BarrierTimeoutError
from xlashard.errors import counted
from xlashard.multihost import Watchdog
from xlashard.support.formatting import in_bytes, sizes_text
from xlashard.train.checkpoint import Checkpoints
from xlashard.train.config.schema import to_toml
from xlashard.train.config.settings import Settings, change_text, setting_changes
from xlashard.train.data import read_corpus
from xlashard.train.errors import DataError, PeerError, SettingsError
from xlashard.train.formulas import parameters
from xlashard.train.loop.console import Screen, log_console
from xlashard.train.loop.memory import check_memory, reporting_scarcity
from xlashard.train.loop.run_folder import (
    CHECKPOINTS,
    KeptRecords,
    LogFile,
    Resumed,
    RunFolder,
    changes,
    is_finished,
    new_folder,
    read_kept,
)
from xlashard.train.loop.run_lock import RunLock, take_lock
from xlashard.train.loop.steps import Progress, Run, compile_step, is_due, train
from xlashard.train.loop.stop import Group, Stop, make_stop
from xlashard.train.model.checks import check_settings
from xlashard.train.model.layout import Layout, build_mesh, path_name
from xlashard.train.model.programs import State, initial_state, make_recipe, state_shapes
from xlashard.train.stores import is_object, locate

_DRAWN = 4
"""Number of the largest parameters whose sharding is drawn before training."""

_START_TIMEOUT = 300.0
"""Timeout in seconds for the start of all processes."""


def run_job(
    settings: Settings,
    devices: Sequence[Any],
    screen: Screen,
    runs: Path = Path("runs"),
    resumed: Resumed | None = None,
) -> Progress:
    """Run a training job; all processes of a run call it.

    Args:
        settings: Settings of the run.
        devices: Devices of the mesh, of all processes.
        screen: Output of the first process; the others write ``log-NUMBER.txt`` in the run's
            folder.
        runs: Folder in which the folder of a new run is created.
        resumed: Run to resume instead of a new one; `settings` are its settings.

    Returns:
        The outcome, also after a Ctrl-C.

    Raises:
        RunError: The settings, the data or the checkpoint do not fit, the memory does not suffice,
            the loss is not finite, a checkpoint cannot be written, or another process failed.
    """
    check_settings(settings)
    layout = Layout.of(settings, build_mesh(settings.mesh, devices))
    check_memory(settings, devices)
    task = f"--resume {resumed.folder}" if resumed else "a new run"
    group = form_group(settings, task)
    stop = make_stop(group, screen.show if group.index == 0 else _ignore)
    with stop.listening():
        if resumed and _is_finished(stop, resumed):
            screen.show(
                f"The run in {resumed.folder} is finished: {settings.training.steps} steps. For "
                f"more steps write:\n  xlashard train --resume {resumed.folder} --steps N"
            )
            return Progress(resumed.folder, settings.training.steps)
        with reporting_scarcity(settings):
            return _run(settings, layout, _Place(stop, screen, runs, resumed))


def form_group(settings: Settings, task: str) -> Group:
    """Wait for all processes of the run and compare their settings.

    Args:
        settings: Settings of this process.
        task: Task of this process: a new run, or the folder to resume.

    Returns:
        The group of all processes.

    Raises:
        SettingsError: The processes have different settings.
        PeerError: Some processes did not start in time.
    """
    count = jax.process_count()
    if count == 1:
        return Group()
    own = {"token": uuid.uuid4().hex, "task": task, "settings": to_toml(settings)}
    barrier = Barrier(tuple(range(count)), "train", _START_TIMEOUT)
    try:
        received = RENDEZVOUS.exchange(barrier, json.dumps(own))
    except BarrierTimeoutError as error:
        raise PeerError(
            error.missing(f"did not start training in {_START_TIMEOUT:g} s", count)
        ) from None
    first, *others = [json.loads(received[number]) for number in range(count)]
    for number, other in enumerate(others, 1):
        changed = setting_changes(first["settings"], other["settings"])
        texts = [change_text(key, *values) for key, values in changed.items()]
        if other["task"] != first["task"]:
            texts.insert(0, f"{first['task']} is {other['task']}")
        if texts:
            raise SettingsError(
                f"process {number} has other settings than process 0: {'; '.join(texts)} "
                f"there. Start all with the same command line and the same settings file."
            )
    return Group(first["token"], jax.process_index(), count)


def _check_same_corpus(stop: Stop, mark: str) -> None:
    """Check that all processes read a text with the same fingerprint.

    Raises:
        DataError: The fingerprints differ.
        PeerError: Another process failed.
    """
    marks = stop.exchange("the text", mark)
    other = next((number for number in marks if marks[number] != marks[0]), None)
    if other is not None:
        raise DataError(
            f"process {other} reads another text ({marks[other]}) than process 0 ({marks[0]}). "
            f"Put the same files on all hosts."
        )


@dataclass(frozen=True)
class _Place:
    """Processes, output and folders of a run."""

    stop: Stop
    screen: Screen
    runs: Path
    resumed: Resumed | None


def _run(settings: Settings, layout: Layout, place: _Place) -> Progress:
    """Run the job in a group of processes."""
    stop, resumed = place.stop, place.resumed
    corpus = read_corpus(settings.data, settings.model.length, settings.model.vocab)
    _check_same_corpus(stop, corpus.mark)
    recipe = make_recipe(settings)
    timeout = settings.pod.watchdog
    with (
        _claim_folder(place, settings.run.name) as (path, check_folder),
        Checkpoints(path / CHECKPOINTS, keep=settings.checkpoint.keep or None) as checkpoints,
        _screen(place, path, settings) as screen,
        # The watchdog writes while the process is stuck, perhaps in the store's client.
        Watchdog(timeout, folder=None if is_object(path) else path)
        if timeout
        else nullcontext() as watchdog,
    ):
        kept = checkpoints if settings.checkpoint.keep else None
        run = Run(settings, layout, corpus, recipe, screen, path, _ignore, stop, watchdog, kept)
        run = replace(run, check_folder=check_folder)
        last, finished = checkpoints.latest() if resumed else None, False
        progress = Progress(path, last or 0, checkpoint=last)
        if layout.automatic:
            run = replace(run, programs=compile_step(run))
        if run.programs or not layout.automatic:
            _introduce(run)
            with run.paused("starting"):
                state, progress = _first_state(run, checkpoints, resumed)
            with _records(place, path, settings, progress.steps) as (record, flush):
                finished = _train(replace(run, record=record, flush=flush), state, progress)
        if not finished:
            progress.stopped = True
            progress.signal = stop.call.reason if stop.call else "SIGINT"
        _conclude(progress, screen)
        return progress


def _train(run: Run, state: State, progress: Progress) -> bool:
    """Train; return True if the run finished all its steps."""
    finished = False
    try:
        train(run, state, progress)
        finished = not progress.stopped
    except KeyboardInterrupt:
        # Peers wait for this process; the caller sends them the failure.
        if run.stop.group.count > 1:
            raise
    finally:
        run.screen.end()
        run.record("end", interrupted=not finished, steps=progress.steps)
    return finished


def _is_finished(stop: Stop, resumed: Resumed) -> bool:
    finished = partial(is_finished, resumed.folder, resumed.settings)
    return stop.broadcast("the state of the run", finished) == "True"


def _check_checkpoint(checkpoints: Checkpoints, settings: Settings, resumed: Resumed) -> None:
    """Check that the run has a checkpoint to resume from.

    Raises:
        SettingsError: No checkpoint, or one after the last step of the settings.
    """
    step, steps = checkpoints.latest(), settings.training.steps
    if step is None:
        raise SettingsError(
            f"{checkpoints.folder} has no checkpoint: the run ended before its first one. "
            f"Start it again from the beginning:\n"
            f"  xlashard train --config {resumed.folder / 'config.toml'}"
        )
    if step > steps:
        raise SettingsError(
            f"the last checkpoint in {checkpoints.folder} is of step {step}, and training.steps = "
            f"{steps} ends before that. Write --steps with {step} or more."
        )


@contextmanager
def _claim_folder(place: _Place, name: str) -> Iterator[tuple[Path, Callable[[], object]]]:
    """Choose the run's folder and hold its lock, in the first process.

    Yields:
        The folder, and a function that checks that the lock is still held.
    """
    stop, locks = place.stop, list[RunLock]()

    def claim() -> Path:
        folder = place.resumed.folder if place.resumed else new_folder(place.runs, name)
        locks.append(take_lock(folder, stop.abandon, place.screen.show))
        return folder

    try:
        path = locate(stop.broadcast("the folder", claim))
        yield path, locks[0].check if locks else _ignore
    finally:
        for lock in locks:
            lock.release()


@contextmanager
def _records(
    place: _Place, path: Path, settings: Settings, done: int
) -> Iterator[tuple[Callable[..., None], Callable[[], None]]]:
    """Open the records: the run's folder in the first process, none in the others.

    Yields:
        A function that records, and one that writes all records.
    """
    if place.stop.group.index:
        yield _ignore, _ignore
        return
    kept = KeptRecords([])
    if place.resumed:
        again = is_due(settings.training.eval_every, done) and done < settings.training.steps
        kept = read_kept(path, done, evaluated_again=again or done == settings.training.steps)
    if kept.note:
        place.screen.show(f"Metrics     {kept.note}")
    with RunFolder(path, settings, kept.lines) as folder:
        if place.resumed:
            changed = changes(place.resumed.before, settings)
            folder.record("resume", steps=done, processes=place.stop.group.count, changed=changed)
        yield folder.record, folder.flush


@contextmanager
def _screen(place: _Place, path: Path, settings: Settings) -> Iterator[Screen]:
    """Open the output: the console in the first process, a log file in the others."""
    if place.stop.group.index == 0:
        yield place.screen
        return
    with LogFile(path / f"log-{place.stop.group.index}.txt") as file:
        yield Screen(log_console(file), settings.training.log_every)


def _first_state(
    run: Run, checkpoints: Checkpoints, resumed: Resumed | None
) -> tuple[State, Progress]:
    """Return the state to start from, initialised or restored, and its progress."""
    if resumed is None:
        drawn = initial_state(run.recipe, run.state_shardings)(np.uint32(run.settings.run.seed))
        return drawn, Progress(run.folder)
    _check_checkpoint(checkpoints, run.settings, resumed)
    like = state_shapes(run.recipe, run.state_shardings)
    restored = checkpoints.restore(like, settings=to_toml(run.settings))
    metadata = restored.metadata
    if metadata.data["text"] != run.corpus.mark and resumed.before.data == run.settings.data:
        raise DataError(
            f"the text differs from that of the run so far: it was {metadata.data['text']}, and "
            f"is {run.corpus.mark}. Restore the text, or write --data PATH [PATH ...] to continue "
            f"with this one"
        )
    run.screen.show(f"Resuming after step {metadata.step} of {run.folder}")
    for note in resumed.notes:
        run.screen.show(note)
    return restored.state, Progress(run.folder, metadata.step, checkpoint=metadata.step)


def _introduce(run: Run) -> None:
    """Show the mesh, the text, and the sharding of the parameters."""
    mesh, show = run.layout.mesh, run.screen.show
    axes = sizes_text(mesh.shape.items())
    device = mesh.devices.flat[0]
    prefix = "emulated " if run.settings.devices.emulate else ""
    show(f"Mesh        {axes}: {mesh.devices.size} {prefix}devices ({device.device_kind})")
    if run.stop.group.count > 1:
        show(f"Processes   {run.stop.group.count}, {_part(run)}")
    text = run.corpus
    show(
        f"Text        {len(text.train):,} {text.unit} for training, {len(text.held_out):,} held "
        f"out: {text.source}"
    )
    shapes = jax.eval_shape(run.recipe.initial_state, 0)
    shardings = run.state_shardings
    if run.layout.automatic:
        show(f"Layout      {_chosen(shapes['parameters'], run)}")
    tree = read_tree(shapes["parameters"], shardings["parameters"])
    show(f"Parameters  {parameters(run.settings.model):,}: {_held(tree)}")
    show(f"With AdamW  {_held(read_tree(shapes, shardings))}")
    show(tree.biggest(_DRAWN, "The largest parameters"))


def _part(run: Run) -> str:
    """Describe the devices and the part of a batch of this process."""
    training = run.settings.training
    rows, local = len(run.plan.rows) * training.accumulate, len(run.layout.mesh.local_devices)
    devices = counted(local, "device")
    return f"each with {devices}, reading {rows} of the {training.batch} sequences of a batch"


def _chosen(parameters: Any, run: Run) -> str:
    """Describe an automatic layout in two lines: parameters by their specs, and the batch."""
    sizes = {path_name(p): x.size for p, x in jax.tree.leaves_with_path(parameters)}
    specs = jax.tree.leaves_with_path(run.state_shardings["parameters"])
    alike: dict[str, list[str]] = {}
    for path, sharding in specs:
        alike.setdefault(str(sharding.spec), []).append(path_name(path))
    texts = []
    for spec, names in alike.items():
        largest = max(names, key=lambda name: sizes[name])
        texts.append(f"{largest}{f' and {len(names) - 1} more' if names[1:] else ''} {spec}")
    return f"parameters  {'; '.join(texts)}\n            batch       {run.batch_sharding.spec}"


def _held(tree: TreePicture) -> str:
    return f"{in_bytes(tree.nbytes)}, {in_bytes(tree.device_bytes)} on each device"


def _conclude(outcome: Progress, screen: Screen) -> None:
    if outcome.stopped:
        screen.show(f"Stopped by {outcome.signal} after step {outcome.steps}.")
        if outcome.checkpoint is not None:
            screen.show(f"Resume with:\n  xlashard train --resume {outcome.folder}")
    if outcome.loss is not None:
        screen.show(f"Final training loss {outcome.loss:.4f} nats per byte")
    if outcome.held_out is not None:
        screen.show(f"Final evaluation loss {outcome.held_out:.4f} nats per byte")
    screen.show(f"Results in {outcome.folder}")


def _ignore(*_: object, **__: object) -> None:
    """Drop what the first process prints or records."""
