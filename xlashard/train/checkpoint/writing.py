"""Folders of checkpoints, and their writer in a blocking and a background part.

```text
checkpoints/
    00000200/             a committed step: renamed after all its files were on the disk
        checkpoint.json   metadata, and the digest of every file
        arrays/           written by orbax
        metrics.jsonl     copies of files of the run
    .saving-00000300-1c9f04e2/
                          being written, or left by a killed process
        parts/            digests by process, gathered in checkpoint.json
    .deleting-00000100/   being deleted, or left by a killed process
```

On an object store, which renames nothing, a step is written in its own folder: `checkpoint.json` is
the last object to appear there, and the first to be deleted.
"""

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax

from xlashard.support.documents import sync_path
from xlashard.train.checkpoint.arrays import SAVING, ArrayFiles
from xlashard.train.checkpoint.manifest import (
    NAME,
    Manifest,
    RunMetadata,
    array_types,
    digests,
    files_in,
    take_digests,
    write_digests,
    writer_of,
)
from xlashard.train.checkpoint.process_sync import (
    MissingProcessError,
    OthersFailedError,
    ProcessSync,
    find_reason,
)
from xlashard.train.errors import CheckpointError
from xlashard.train.stores import (
    is_object,
    move_command,
    remove_objects,
    reporting_store,
    write_copy,
)

ARRAYS = "arrays"
"""Subfolder of a step that orbax writes."""

_PARTS = "parts"
_DELETING = ".deleting-"
_STEP = re.compile(r"\d{8,}")
_SHARE = "Choose a folder on a file system that all processes share"


