"""Going on with a run: which one, with which settings, and what may be different now."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xlashard.train.checkpoint.files import steps_in
from xlashard.train.errors import SettingsError
from xlashard.train.folder import CHECKPOINTS, SETTINGS, run_folders
from xlashard.train.schema import leaves
from xlashard.train.settings import Settings, load_settings
from xlashard.train.toml import toml_value

_SHAPING = ("layers", "width", "heads", "kv_heads", "mlp", "rope_base")
_FIXED = {
    **{f"model.{name}": "the parameters are those of the other model" for name in _SHAPING},
    "run.seed": "the order of the text follows from it",
    "run.name": "the folder is there already",
}
"""Settings that a run keeps, and why."""


@dataclass(frozen=True)
class Resumed:
    """A run that goes on.

    Attributes:
        folder: Its folder.
        settings: Its settings now.
        before: Its settings until now.
    """

    folder: Path
    settings: Settings
    before: Settings


def read_run(folder: Path, words: Iterable[str]) -> Resumed:
    """Reads what a run was, and what it shall be.

    Args:
        folder: Of the run.
        words: Changes of settings, such as ``"training.steps=600"``.

    Raises:
        SettingsError: It is no run's folder, or a change would make it another run.
    """
    path = folder / SETTINGS
    if not path.exists():
        raise SettingsError(f"{folder} is not the folder of a run: {_what_is_there(folder)}")
    before, settings = load_settings(path), load_settings(path, words)
    problems = [
        f"{key} = {toml_value(was)} can't become {toml_value(now)} in a run that goes on: "
        f"{_FIXED[key]}. Leave it as it is, or start a new run:\n"
        f"  xlashard train --config {path} --set {key}={toml_value(now)}"
        for key, (was, now) in changes(before, settings).items()
        if key in _FIXED
    ]
    if problems:
        raise SettingsError("\n".join(problems))
    return Resumed(folder, settings, before)


def last_run(runs: Path) -> Path:
    """The folder of the run that was written to last.

    Raises:
        SettingsError: There is no run.
    """
    found = run_folders(runs)
    if not found:
        raise SettingsError(
            f"there is no run in {runs} that could go on. Start one:\n"
            f"  xlashard train --config configs/tiny.toml"
        )
    return found[-1]


def newest_resumable(runs: Path, name: str) -> Path | None:
    """Return the newest run of a name that has a checkpoint; None if there is none.

    A restarted job calls this in every process before the processes join, when no process can have
    written a checkpoint yet, so all of them get the same answer.

    Args:
        runs: Folder that holds the folders of runs.
        name: Name of the run, `run.name` of its settings; later runs of it are NAME-2, NAME-3, ...
    """
    names = re.compile(re.escape(name) + r"(-\d+)?")
    found = [
        folder
        for folder in run_folders(runs)
        if names.fullmatch(folder.name) and steps_in(folder / CHECKPOINTS)
    ]
    return found[-1] if found else None


def changes(before: Settings, now: Settings) -> dict[str, tuple[Any, Any]]:
    """Settings that differ: by key what they were and what they are."""
    return {
        leaf.path: (was, is_)
        for leaf in leaves(Settings)
        if (was := _value(before, leaf.path)) != (is_ := _value(now, leaf.path))
    }


def _value(settings: Any, path: str) -> Any:
    for name in path.split("."):
        settings = getattr(settings, name)
    return settings


def _what_is_there(folder: Path) -> str:
    if not folder.is_dir():
        near = [str(path) for path in run_folders(folder.parent)]
        there = f" The runs in {folder.parent}: {', '.join(near)}." if near else ""
        return f"there is no such folder.{there}"
    return f"it holds no {SETTINGS}."
