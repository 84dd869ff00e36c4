"""The folder of a run: its settings, its measurements line by line, its loss curve."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from xlashard.train.curve import Points, draw_curve
from xlashard.train.errors import SettingsError
from xlashard.train.settings import Settings
from xlashard.train.toml import to_toml


class RunFolder:
    """A new folder ``RUNS/NAME``; ``NAME-2``, ``NAME-3`` and so on where that exists already.

    Attributes:
        path: The folder. It holds ``config.toml``, ``metrics.jsonl`` and, in the end, ``loss.png``.
    """

    def __init__(self, runs: Path, settings: Settings):
        self.path = _fresh(runs, settings.run.name)
        (self.path / "config.toml").write_text(to_toml(settings), encoding="utf-8")
        self._metrics = (self.path / "metrics.jsonl").open("w", encoding="utf-8")
        self._curves: dict[str, Points] = {"train": ([], []), "eval": ([], [])}

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
        if kind in self._curves:
            steps, losses = self._curves[kind]
            steps.append(values["step"])
            losses.append(values["loss"])

    def close(self) -> None:
        """Closes the measurements and draws the curve, if there is a point to draw."""
        if self._metrics.closed:
            return
        self._metrics.close()
        if self._curves["train"][0]:
            draw_curve(self.path / "loss.png", self._curves["train"], self._curves["eval"])


def _fresh(runs: Path, name: str) -> Path:
    if Path(name).name != name or name in ("", ".."):
        raise SettingsError(
            f"run.name must be the name of one folder, not {name!r}. Write, for example:\n"
            f"  --name {Path(name).name or 'tiny'}"
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
