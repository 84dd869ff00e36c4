"""Arrays of a checkpoint, written and read with orbax, whose logs of failed saves stay silent."""

import asyncio.base_events
import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl.logging import get_absl_logger

from xlashard import Array, device_put
from xlashard.train.checkpoint.process_sync import (
    MissingProcessError,
    OthersFailedError,
    ProcessSync,
    find_reason,
)
from xlashard.train.stores import make_absolute

SAVING = ".saving-"
"""Beginning of the name of a folder that is being written."""

_ORBAX = Path(ocp.__file__).parent
# Bytes. Orbax cuts replicated arrays into slices, one for each replica to write. Every shape and
# offset of a slice is a program, and small slices take longer to compile than to write.
_LEAST_SLICE = 2**20
_BASE_EVENTS = asyncio.base_events.__file__
# Loggers of orbax, and of its concurrent writes that continue after a failed one.
_LOGGERS = (get_absl_logger(), logging.getLogger("asyncio"))


class ArrayFiles:
    """Reader and writer of the arrays of a state; a context manager.

    The caller provides atomicity, digests and one folder per step.

    Args:
        timeout: Timeout of barriers in seconds.
    """

    def __init__(self, timeout: float) -> None:
        self._sync = ProcessSync("arrays", timeout)
        # With explicit processes orbax uses barriers instead of a collective of all devices.
        self._processes = ocp.options.MultiprocessingOptions(
            active_processes=set(range(jax.process_count()))
        )
        self._background = ocp.options.AsyncOptions(
            timeout_secs=max(int(timeout), 1), barrier_sync_fn=self._barrier
        )
        self._saving: ocp.AsyncCheckpointer | None = None
        self._failed = False
        self._log_filter = _OrbaxLogFilter()

    def __enter__(self) -> Self:
        for logger in _LOGGERS:
            logger.addFilter(self._log_filter)
        _LATE_WRITES.install()
        return self

    def __exit__(self, *_: object) -> None:
        if self._failed:
            gc.collect()  # asyncio logs failed tasks when they are collected.
        else:
            _LATE_WRITES.uninstall()
        for logger in _LOGGERS:
            logger.removeFilter(self._log_filter)

    def save(self, folder: Path, state: Any) -> None:
        """Begin to write a state; afterwards its buffers may be donated.

        Args:
            folder: Folder to create.
            state: Tree of arrays.
        """
        try:
            # One per save: after a failure a checkpointer raises the same error at later saves.
            self._saving = self._checkpointer(**_make_handlers(state))
            args = ocp.args.PyTreeSave(_drop_empty_arrays(state))
            self._saving.save(make_absolute(folder), args=args)
        except Exception as error:
            self._saving = None
            self._report_failure(error)
            raise

    def wait(self) -> None:
        """Wait until all processes have written their shards.

        Raises:
            OthersFailedError: Another process failed.
            Exception: This process failed.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.close()
        except Exception as error:
            self._report_failure(error)
            raise

    def restore(self, folder: Path, like: Any) -> Any:
        """Read a state.

        Args:
            folder: Folder of the saved state.
            like: Tree of shapes, dtypes and shardings.

        Returns:
            The same tree of Arrays.
        """
        item = _drop_empty_arrays(like)
        shardings = jax.tree.map(lambda x: x.sharding, item)
        restored_as = ocp.checkpoint_utils.construct_restore_args(item, shardings)
        args = ocp.args.PyTreeRestore(item, restore_args=restored_as)
        with self._checkpointer() as checkpointer:
            read = checkpointer.restore(make_absolute(folder), args=args)
        leaves, tree = jax.tree.flatten(like)
        return tree.unflatten(map(_place_restored, leaves, tree.flatten_up_to(read)))

    def _checkpointer(self, **handlers: Any) -> ocp.AsyncCheckpointer:
        return ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(multiprocessing_options=self._processes, **handlers),
            async_options=self._background,
            multiprocessing_options=self._processes,
        )

    def _report_failure(self, error: Exception) -> None:
        """Report a failure to the processes that wait at orbax's next barrier."""
        self._failed = True
        if not isinstance(error, OthersFailedError | MissingProcessError):
            self._sync.exchange("writing", find_reason(error))

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        result = self._sync.exchange("writing")
        if result.problems:
            raise OthersFailedError(str(result))


def _make_handlers(state: Any) -> dict[str, Any]:
    """Return the handlers of a state's arrays, as keywords; none for a state with random keys.

    Only orbax's default handler stores the kind of random keys.
    """
    if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state)):
        return {}
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_LEAST_SLICE)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return {"type_handler_registry": registry}


def _drop_empty_arrays(tree: Any) -> Any:
    """Replace arrays of size zero, which orbax rejects, by None."""
    return jax.tree.map(lambda x: x if x.size else None, tree)


def _place_restored(shape: jax.ShapeDtypeStruct, read: Any) -> Array:
    if read is None:
        read = np.zeros(shape.shape, shape.dtype)
    return device_put(read, shape.sharding)


def is_saving(threads: Iterable[threading.Thread]) -> bool:
    """Return True while some threads are of a failed save: they wait for minutes in vain.

    Orbax creates folders in an object store beside the save, and waits for them in threads.
    """
    return any(type(thread).__module__.startswith("orbax.") for thread in threads)


class _OrbaxLogFilter(logging.Filter):
    """Filter that drops orbax's log records; errors are raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True for a record of other loggers."""
        if _ORBAX in Path(record.pathname).parents:
            return False
        return record.name != "asyncio" or SAVING not in record.getMessage()


class _LateWriteFilter(logging.Filter):
    """Filter of errors of writes that continue after a failed one, when their event loop is closed.

    TensorStore prints thousands of tracebacks before the one error that is raised. After a failure
    the hook stays, since the threads of TensorStore and orbax may outlive the save.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: Callable[[Any], Any] = sys.__unraisablehook__

    def install(self) -> None:
        """Install the hook for unraisable errors, and the filter of logs of failed saves."""
        if sys.unraisablehook != self.report:
            self._before, sys.unraisablehook = sys.unraisablehook, self.report
            for logger in _LOGGERS:
                logger.addFilter(self)

    def uninstall(self) -> None:
        """Restore the previous hook, unless another one was installed since."""
        if sys.unraisablehook == self.report:
            sys.unraisablehook = self._before
            for logger in _LOGGERS:
                logger.removeFilter(self)

    def report(self, unraisable: Any) -> None:
        """Report an unraisable error, unless a late write caused it."""
        error, place = unraisable.exc_value, unraisable.exc_traceback
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        is_asyncios = place is not None and place.tb_frame.f_code.co_filename == _BASE_EVENTS
        if type(error) is RuntimeError and unraisable.object is None and is_asyncios:
            return
        self._before(unraisable)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True for a record that is not about a save."""
        return SAVING not in record.getMessage()


_LATE_WRITES = _LateWriteFilter()
