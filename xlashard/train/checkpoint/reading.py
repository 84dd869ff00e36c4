"""Reading a checkpoint: which one, whether it is whole, and whether it fits."""

import json
from pathlib import Path
from typing import Any

import jax

from xlashard.train.checkpoint.about import About
from xlashard.train.checkpoint.arrays import ArrayFiles, reason
from xlashard.train.checkpoint.files import path_of, steps_in
from xlashard.train.checkpoint.manifest import (
    Damage,
    Manifest,
    check_contents,
    check_sizes,
    read_manifest,
)
from xlashard.train.checkpoint.together import Together
from xlashard.train.checkpoint.tree import described, leaves_of, misfits
from xlashard.train.checkpoint.writing import ARRAYS
from xlashard.train.errors import CheckpointError

_ORBAX = "orbax-checkpoint"
_LISTED = 8


class Reader:
    """Reads the steps of one folder.

    Args:
        folder: Of the checkpoints.
        arrays: Reads arrays.
        together: The processes that read.
    """

    def __init__(self, folder: Path, arrays: ArrayFiles, together: Together) -> None:
        self._folder = folder
        self._arrays = arrays
        self._together = together

    def restore(self, like: Any, step: int | None, settings: str) -> tuple[About, Any]:
        """Reads a step.

        Args:
            like: The tree of shapes, dtypes and shardings that is wanted.
            step: Which; None for the last.
            settings: Of the run that goes on; empty where they are not known.

        Returns:
            What was written down, and the tree of Arrays.

        Raises:
            CheckpointError: There is none, it is damaged, or it does not fit.
        """
        wanted = described(like)
        for path, leaf in leaves_of(like).items():
            if leaf.sharding is None:
                raise CheckpointError(
                    f"{path} of the state to restore has no sharding. Write:\n"
                    f"  jax.ShapeDtypeStruct({leaf.shape}, jnp.{leaf.dtype}, sharding=...)"
                )
        step = self._agreed(step)
        manifest = self._verified(step)
        about = manifest.about
        problem = misfits(manifest.arrays, wanted, about.settings, settings)
        if problem:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self._folder} is of another state:\n{problem}",
                step=step,
            )
        try:
            return about, self._arrays.restore(path_of(self._folder, step) / ARRAYS, like)
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self._folder} is as it was written, with "
                f"{_ORBAX} {about.versions.get(_ORBAX)}, but can't be read: {reason(error)}",
                step=step,
            ) from error

    def _agreed(self, step: int | None) -> int:
        """The step to read; all processes read the one that the first one finds."""
        problem, word = "", ""
        try:
            word = str(self._chosen(step))
        except CheckpointError as error:
            problem = str(error)
        heard = self._together.hear("restore", problem, word)
        if heard.problems:
            raise CheckpointError(str(heard))
        return int(heard.first)

    def _chosen(self, step: int | None) -> int:
        steps = steps_in(self._folder)
        chosen = step if step is not None else next(reversed(steps), None)
        if chosen is None or chosen not in steps:
            which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(f"there is {which} in {self._folder}: {self._there_is()}")
        return chosen

    def _there_is(self) -> str:
        steps = steps_in(self._folder)
        if steps:
            return f"there are those of steps {', '.join(map(str, steps))}"
        if not self._folder.is_dir():
            return "there is no such folder"
        names = sorted(path.name for path in self._folder.iterdir())
        return f"it holds {', '.join(names[:_LISTED])}" if names else "it is empty"

    def _verified(self, step: int) -> Manifest:
        """The manifest of a step all of whose files are as they were written.

        Several processes share the reading.
        """
        folder = path_of(self._folder, step)
        manifest = _manifest_of(folder, step)
        damage = manifest if isinstance(manifest, Damage) else self._share(folder, manifest)
        word = json.dumps([damage.file, damage.what]) if damage else ""
        heard = self._together.hear(f"restore step {step}", word)
        if isinstance(manifest, Manifest) and not heard.problems:
            return manifest
        # Who read it does not matter: it is one folder.
        raise self._damaged(step, Damage(*json.loads(next(iter(heard.problems.values())))))

    def _share(self, folder: Path, manifest: Manifest) -> Damage | None:
        by_size = sorted(manifest.files, key=lambda name: -manifest.files[name].bytes)
        return check_contents(folder, manifest, by_size[jax.process_index() :: jax.process_count()])

    def _damaged(self, step: int, damage: Damage) -> CheckpointError:
        text = f"the checkpoint of step {step} in {self._folder} can't be used: {damage}."
        earlier = (number for number in reversed(steps_in(self._folder)) if number < step)
        whole = next((number for number in earlier if self._is_whole(number)), None)
        if whole is None:
            text += " There is no earlier one that is whole."
        else:
            path = path_of(self._folder, step)
            text += (
                f" The one of step {whole} is whole. To go on from there, move this one away and "
                f"resume again:\n  mv {path} {self._folder.parent / f'damaged-{path.name}'}"
            )
        return CheckpointError(text, step=step, file=damage.file)

    def _is_whole(self, step: int) -> bool:
        folder = path_of(self._folder, step)
        manifest = _manifest_of(folder, step)
        if isinstance(manifest, Damage):
            return False
        return check_contents(folder, manifest, manifest.files) is None


def _manifest_of(folder: Path, step: int) -> Manifest | Damage:
    """The manifest, or why a folder is not what was committed as far as can be told by names."""
    manifest = read_manifest(folder)
    if isinstance(manifest, Damage):
        return manifest
    was = manifest.about.step
    if was != step:
        return Damage(folder.name, f"was renamed: its files are of step {was}")
    return check_sizes(folder, manifest) or manifest
