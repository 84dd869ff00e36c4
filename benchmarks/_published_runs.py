"""Published training runs as settings, with their measured step times.

`published_runs.toml` has the rows and explains its columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xlashard.support.documents import read_toml
from xlashard.train.config.schema import read
from xlashard.train.config.settings import Settings

TABLE = Path(__file__).with_name("published_runs.toml")
_SETTINGS = ("devices", "mesh", "sharding", "model", "optimizer", "training", "data", "generation")


@dataclass(frozen=True)
class PublishedRun:
    """Training run with a published step time.

    Attributes:
        name: Chip, model, number of chips and running number.
        settings: The run.
        options: Compiler options of the run.
        seconds: Measured time of a step.
        reliability: A for a log line with its configuration, B for a table or a comment.
        software: Versions and date, as far as published.
        source: Repository and commit, or address.
        lacks: Properties of the run that the settings leave out or assume.
    """

    name: str
    settings: Settings
    options: Mapping[str, Any]
    seconds: float
    reliability: str
    software: str
    source: str
    lacks: tuple[str, ...]

    @property
    def chip(self) -> str:
        """Name of the chip, such as v5p."""
        return self.name.partition("_")[0]

    @property
    def target(self) -> str:
        """Kind of the chip: tpu or gpu."""
        return "tpu" if self.chip.startswith(("v", "tpu")) else "gpu"

    @property
    def slice_of_model(self) -> str:
        """Chip, model and number of chips, which several runs may share."""
        return self.name.rpartition("_")[0]


def published_runs() -> dict[str, PublishedRun]:
    """Read all published runs, by name."""
    document = read_toml(TABLE)
    runs = (_run(row, document["parts"]) for row in document["rows"])
    return {run.name: run for run in runs}


def _run(row: Mapping[str, Any], parts: Mapping[str, Any]) -> PublishedRun:
    table: dict[str, Any] = {}
    lacks: list[str] = []
    for part in (*(parts[name] for name in row["parts"]), row):
        table = _merged(table, part)
        lacks += part.get("lacks", ())
    return PublishedRun(
        name=row["id"],
        settings=read(Settings, {key: table[key] for key in _SETTINGS if key in table}),
        options=table.get("options", {}),
        seconds=row["seconds"],
        reliability=row["reliability"],
        software=row.get("software", ""),
        source=row["source"],
        lacks=tuple(lacks),
    )


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first table with the values of the second over it."""
    new = dict(first)
    for key, value in second.items():
        old = new.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            new[key] = _merged(old, value)
        else:
            new[key] = value
    return new
