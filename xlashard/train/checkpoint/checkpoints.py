"""Checkpoints of a run: saved in the background, committed atomically, verified on restore."""

import json
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax

from xlashard.support.background import run_in_thread
from xlashard.train.checkpoint.arrays import ArrayFiles
from xlashard.train.checkpoint.manifest import (
    Damage,
    Manifest,
    RunMetadata,
    array_types,
    check_contents,
    check_sizes,
    describe_mismatches,
    leaves_of,
    read_manifest,
)
from xlashard.train.checkpoint.process_sync import ProcessSync, find_reason
from xlashard.train.checkpoint.writing import ARRAYS, Writer, path_of, steps_in
from xlashard.train.errors import CheckpointError
from xlashard.train.stores import move_command

_ORBAX = "orbax-checkpoint"
_LISTED = 8


@dataclass(frozen=True)
class Restored:
    """Restored state.

    Attributes:
        state: Tree of Arrays, bitwise equal to the saved ones.
        metadata: Metadata of the run.
    """

    state: Any
    metadata: RunMetadata


class Checkpoints:
    """Folder of checkpoints; a context manager.

    All processes of a run create one for the same shared folder, and call its methods in the same
    order; each writes and reads its addressable shards.

    Args:
        folder: Folder of the checkpoints, created by the first `save`.
        keep: Number of the newest checkpoints to keep; None keeps all. Older ones are deleted
            after a commit.
        timeout: Timeout of barriers in seconds.

    Example:
        >>> import tempfile, jax, numpy as np
        >>> from xlashard import Mesh, NamedSharding, P, device_put
        >>> from xlashard.train.checkpoint import RunMetadata, Checkpoints
        >>> sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P())
        >>> state = {"w": device_put(np.arange(4.0, dtype=np.float32), sharding)}
        >>> with Checkpoints(Path(tempfile.mkdtemp()), keep=2) as checkpoints:
        ...     metadata = RunMetadata(step=10, data={}, settings="", mesh={"data": 8})
        ...     checkpoints.save(state, metadata)
        ...     checkpoints.wait()
        ...     like = {"w": jax.ShapeDtypeStruct((4,), np.float32, sharding=sharding)}
        ...     restored = checkpoints.restore(like)
        >>> restored.metadata.step, restored.state["w"].tolist()
        (10, [0.0, 1.0, 2.0, 3.0])
    """

    def __init__(self, folder: Path, *, keep: int | None = None, timeout: float = 600.0) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep = {keep} would delete every checkpoint. Write keep=1")
        self.folder = folder
        self._arrays = ArrayFiles(timeout)
        self._sync = ProcessSync("steps", timeout)
        self._writer = Writer(folder, keep, self._arrays, self._sync)
        self._pending: tuple[int, Future[None]] | None = None
        self._held: int | None = None

    def __enter__(self) -> Self:
        self._arrays.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.wait()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(str(failed))
        finally:
            self._arrays.__exit__(kind, error, trace)

    def steps(self) -> list[int]:
        """Return the committed steps, in order; `restore` verifies their files."""
        return steps_in(self.folder)

    def latest(self) -> int | None:
        """Return the last committed step; None without one."""
        return next(reversed(self.steps()), None)

    def save(self, state: Any, metadata: RunMetadata, copied: Iterable[Path] = ()) -> None:
        """Copy a state and write the copy in the background.

        The state's buffers may be donated afterwards. The call first waits for an earlier save. The
        step that this object saved or restored last is not written again.

        Args:
            state: Tree of arrays.
            metadata: Metadata of the run; `metadata.step` names the checkpoint.
            copied: Files of which the first process puts copies beside the arrays.

        Raises:
            CheckpointError: The earlier save failed, or this one cannot begin. The state is
                unchanged.
        """
        self.wait()
        if metadata.step == self._held:
            return
        work = self._writer.begin(state, metadata, copied)
        thread = f"checkpoint of step {metadata.step}"
        self._pending = metadata.step, run_in_thread(work, thread)

    def wait(self) -> None:
        """Wait until the pending save is committed.

        Raises:
            CheckpointError: The save failed.
        """
        if self._pending is None:
            return
        step, saving = self._pending
        wait([saving])  # After an interrupt the save is still pending.
        self._pending = None
        saving.result()
        self._held = step

    def restore(self, like: Any, step: int | None = None, *, settings: str = "") -> Restored:
        """Read a checkpoint, on any mesh and with any number of processes.

        Args:
            like: Tree of `jax.ShapeDtypeStruct` with shardings.
            step: Step to read; None reads the last.
            settings: Settings of the resumed run, as TOML; errors name the settings that change
                the model.

        Returns:
            The state with the shardings of `like`, and its metadata.

        Raises:
            CheckpointError: The checkpoint is missing, damaged, or does not fit.
        """
        self.wait()
        types = array_types(like)
        for path, leaf in leaves_of(like).items():
            if leaf.sharding is None:
                raise CheckpointError(
                    f"{path} of the state to restore has no sharding. Write:\n"
                    f"  jax.ShapeDtypeStruct({leaf.shape}, jnp.{leaf.dtype}, sharding=...)"
                )
        step = self._agreed(step)
        manifest = self._verified(step)
        metadata = manifest.metadata
        problem = describe_mismatches(manifest.arrays, types, metadata.settings, settings)
        if problem:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.folder} does not fit:\n{problem}",
                step=step,
            )
        try:
            state = self._arrays.restore(path_of(self.folder, step) / ARRAYS, like)
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.folder} is undamaged, written by "
                f"{_ORBAX} {metadata.versions.get(_ORBAX)}, but cannot be read: "
                f"{find_reason(error)}",
                step=step,
            ) from error
        self._held = metadata.step
        return Restored(state, metadata)

    def _agreed(self, step: int | None) -> int:
        """Return the step to read, chosen by the first process."""
        problem, word = "", ""
        try:
            word = str(self._chosen(step))
        except CheckpointError as error:
            problem = str(error)
        result = self._sync.exchange("restore", problem, word)
        if result.problems:
            raise CheckpointError(str(result))
        return int(result.first)

    def _chosen(self, step: int | None) -> int:
        chosen = self.latest() if step is None else step
        if chosen is None or chosen not in self.steps():
            missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(f"{self.folder} has {missing}: {self._explain_missing()}")
        return chosen

    def _explain_missing(self) -> str:
        if steps := self.steps():
            return f"it has those of steps {', '.join(map(str, steps))}"
        if not self.folder.is_dir():
            return "it does not exist"
        names = sorted(path.name for path in self.folder.iterdir())
        return f"it holds {', '.join(names[:_LISTED])}" if names else "it is empty"

    def _verified(self, step: int) -> Manifest:
        """Return the manifest of a step after verifying all its files.

        The processes divide the files among them.
        """
        folder = path_of(self.folder, step)
        manifest = _manifest_of(folder, step)
        if isinstance(manifest, Damage):
            damage = manifest
        else:
            by_size = sorted(manifest.files, key=lambda name: -manifest.files[name].bytes)
            own = by_size[jax.process_index() :: jax.process_count()]
            damage = check_contents(folder, manifest, own)
        word = json.dumps([damage.file, damage.what]) if damage else ""
        result = self._sync.exchange(f"restore step {step}", word)
        if isinstance(manifest, Manifest) and not result.problems:
            return manifest
        # All processes read the same folder, so any of the problems will do.
        raise self._damaged(step, Damage(*json.loads(next(iter(result.problems.values())))))

    def _damaged(self, step: int, damage: Damage) -> CheckpointError:
        text = f"the checkpoint of step {step} in {self.folder} is damaged: {damage}."
        earlier = (number for number in reversed(self.steps()) if number < step)
        whole = next((number for number in earlier if self._is_whole(number)), None)
        if whole is None:
            text += " No earlier checkpoint is intact."
        else:
            path = path_of(self.folder, step)
            text += (
                f" The checkpoint of step {whole} is intact. To resume from it, move this one away "
                f"and resume again:\n  {move_command(path)} {path} "
                f"{self.folder.parent / f'damaged-{path.name}'}"
            )
        return CheckpointError(text, step=step, file=damage.file)

    def _is_whole(self, step: int) -> bool:
        folder = path_of(self.folder, step)
        manifest = _manifest_of(folder, step)
        if isinstance(manifest, Damage):
            return False
        return check_contents(folder, manifest, manifest.files) is None


def _manifest_of(folder: Path, step: int) -> Manifest | Damage:
    """Return the manifest after checks of names and sizes, or the damage."""
    manifest = read_manifest(folder)
    if isinstance(manifest, Damage):
        return manifest
    was = manifest.metadata.step
    if was != step:
        return Damage(folder.name, f"was renamed: its files are of step {was}")
    return check_sizes(folder, manifest) or manifest
