"""The checkpoints of a run: saved while it goes on, each whole or not there at all."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from xlashard.train.checkpoint.arrays import ArrayFiles, reason
from xlashard.train.checkpoint.files import path_of, steps_in
from xlashard.train.checkpoint.manifest import (
    About,
    Damage,
    Manifest,
    check_contents,
    check_sizes,
    described,
    leaves_of,
    misfits,
    read_manifest,
)
from xlashard.train.checkpoint.sync import Together
from xlashard.train.checkpoint.writing import ARRAYS, Writer
from xlashard.train.errors import CheckpointError


@dataclass(frozen=True)
class Restored:
    """A state that was read.

    Attributes:
        state: A tree of Arrays, bit for bit as they were saved.
        about: What the run wrote down beside them.
    """

    state: Any
    about: About


class Checkpoints:
    """A folder of checkpoints; a context manager.

    With several processes all of them make one, for the same folder, which all must see, and call
    its methods in the same order; each writes and reads the pieces of arrays that it holds.

    Args:
        folder: Where the checkpoints lie. It is made by the first `save`.
        keep: How many of the newest are kept; None keeps all. An older one is deleted after a new
            one is committed.
        timeout: How long the processes wait for each other, in seconds.

    Example:
        >>> import tempfile, jax, numpy as np
        >>> from xlashard import Mesh, NamedSharding, P, device_put
        >>> from xlashard.train.checkpoint import About, Checkpoints
        >>> place = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P())
        >>> state = {"w": device_put(np.arange(4.0, dtype=np.float32), place)}
        >>> with Checkpoints(Path(tempfile.mkdtemp()), keep=2) as checkpoints:
        ...     checkpoints.save(state, About(step=10, data={}, settings="", mesh={"data": 8}))
        ...     checkpoints.wait()
        ...     like = {"w": jax.ShapeDtypeStruct((4,), np.float32, sharding=place)}
        ...     restored = checkpoints.restore(like)
        >>> restored.about.step, restored.state["w"].tolist()
        (10, [0.0, 1.0, 2.0, 3.0])
    """

    def __init__(self, folder: Path, *, keep: int | None = None, timeout: float = 600.0) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep = {keep} would delete every checkpoint. Write keep=1")
        self.folder = folder
        self._arrays = ArrayFiles(timeout)
        together = Together("steps", timeout)
        self._writer = Writer(folder, keep, self._arrays, together)
        self._reader = Reader(folder, self._arrays, together)
        self._pending: _Pending | None = None
        self._held: int | None = None

    def __enter__(self) -> Self:
        self._arrays.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(str(failed))
        finally:
            self._arrays.__exit__(kind, error, trace)

    def steps(self) -> list[int]:
        """The steps whose checkpoints are committed, in order. `restore` verifies the files."""
        return steps_in(self.folder)

    def latest(self) -> int | None:
        """The last committed step; None where there is none."""
        return next(reversed(self.steps()), None)

    def save(self, state: Any, about: About) -> None:
        """Saves a state: copies it, and writes the copy while the run goes on.

        When it returns, the state's buffers may be donated. An earlier save that is under way is
        waited for. The step that this object saved or restored last is not written again.

        Args:
            state: A tree of arrays.
            about: What to write down beside it; `about.step` names the checkpoint.

        Raises:
            CheckpointError: The earlier save failed, or this one can't begin. The state is as it
                was.
        """
        self.wait()
        if about.step == self._held:
            return
        begun = self._writer.begin(state, about)
        self._pending = _Pending(about.step, lambda: self._writer.finish(begun))

    def wait(self) -> None:
        """Waits until what was saved is committed.

        Raises:
            CheckpointError: It could not be written.
        """
        pending = self._pending
        if pending is None:
            return
        pending.join()  # If that is interrupted, it is still under way.
        self._pending = None
        if pending.error is not None:
            raise pending.error
        self._held = pending.step

    def restore(self, like: Any, step: int | None = None, *, settings: str = "") -> Restored:
        """Reads a checkpoint, on any mesh and with any number of processes.

        Args:
            like: The state's tree of `jax.ShapeDtypeStruct` with shardings.
            step: Which one; None reads the last.
            settings: The settings of the run that goes on, as TOML; errors name the ones that
                make it another model.

        Returns:
            The state, placed as `like` asks, and what was written down with it.

        Raises:
            CheckpointError: There is none, a file of it is damaged, or it does not fit.
        """
        self.wait()
        about, state = self._reader.restore(like, step, settings)
        self._held = about.step
        return Restored(state, about)


class _Pending:
    """A save under way in a thread of its own.

    Attributes:
        step: The step that is saved.
        error: What went wrong, once it is over.
    """

    def __init__(self, step: int, work: Callable[[], None]) -> None:
        self.step = step
        self.error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {step}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        """Waits for its end."""
        self._thread.join()


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
