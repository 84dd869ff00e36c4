"""Folder of a run: settings, metrics, loss curve; and selection of a run to resume."""

import errno
import io
import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from xlashard.errors import counted
from xlashard.support.documents import parse_json, parse_toml
from xlashard.train.checkpoint.manifest import Damage, read_manifest
from xlashard.train.checkpoint.writing import path_of, steps_in
from xlashard.train.config.schema import leaves, read, to_toml, toml_value
from xlashard.train.config.settings import Settings, load_settings
from xlashard.train.errors import RunError, SettingsError
from xlashard.train.stores import (
    is_object,
    make_new_folder,
    open_appended,
    read_time,
    write_appended,
    write_file,
)

SETTINGS, METRICS, CHECKPOINTS = "config.toml", "metrics.jsonl", "checkpoints"
"""Names in a run's folder."""


# Decay of the running mean of a curve.
_DECAY = 0.9
# Kinds of records that are points of a curve.
_DRAWN = ("train", "eval")


class RunFolder:
    """Open folder of a run.

    Args:
        path: Existing folder, from `new_folder`.
        settings: Settings to write.
        kept: Records of a resumed run to keep.

    Attributes:
        path: Folder with ``config.toml``, ``metrics.jsonl`` and, after `close`, ``loss.png``.
    """

    def __init__(self, path: Path, settings: Settings, kept: Sequence[dict[str, Any]] = ()):
        self.path = path
        self._curves: dict[str, Points] = {kind: ([], []) for kind in _DRAWN}
        for line in kept:
            self._draw(**line)
        with _reporting(path / SETTINGS):
            write_file(path / SETTINGS, to_toml(settings))
        with _reporting(path / METRICS):
            write_file(path / METRICS, "".join(json.dumps(line) + "\n" for line in kept))
            self._metrics = io.TextIOWrapper(open_appended(path / METRICS), encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def record(self, kind: str, **values: Any) -> None:
        """Write a record; one with ``step`` and ``loss`` is a point of a curve."""
        with _reporting(self.path / METRICS):
            self._metrics.write(json.dumps({"kind": kind, **values}) + "\n")
            self._metrics.flush()
        self._draw(kind, **values)

    def flush(self) -> None:
        """Write the records to where others, and a resumed run, read them."""
        with _reporting(self.path / METRICS):
            write_appended(self._metrics)

    def close(self) -> None:
        """Close the records and draw the curve if it has a point."""
        if self._metrics.closed:
            return
        # A disk that was full at the last record has reported its error.
        with suppress(OSError):
            self._metrics.close()
        if self._curves["train"][0]:
            with _reporting(self.path / "loss.png"):
                draw_curve(self.path / "loss.png", self._curves["train"], self._curves["eval"])

    def _draw(self, kind: str, **values: Any) -> None:
        if kind in self._curves:
            steps, losses = self._curves[kind]
            steps.append(values["step"])
            losses.append(values["loss"])


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    """Report errors of a file with its path.

    Raises:
        RunError: The file can't be written.
    """
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} can't be written: {error.strerror}. Free space or make it writable, then "
            f"resume:\n  xlashard train --resume {path.parent}"
        ) from None


