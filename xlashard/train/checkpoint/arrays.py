"""The arrays of a checkpoint, written and read by orbax."""

import asyncio.base_events
import errno
import gc
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl.logging import get_absl_logger

from xlashard import Array, device_put
from xlashard.train.checkpoint.files import SAVING
from xlashard.train.checkpoint.sync import AbsentError, Together
from xlashard.train.errors import CheckpointError

_ORBAX = Path(ocp.__file__).parent
# The system's numbers for a disk, a quota or a file that can't grow, whichever file it was.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BASE_EVENTS = asyncio.base_events.__file__
# Where orbax writes its log, and where its writes that went on beside a failed one end up.
_LOGGERS = (get_absl_logger(), logging.getLogger("asyncio"))


class ArrayFiles:
    """Writes and reads the arrays of a state; a context manager.

    Nothing here is atomic, digested or kept apart by steps: that is the caller's.

    Args:
        timeout: How long processes wait for each other, in seconds.
    """

    def __init__(self, timeout: float) -> None:
        self._together = Together("arrays", timeout)
        # The processes said by number: else orbax meets by a collective of all devices.
        self._processes = ocp.options.MultiprocessingOptions(
            active_processes=set(range(jax.process_count()))
        )
        self._background = ocp.options.AsyncOptions(
            timeout_secs=max(int(timeout), 1), barrier_sync_fn=self._barrier
        )
        self._saving: ocp.AsyncCheckpointer | None = None
        self._failed = False
        self._quiet = _Quiet()

    def __enter__(self) -> Self:
        for logger in _LOGGERS:
            logger.addFilter(self._quiet)
        _LATE.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._failed:
            gc.collect()  # asyncio logs what became of tasks when they are collected.
        else:
            _LATE.uninstall()
        for logger in _LOGGERS:
            logger.removeFilter(self._quiet)

    def save(self, folder: Path, state: Any) -> None:
        """Begins to write a state; when it returns, the state's buffers may be overwritten.

        Args:
            folder: Is made.
            state: A tree of arrays.
        """
        # One for each save: after a failure it keeps errors, and raises them at later saves.
        self._saving = self._checkpointer()
        args = ocp.args.StandardSave(_with_elements(state))
        try:
            self._saving.save(folder.absolute(), args=args)
        except Exception as error:
            self._saving = None
            self._tell(error)
            raise

    def wait(self) -> None:
        """Waits until all processes have written their parts.

        Raises:
            OthersFailedError: Another process could not.
            Exception: Of any kind; this one could not.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.close()
        except Exception as error:
            self._tell(error)
            raise

    def restore(self, folder: Path, like: Any) -> Any:
        """Reads a state.

        Args:
            folder: Where it was saved.
            like: A tree of shapes, dtypes and shardings.

        Returns:
            The same tree of Arrays.
        """
        args = ocp.args.StandardRestore(_with_elements(like))
        with self._checkpointer() as checkpointer:
            read = checkpointer.restore(folder.absolute(), args=args)
        leaves, tree = jax.tree.flatten(like)
        return tree.unflatten(map(_as_asked, leaves, tree.flatten_up_to(read)))

    def _checkpointer(self) -> ocp.AsyncCheckpointer:
        return ocp.AsyncCheckpointer(
            ocp.StandardCheckpointHandler(multiprocessing_options=self._processes),
            async_options=self._background,
            multiprocessing_options=self._processes,
        )

    def _tell(self, error: Exception) -> None:
        """Tells of a failure those who wait for this process at orbax's next barrier."""
        self._failed = True
        if not isinstance(error, OthersFailedError | AbsentError):
            self._together.hear("writing", reason(error))

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        heard = self._together.hear("writing")
        if heard.problems:
            raise OthersFailedError(str(heard))


def _with_elements(tree: Any) -> Any:
    """A tree with None for what orbax refuses: an array of size zero, of which nothing is kept."""
    return jax.tree.map(lambda x: x if x.size else None, tree)


def _as_asked(wanted: jax.ShapeDtypeStruct, read: Any) -> Array:
    if read is None:
        read = np.zeros(wanted.shape, wanted.dtype)
    return device_put(read, wanted.sharding)


class OthersFailedError(CheckpointError):
    """Another process could not write its part."""


class _Quiet(logging.Filter):
    """Keeps orbax's log from the terminal: what matters of it is raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is somebody else's."""
        if _ORBAX in Path(record.pathname).parents:
            return False
        return record.name != "asyncio" or SAVING not in record.getMessage()


class _LateWrites(logging.Filter):
    """Drops reports of writes that go on beside a failed one, when their event loop is closed.

    TensorStore prints a traceback for each, thousands, before the one error that is raised. After a
    failure the hook stays, since the threads of TensorStore and orbax may outlive the save.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: Callable[[Any], Any] = sys.__unraisablehook__

    def install(self) -> None:
        """Filter the reports of errors that nothing can raise, and the logs of failed saves."""
        if sys.unraisablehook != self.report:
            self._before, sys.unraisablehook = sys.unraisablehook, self.report
            for logger in _LOGGERS:
                logger.addFilter(self)

    def uninstall(self) -> None:
        """Put the hook back that was there, unless another one came since."""
        if sys.unraisablehook == self.report:
            sys.unraisablehook = self._before
            for logger in _LOGGERS:
                logger.removeFilter(self)

    def report(self, unraisable: Any) -> None:
        """Report an error as before, unless it is of a late write."""
        error, place = unraisable.exc_value, unraisable.exc_traceback
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        is_asyncios = place is not None and place.tb_frame.f_code.co_filename == _BASE_EVENTS
        if type(error) is RuntimeError and unraisable.object is None and is_asyncios:
            return
        self._before(unraisable)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is not of a save."""
        return SAVING not in record.getMessage()


_LATE = _LateWrites()


def reason(error: BaseException) -> str:
    """The part of an error's text that is for people: its first line, without specifications."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    kind = type(error).__name__
    lines = str(error).strip().splitlines()
    if not lines:
        return kind
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code and int(code[1]) in _FULL:
        return os.strerror(int(code[1]))
    text = lines[0].partition(" [tensorstore_spec=")[0]
    # Those of TensorStore are ValueErrors, and say themselves what kind they are.
    return text if isinstance(error, ValueError | CheckpointError) else f"{kind}: {text}"
