"""Writing a checkpoint: what the run waits for, and what is done beside it."""

import secrets
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from xlashard.train.checkpoint import files
from xlashard.train.checkpoint.arrays import ArrayFiles, OthersFailedError, reason
from xlashard.train.checkpoint.manifest import About, Manifest, described
from xlashard.train.checkpoint.sync import AbsentError, Together
from xlashard.train.errors import CheckpointError

ARRAYS = "arrays"
"""The part of a step's folder that orbax writes."""

_PARTS = "parts"
_SHARE = "Choose a folder on a file system that all processes share"


@dataclass(frozen=True)
class Begun:
    """A save under way.

    Attributes:
        room: The folder in which it is written.
        types: The types of the arrays by their paths.
        about: What to write down.
    """

    room: Path
    types: Mapping[str, str]
    about: About


class Writer:
    """Writes the steps of one folder, one at a time.

    Args:
        folder: Of the checkpoints.
        keep: How many are kept; None keeps all.
        arrays: Writes arrays.
        together: The processes that write.
    """

    def __init__(
        self, folder: Path, keep: int | None, arrays: ArrayFiles, together: Together
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._arrays = arrays
        self._together = together
        self._is_shared = False

    def begin(self, state: Any, about: About) -> Begun:
        """What a run waits for: the folder is made, and the state copied.

        Args:
            state: A tree of arrays.
            about: What to write down.

        Returns:
            What `finish` needs.

        Raises:
            CheckpointError: It can't be written.
        """
        types = described(state)
        begun = Begun(self._make_room(about.step), types, about)
        problem = _attempt(lambda: self._arrays.save(begun.room / ARRAYS, state))
        if problem:
            self._hear(begun, "write", problem)
        return begun

    def finish(self, begun: Begun) -> None:
        """What a run need not wait for: files, digests, and the one step that makes it count.

        Args:
            begun: From `begin`.

        Raises:
            CheckpointError: Some process could not write; then nothing is committed.
        """
        self._hear(begun, "write", _attempt(lambda: self._write_part(begun.room)))
        problem = ""
        if self._together.first:
            problem = _attempt(lambda: self._write_rest(begun))
            if not problem:
                self._delete_old()
        self._hear(begun, "commit", problem)

    def _make_room(self, step: int) -> Path:
        """The folder to write in, which the first process makes and all see."""
        problem, token = "", secrets.token_hex(4)
        if self._together.first:
            room = files.room_of(self._folder, step, token)
            problem = _attempt(lambda: self._make(room, step))
        heard = self._together.hear(f"save step {step}", problem, token)
        if heard.problems:
            raise self._failed(step, str(heard))
        room = files.room_of(self._folder, step, heard.first)
        if not self._is_shared and jax.process_count() > 1:
            unseen = f"{room}, which process 0 made, is not there. {_SHARE}"
            heard = self._together.hear(f"see step {step}", "" if room.is_dir() else unseen)
            if heard.problems:
                files.discard(room)
                raise self._failed(step, str(heard))
            self._is_shared = True
        return room

    def _make(self, room: Path, step: int) -> None:
        later = [number for number in files.steps_in(self._folder) if number >= step]
        if later:
            paths = (str(files.path_of(self._folder, number)) for number in later)
            raise CheckpointError(
                f"there are checkpoints of the same or later steps already: {later}. A run that "
                f"resumed would go on from them. Choose another folder, or move them away:\n"
                f"  mv {' '.join(paths)} ELSEWHERE"
            )
        files.make(room)

    def _write_part(self, room: Path) -> None:
        """Waits for the arrays; of several processes each reads what it wrote for the digests."""
        try:
            self._arrays.wait()
        except OthersFailedError:
            return  # They say why.
        if jax.process_count() > 1:
            me = jax.process_index()
            own = [name for name in files.files_in(room) if files.writer_of(name) == me]
            files.write_digests(room / _PARTS, str(me), files.digests(room, own, durable=True))

    def _write_rest(self, begun: Begun) -> None:
        """Gathers all digests, writes the manifest, and commits."""
        room, about = begun.room, begun.about
        known = files.take_digests(room / _PARTS, jax.process_count())
        names = files.files_in(room)
        known |= files.digests(room, [name for name in names if name not in known], durable=True)
        Manifest(about, begun.types, {name: known[name] for name in names}).write(room)
        files.commit(room, about.step)

    def _delete_old(self) -> None:
        for step in files.steps_in(self._folder)[: -self._keep] if self._keep else ():
            try:
                files.remove(self._folder, step)
            except OSError as error:
                warnings.warn(
                    f"the checkpoint of step {step} is not needed any more and can't be deleted: "
                    f"{reason(error)}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _hear(self, begun: Begun, what: str, problem: str) -> None:
        heard = self._together.hear(f"{what} step {begun.about.step}", problem)
        if heard.problems:
            files.discard(begun.room)
            raise self._failed(begun.about.step, str(heard))

    def _failed(self, step: int, problem: str) -> CheckpointError:
        steps = files.steps_in(self._folder)
        left = f"the last one is of step {steps[-1]}" if steps else "there is no earlier one"
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self._folder} ({left}): "
            f"{problem}",
            step=step,
        )


def _attempt(work: Callable[[], Any]) -> str:
    """Does something; returns why it failed, or nothing."""
    try:
        work()
    except AbsentError:
        raise
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        return reason(error)
    return ""