def path_of(folder: Path, step: int) -> Path:
    """Return the folder of a committed step: `checkpoints/00000200`."""
    return folder / f"{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """Return the committed steps of a folder, in order; none for a missing folder."""
    try:
        if is_object(folder):
            with reporting_store(folder):
                names = [x for x in _list_folders(folder) if (folder / x / NAME).exists()]
        else:
            names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} can't be read: {error.strerror}") from None
    return sorted(int(name) for name in names if _STEP.fullmatch(name))


def _list_folders(folder: Path) -> list[str]:
    """Return the folders of steps of an object store, also of those that are not committed."""
    return [path.name for path in folder.iterdir() if _STEP.fullmatch(path.name)]


def _staging_path(folder: Path, step: int, token: str) -> Path:
    """Return the staging folder of a step.

    The token makes it unique: orbax may still write into the folder of a failed save, and so may
    processes of an earlier run.
    """
    if is_object(folder):
        return path_of(folder, step)
    return folder / f"{SAVING}{step:08d}-{token}"


def _make_folder(staging: Path) -> None:
    """Create a staging folder, and remove those that killed processes left."""
    if is_object(staging):
        _remove_unfinished(staging.parent)
        return
    # Not its parents, or a run whose folder was just renamed would go on in a new one.
    staging.parent.mkdir(exist_ok=True)
    for entry in list(os.scandir(staging.parent)):
        if entry.name.startswith((SAVING, _DELETING)):
            shutil.rmtree(entry.path, ignore_errors=True)
    staging.mkdir()
    (staging / _PARTS).mkdir()


def _remove_unfinished(folder: Path) -> None:
    """Delete the steps of an object store that killed processes left without their last object."""
    committed = steps_in(folder)
    with suppress(FileNotFoundError), reporting_store(folder):
        for name in _list_folders(folder):
            if int(name) not in committed:
                remove_objects(folder / name, NAME)


def _check_still_there(staging: Path) -> None:
    """Check that a staging folder is the one that `_make_folder` created.

    Orbax creates the folders in which it writes: those of a run that was renamed meanwhile anew.

    Raises:
        CheckpointError: The folder was renamed or removed; what orbax created is removed again.
    """
    if is_object(staging) or (staging / _PARTS).is_dir():
        return
    shutil.rmtree(staging, ignore_errors=True)
    for empty in (staging.parent, staging.parent.parent):
        with suppress(OSError):
            empty.rmdir()
    raise CheckpointError(
        f"{staging.parent} was renamed or removed during the save. Rename it back, or resume the "
        f"run in its new place"
    )


def _commit(staging: Path, step: int) -> None:
    """Commit a written step: flush its folders and rename the staging folder."""
    for path in [*(p for p in staging.rglob("*") if p.is_dir()), staging]:
        sync_path(path)
    staging.rename(path_of(staging.parent, step))
    sync_path(staging.parent)


def _remove(folder: Path, step: int) -> None:
    """Delete a committed step; an interrupted deletion leaves no step."""
    if is_object(folder):
        remove_objects(path_of(folder, step), NAME)
        return
    away = folder / f"{_DELETING}{step:08d}"
    path_of(folder, step).rename(away)
    shutil.rmtree(away)


def _discard(staging: Path) -> None:
    """Remove the folder of a failed save, as far as possible."""
    if not is_object(staging):
        shutil.rmtree(staging, ignore_errors=True)
        return
    with suppress(OSError), reporting_store(staging):
        # It may be the folder of an earlier save, or committed by a write whose answer was lost.
        if not (staging / NAME).exists():
            remove_objects(staging, NAME)


class Writer:
    """Writer of the steps of a folder, one at a time.

    Args:
        folder: Folder of the checkpoints.
        keep: Number of checkpoints to keep; None keeps all.
        arrays: Writer of arrays.
        sync: Barriers of the processes.
    """

    def __init__(
        self, folder: Path, keep: int | None, arrays: ArrayFiles, sync: ProcessSync
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._arrays = arrays
        self._sync = sync
        self._is_shared = False

    def begin(
        self, state: Any, metadata: RunMetadata, copied: Iterable[Path]
    ) -> Callable[[], None]:
        """Create the staging folder and copy the state.

        Args:
            state: Tree of arrays.
            metadata: Metadata of the run.
            copied: Files of which the first process puts copies into the folder.

        Returns:
            A function that writes files and digests and commits the step. It raises CheckpointError
            if a process failed to write, and commits nothing then.

        Raises:
            CheckpointError: The folder or the arrays cannot be written.
        """
        types = array_types(state)
        staging = self._make_staging(metadata.step, copied)
        problem = _attempt(lambda: self._arrays.save(staging / ARRAYS, state))
        if problem:
            self._exchange(staging, metadata.step, "write", problem)
        return partial(self._finish, staging, types, metadata)

    def _finish(self, staging: Path, types: Mapping[str, str], metadata: RunMetadata) -> None:
        """Write files and digests, and commit the step."""
        problem = _attempt(lambda: self._write_part(staging))
        self._exchange(staging, metadata.step, "write", problem)
        problem = ""
        if self._sync.first:
            problem = _attempt(lambda: self._write_rest(staging, types, metadata))
            if not problem:
                self._delete_old()
        self._exchange(staging, metadata.step, "commit", problem)

    def _make_staging(self, step: int, copied: Iterable[Path]) -> Path:
        """Return the staging folder, created by the first process and visible to all.

        The files are copied before the barrier: after it the others wait in that of the arrays, to
        which a failed copy would not come.
        """
        problem, token = "", secrets.token_hex(4)
        if self._sync.first:
            staging = _staging_path(self._folder, step, token)
            problem = _attempt(lambda: self._make(staging, step, copied))
        result = self._sync.exchange(f"save step {step}", problem, token)
        staging = _staging_path(self._folder, step, result.first)
        if result.problems:
            _discard(staging)
            raise self._failed(step, str(result))
        if not (self._is_shared or is_object(staging)) and jax.process_count() > 1:
            unseen = f"{staging}, created by process 0, is not visible. {_SHARE}"
            result = self._sync.exchange(f"see step {step}", "" if staging.is_dir() else unseen)
            if result.problems:
                _discard(staging)
                raise self._failed(step, str(result))
            self._is_shared = True
        return staging

    def _make(self, staging: Path, step: int, copied: Iterable[Path]) -> None:
        later = [number for number in steps_in(self._folder) if number >= step]
        if later:
            paths = (str(path_of(self._folder, number)) for number in later)
            raise CheckpointError(
                f"the folder has checkpoints of the same or later steps: {later}. A run would "
                f"resume from them. Choose another folder, or, if no other program writes into "
                f"this one, move them away:\n  {move_command(self._folder)} {' '.join(paths)} "
                f"ELSEWHERE"
            )
        _make_folder(staging)
        for path in copied:
            # A file that was removed meanwhile is no part of the state.
            with suppress(FileNotFoundError):
                write_copy(path, staging / path.name)

    def _write_part(self, staging: Path) -> None:
        """Wait for the arrays, and compute the digests of this process's files in a pod."""
        try:
            self._arrays.wait()
        except OthersFailedError:
            return  # The other processes report the error.
        if jax.process_count() > 1 and not is_object(staging):
            _check_still_there(staging)
            me = jax.process_index()
            own = [name for name in files_in(staging) if writer_of(name) == me]
            write_digests(staging / _PARTS, str(me), digests(staging, own, durable=True))

    def _write_rest(self, staging: Path, types: Mapping[str, str], metadata: RunMetadata) -> None:
        """Write the manifest with the digests of all processes, and commit."""
        _check_still_there(staging)
        known = {} if is_object(staging) else take_digests(staging / _PARTS, jax.process_count())
        names = files_in(staging)
        known |= digests(staging, [name for name in names if name not in known], durable=True)
        Manifest(metadata, types, {name: known[name] for name in names}).write(staging)
        if not is_object(staging):
            _commit(staging, metadata.step)

    def _delete_old(self) -> None:
        for step in steps_in(self._folder)[: -self._keep] if self._keep else ():
            try:
                _remove(self._folder, step)
            except OSError as error:
                warnings.warn(
                    f"the checkpoint of step {step} is obsolete but cannot be deleted: "
                    f"{find_reason(error)}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _exchange(self, staging: Path, step: int, what: str, problem: str) -> None:
        result = self._sync.exchange(f"{what} step {step}", problem)
        if result.problems:
            _discard(staging)
            raise self._failed(step, str(result))

    def _failed(self, step: int, problem: str) -> CheckpointError:
        try:
            steps = steps_in(self._folder)
            left = f"the last one is of step {steps[-1]}" if steps else "no earlier one exists"
        except CheckpointError as error:
            left = str(error)
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self._folder} ({left}): "
            f"{problem}",
            step=step,
        )


def _attempt(work: Callable[[], Any]) -> str:
    """Return the error text of a function, or an empty string."""
    try:
        work()
    except MissingProcessError:
        raise
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        return find_reason(error)
    return ""