class LogFile(io.TextIOWrapper):
    """Open log of a process in a run's folder; an error of its disk has the file's path.

    Args:
        path: The file, to which text is appended.

    Raises:
        RunError: At any call, if the file can't be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with _reporting(path):
            if not is_object(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            super().__init__(open_appended(path), encoding="utf-8")

    def write(self, text: str, /) -> int:
        """Append text."""
        with _reporting(self._path):
            return super().write(text)

    def flush(self) -> None:
        """Pass the text on to the file system."""
        with _reporting(self._path):
            super().flush()

    def close(self) -> None:
        """Close the file, also after an error."""
        with _reporting(self._path):
            super().close()


def new_folder(runs: Path, name: str) -> Path:
    """Create the folder ``RUNS/NAME``, or ``NAME-2``, ``NAME-3``, ... if it exists.

    Raises:
        SettingsError: The name is not the name of one folder, or creation fails.
    """
    if Path(name).name != name or name in ("", "..") or not name.isprintable():
        letters = "".join(filter(str.isprintable, Path(name).name))
        raise SettingsError(
            f"run.name must be the name of one folder, without control characters, not {name!r}. "
            f"Write, for example:\n"
            f"  --name {shlex.quote(letters) if letters.strip('.') else 'tiny'}"
        )
    number = 1
    while True:
        path = runs / (name if number == 1 else f"{name}-{number}")
        try:
            make_new_folder(path)
        except FileExistsError:
            number += 1
        except OSError as error:
            shorter = ", or a shorter --name" if error.errno == errno.ENAMETOOLONG else ""
            raise SettingsError(
                f"the folder {path} for the results cannot be created: {error.strerror}. "
                f"Write --runs FOLDER with a writable folder{shorter}."
            ) from None
        else:
            return path


def is_finished(path: Path, settings: Settings) -> bool:
    """Return True if the run of a folder has finished all its steps, and has their checkpoint."""
    last, steps = next(reversed([*_lines(path / METRICS)]), {}), settings.training.steps
    ended = last.get("kind") == "end" and not last.get("interrupted") and last.get("steps") == steps
    saved = steps_in(path / CHECKPOINTS)[-1:] == [steps] or not settings.checkpoint.keep
    return ended and saved


@dataclass(frozen=True)
class KeptRecords:
    """Records of a run up to a step.

    Attributes:
        lines: The records.
        note: What was wrong with the file, and what became of it; empty if nothing was.
    """

    lines: Sequence[dict[str, Any]]
    note: str = ""


def read_kept(path: Path, step: int, evaluated_again: bool) -> KeptRecords:
    """Return the records of a run up to a step, to resume from there.

    A checkpoint holds a copy of the records, which stands in for a file that was cut off.

    Args:
        path: Folder of the run.
        step: Number of complete steps; records of later steps are dropped.
        evaluated_again: Drop the evaluation after that step, too.
    """
    kept = _measured_until(path / METRICS, step, evaluated_again)
    copied = _measured_until(path_of(path / CHECKPOINTS, step) / METRICS, step, evaluated_again)
    measured, saved = _points(kept), _points(copied)
    lost = {at for kind, at in saved.keys() - measured.keys()}
    if lost:
        note = f"lacks steps {_ranges(lost)}: they were restored from the checkpoint"
    elif any(measured[point] != line for point, line in saved.items()):
        note = "was altered: the records are those of the checkpoint"
    else:
        gap = set(range(1, step + 1)) - {at for kind, at in measured if kind == "train"}
        note = f"lacks steps {_ranges(gap)}, as does the checkpoint" if gap else ""
        copied = kept
    return KeptRecords(copied, f"{path / METRICS} {note}" if note else "")


def _measured_until(path: Path, step: int, evaluated_again: bool) -> list[dict[str, Any]]:
    def again(line: dict[str, Any]) -> bool:
        late = line.get("step", 0) > step
        return late or (evaluated_again and line["kind"] == "eval" and line["step"] == step)

    return [x for x in _lines(path) if x["kind"] != "text" and not again(x)]


def _points(lines: Iterable[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the points of the curves by kind and step."""
    return {(x["kind"], x["step"]): x for x in lines if x["kind"] in _DRAWN}


def _ranges(steps: Iterable[int]) -> str:
    """Describe numbers by their ranges: `3, 7 to 9`."""
    ranges: list[list[int]] = []
    for step in sorted(steps):
        if ranges and ranges[-1][1] == step - 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in ranges)


def run_folders(runs: Path) -> list[Path]:
    """Return the run folders below a folder, the most recently written one last."""
    folders = [path.parent for path in runs.glob(f"*/{SETTINGS}")]
    return sorted(folders, key=lambda path: _written(path / METRICS))


def _written(path: Path) -> float:
    return read_time(path) if path.exists() else 0.0


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; a killed process may leave a truncated line."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError):
                record = parse_json(line)
                if line.endswith(b"\n") and _is_measurement(record):
                    yield record


