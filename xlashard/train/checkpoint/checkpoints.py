"""The checkpoints of a run: saved while it goes on, each whole or not there at all."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from xlashard.train.checkpoint.about import About
from xlashard.train.checkpoint.arrays import ArrayFiles
from xlashard.train.checkpoint.files import steps_in
from xlashard.train.checkpoint.reading import Reader
from xlashard.train.checkpoint.together import Together
from xlashard.train.checkpoint.writing import Writer
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
