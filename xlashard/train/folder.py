"""The folder of a run: its settings, its measurements line by line, its loss curve."""

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from xlashard.documents import parse_json
from xlashard.train.curve import Points, draw_curve
from xlashard.train.errors import SettingsError
from xlashard.train.settings import Settings
from xlashard.train.toml import to_toml

SETTINGS, METRICS, CHECKPOINTS = "config.toml", "metrics.jsonl", "checkpoints"
"""What a run's folder holds."""

# The kinds of measurements that are points of a curve.
_DRAWN = ("train", "eval")


class Records(Protocol):
    """Where measurements go."""

    def record(self, kind: str, **values: Any) -> None:
        """Notes a measurement."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


class NoRecords:
    """The measurements of a process that is not the first: the first one has the same."""

    def record(self, kind: str, **values: Any) -> None:
        """Notes nothing."""

    def close(self) -> None:
        """Nothing is open."""


class RunFolder:
    """The open folder of a run.

    Args:
        path: The folder; `new_folder` makes one.
        settings: Are written into it.
        kept: Of a run that goes on, what was measured until now and stays.

    Attributes:
        path: The folder. It holds ``config.toml``, ``metrics.jsonl`` and, in the end, ``loss.png``.
    """

    def __init__(self, path: Path, settings: Settings, kept: Sequence[dict[str, Any]] = ()):
        self.path = path
        self._curves: dict[str, Points] = {kind: ([], []) for kind in _DRAWN}
        _replace(path / SETTINGS, to_toml(settings))
        for line in kept:
            self._draw(**line)
        _replace(path / METRICS, "".join(json.dumps(line) + "\n" for line in kept))
        self._metrics = (path / METRICS).open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def record(self, kind: str, **values: Any) -> None:
        """Writes one line of measurements; with ``step`` and ``loss`` it is a point of a curve."""
        self._metrics.write(json.dumps({"kind": kind, **values}) + "\n")
        self._metrics.flush()
        self._draw(kind, **values)

    def close(self) -> None:
        """Closes the measurements and draws the curve, if there is a point to draw."""
        if self._metrics.closed:
            return
        self._metrics.close()
        if self._curves["train"][0]:
            draw_curve(self.path / "loss.png", self._curves["train"], self._curves["eval"])

    def _draw(self, kind: str, **values: Any) -> None:
        if kind in self._curves:
            steps, losses = self._curves[kind]
            steps.append(values["step"])
            losses.append(values["loss"])


def new_folder(runs: Path, name: str) -> Path:
    """Makes the folder ``RUNS/NAME``; ``NAME-2``, ``NAME-3`` and so on where that exists already.

    Raises:
        SettingsError: The name is not that of one folder, or it can't be made.
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
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise SettingsError(
                f"the folder {path} for the results cannot be made: {error.strerror}. "
                f"Write --runs FOLDER with one that can be written to."
            ) from None
        else:
            return path


def is_finished(path: Path, steps: int) -> bool:
    """Whether the run of a folder has come to its end, which is so many steps."""
    last = next(reversed([*_lines(path / METRICS)]), {})
    return last.get("kind") == "end" and not last.get("interrupted") and last.get("steps") == steps


def measured_until(path: Path, step: int, evaluated_again: bool) -> list[dict[str, Any]]:
    """What was measured in a run up to a step, to go on from there with one line of measurements.

    Args:
        path: The folder of the run.
        step: Steps that are done. What was measured of later ones will be measured again.
        evaluated_again: So will be the evaluation after that very step.
    """

    def again(line: dict[str, Any]) -> bool:
        late = line.get("step", 0) > step
        return late or (evaluated_again and line["kind"] == "eval" and line["step"] == step)

    return [x for x in _lines(path / METRICS) if x["kind"] != "text" and not again(x)]


def run_folders(runs: Path) -> list[Path]:
    """The folders of runs below a folder, the one last written to at the end."""
    found = [path.parent for path in runs.glob(f"*/{SETTINGS}")]
    return sorted(found, key=lambda path: _written(path / METRICS))


def _written(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the measurements in a file; a process that is killed may leave half a line."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError):
                found = parse_json(line)
                if line.endswith(b"\n") and _is_measurement(found):
                    yield found


def _is_measurement(found: Any) -> bool:
    if not isinstance(found, dict):
        return False
    needed = ("step", "loss") if found.get("kind") in _DRAWN else ()
    return isinstance(found.get("kind"), str) and all(
        isinstance(found.get(name), int | float) for name in needed
    )


def _replace(path: Path, text: str) -> None:
    """Writes a file that others see as it was or as it is, never half."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