def _is_measurement(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    needed = ("step", "loss") if record.get("kind") in _DRAWN else ()
    return isinstance(record.get("kind"), str) and all(
        isinstance(record.get(name), int | float) for name in needed
    )


type Points = tuple[list[int], list[float]]
"""Steps and losses of a curve."""


def draw_curve(path: Path, train: Points, held_out: Points) -> None:
    """Write a PNG of the loss against the step.

    Args:
        path: File to write.
        train: Loss of every step, drawn with its running mean.
        held_out: Loss of every evaluation; may be empty.
    """
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, losses = train
    axes.plot(steps, losses, color="#9ecae1", linewidth=1, label="training, each step")
    if len(steps) > 1:
        axes.plot(steps, running_mean(losses), color="#08519c", label="training, running mean")
    if held_out[0]:
        axes.plot(*held_out, color="#d94801", marker="o", linestyle="--", label="evaluation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_file(path, image.getvalue())


def running_mean(values: list[float]) -> np.ndarray:
    """Return the bias-corrected exponential running mean."""
    mean = weight = 0.0
    means = []
    for value in values:
        mean = _DECAY * mean + (1 - _DECAY) * value
        weight = _DECAY * weight + (1 - _DECAY)
        means.append(mean / weight)
    return np.asarray(means)


_SHAPING = ("layers", "width", "heads", "kv_heads", "mlp", "rope_base")


_FIXED = {
    **{f"model.{name}": "the parameters depend on it" for name in _SHAPING},
    "run.seed": "the order of the text depends on it",
    "run.name": "it is the name of the existing folder",
}
"""Settings that a resumed run cannot change, and the reason."""


@dataclass(frozen=True)
class Resumed:
    """Run to resume.

    Attributes:
        folder: Folder of the run.
        settings: New settings.
        before: Settings of the last checkpoint; of the settings file without a readable one.
        notes: What differs from the checkpoint, or was restored from it, in lines for the user.
    """

    folder: Path
    settings: Settings
    before: Settings
    notes: Sequence[str] = ()


def read_run(folder: Path, words: Iterable[str]) -> Resumed:
    """Read the settings of a run to resume, and apply overrides.

    Settings that the file lacks, because it was cut off, are those of the last checkpoint.

    Args:
        folder: Folder of the run.
        words: Overrides such as ``"training.steps=600"``.

    Raises:
        SettingsError: The folder is not a run folder, or a resumed run cannot change a setting.
    """
    path, words = folder / SETTINGS, list(words)
    if not path.exists():
        raise SettingsError(f"{folder} is not a run folder: {_explain_missing(folder)}")
    step, saved = _read_saved(folder)
    restored: list[str] = []

    def parse(text: str) -> dict[str, Any]:
        # A last line without its end may have lost a part of its value.
        table = parse_toml(text[: text.rfind("\n") + 1] if saved else text)
        restored[:] = _missing_keys(saved, table)
        return _fill(saved, table) if restored else table

    written, settings = load_settings(path, (), parse), load_settings(path, words, parse)
    before = read(Settings, saved, ()) if saved else written
    refused = changes(written, settings) | {
        key: values for key, values in changes(before, settings).items() if key != "run.name"
    }
    problems = [
        f"{key} = {toml_value(was)} cannot become {toml_value(now)} in a resumed run: "
        f"{_FIXED[key]}. Leave it as it is, or start a new run:\n"
        f"  xlashard train --config {path} --set {key}={toml_value(now)}"
        for key, (was, now) in refused.items()
        if key in _FIXED
    ]
    if problems:
        raise SettingsError("\n".join(problems))
    return Resumed(folder, settings, before, _describe(folder, step, restored, before, settings))


def _describe(
    folder: Path, step: int, restored: Sequence[str], before: Settings, settings: Settings
) -> list[str]:
    """Describe how a run's folder and settings differ from its last checkpoint."""
    notes = []
    if restored:
        notes.append(
            f"Restored    {folder / SETTINGS} is cut off: it lacks {counted(len(restored), 'key')}"
            f", from {restored[0]} on, which are those of the checkpoint of step {step}"
        )
    for key, (was, now) in changes(before, settings).items():
        notes.append(f"Changed     {key} from {toml_value(was)} to {toml_value(now)}")
    name = settings.run.name
    if not re.fullmatch(re.escape(name) + r"(-\d+)?", folder.resolve().name):
        notes.append(f"Renamed     {folder} was started as {name!r}, which --auto-resume looks for")
    return notes


def _read_saved(folder: Path) -> tuple[int, dict[str, Any]]:
    """Return the last step and the settings in its checkpoint that this release has.

    A damaged checkpoint has none here; restoring it reports the damage.
    """
    step = next(reversed(steps_in(folder / CHECKPOINTS)), 0)
    manifest = read_manifest(path_of(folder / CHECKPOINTS, step))
    if isinstance(manifest, Damage) or manifest.metadata.step != step:
        return step, {}
    try:
        table = parse_toml(manifest.metadata.settings)
        known = _keep_known(table, {leaf.path for leaf in leaves(Settings)})
        read(Settings, known, ())
    except ValueError:
        return step, {}  # Another release wrote them, with values that this one refuses.
    return step, known


def _keep_known(table: Mapping[str, Any], known: Collection[str], path: str = "") -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in table.items():
        if path + key in known:
            kept[key] = value
        elif isinstance(value, dict):
            kept[key] = _keep_known(value, known, f"{path}{key}.")
    return kept


def _missing_keys(saved: Mapping[str, Any], table: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the settings of a checkpoint that a settings file lacks; axes may be left out."""
    missing = []
    for key, value in saved.items():
        if key not in table and (not isinstance(value, dict) or path + key == "mesh"):
            missing.append(path + key)
        elif isinstance(value, dict) and path + key != "mesh":
            inner = table.get(key, {})
            # A short form, such as `sharding = "auto"`, stands for the whole table.
            if isinstance(inner, dict):
                missing += _missing_keys(value, inner, f"{path}{key}.")
    return missing


def _fill(saved: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a file with those of a checkpoint that it lacks."""
    filled = {**saved, **table}
    for key, value in table.items():
        if isinstance(value, dict) and isinstance(saved.get(key), dict):
            filled[key] = _fill(saved[key], value)
    return filled


def last_run(runs: Path) -> Path:
    """Return the most recently written run folder.

    Raises:
        SettingsError: The folder has no runs.
    """
    folders = run_folders(runs)
    if not folders:
        raise SettingsError(
            f"{runs} has no run to resume. Start one:\n  xlashard train --config configs/tiny.toml"
        )
    return folders[-1]


def newest_resumable(runs: Path, name: str) -> Path | None:
    """Return the newest run of a name that has a checkpoint; None if there is none.

    A restarted job calls this in every process before the processes join, when no process can have
    written a checkpoint yet, so all of them get the same answer.

    Args:
        runs: Folder that holds the folders of runs.
        name: Name of the run, `run.name` of its settings; later runs of it are NAME-2, NAME-3, ...
    """
    names = re.compile(re.escape(name) + r"(-\d+)?")
    folders = [
        folder
        for folder in run_folders(runs)
        if names.fullmatch(folder.name) and steps_in(folder / CHECKPOINTS)
    ]
    return folders[-1] if folders else None


def changes(before: Settings, now: Settings) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by key, with old and new value."""
    values = ((leaf.path, attrgetter(leaf.path)) for leaf in leaves(Settings))
    return {path: (of(before), of(now)) for path, of in values if of(before) != of(now)}


def _explain_missing(folder: Path) -> str:
    if folder.exists() and not folder.is_dir():
        return "it is a file."
    if not folder.is_dir():
        near = [str(path) for path in run_folders(folder.parent)]
        listed = f" The runs in {folder.parent}: {', '.join(near)}." if near else ""
        return f"it does not exist.{listed}"
    return f"it has no {SETTINGS}."
