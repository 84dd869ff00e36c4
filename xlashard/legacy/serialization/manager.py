"""Asynchronous checkpoints that all processes commit together, or none."""

import json
import logging
import threading
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import jax

from xlashard._jax import array_serialization as door
from xlashard.core.array import Array
from xlashard.core.processes import RENDEZVOUS, Barrier, BarrierTimeoutError
from xlashard.errors import ArgumentError, DeadlockError, ProcessesError, SerializationError
from xlashard.legacy.serialization.array_writing import serialize_all
from xlashard.legacy.serialization.reading import deserialize_all
from xlashard.legacy.serialization.tensorstore_specs import run_coroutine
from xlashard.support.formatting import error_line, format_by_process
from xlashard.support.tracebacks import short_tracebacks

logger = logging.getLogger("xlashard.legacy")
"""Logger of failed checkpoints, for programs that never wait for them."""

# Managers write in the same order in all processes, so numbers match.
_numbers = count()
_WRITING, _COMMITTING = "writing a checkpoint", "committing a checkpoint"


class AsyncManager(door.AsyncManager):
    """Base class that waits in a thread for pending writes and for the other processes.

    Subclasses call `_add_futures(futures)`, then `_start_async_commit(on_commit_callback)`. Errors
    of this process are `SerializationError`s, those of others `ProcessesError`s.

    Args:
        timeout_secs: The timeout for the other processes, in seconds.
    """

    _series = ""

    def __init__(self, timeout_secs: float = 300) -> None:
        try:
            super().__init__(timeout_secs)
        except ValueError:
            raise ProcessesError(  # no-catalogue: needs processes without a coordinator
                f"this program has {jax.process_count()} processes but no coordination service: "
                "call jax.distributed.initialize() at its start",
                processes=(),
            ) from None

    def wait_until_finished(self) -> None:
        """Wait until all processes have written their shards and the checkpoint is committed.

        Raises:
            SerializationError: An array could not be written.
            ProcessesError: Another process failed, or timed out.
        """
        # The error comes from the thread of the commit, with its frames.
        with short_tracebacks:
            super().wait_until_finished()

    def _start_async_commit(self, on_commit_callback: Callable[[], None] | None) -> None:
        self._number()
        self._thread = threading.Thread(
            target=self._commit, args=(on_commit_callback,), name="checkpoint"
        )
        self._thread.start()

    def _number(self) -> None:
        """Number the manager, so that its barriers differ from those of other managers."""
        self._series = self._series or f"legacy checkpoints/{next(_numbers)}"

    def _commit(self, on_commit_callback: Callable[[], None] | None) -> None:
        """Wait for this process and the others; then process 0 commits."""
        error = _failure(self._wait_for_futures)
        error = self._sync(_WRITING, error)
        if error is None:
            if jax.process_index() == 0 and on_commit_callback is not None:
                error = _failure(on_commit_callback)
            error = self._sync(_COMMITTING, error)
        if error is not None:
            logger.warning("a checkpoint was not written: %s", error)
        self._exception = error

    def _wait_for_futures(self) -> None:
        futures, self._commit_futures = self._commit_futures or (), ()
        for future in futures:
            future.result()

    def _sync(self, what: str, own: BaseException | None) -> BaseException | None:
        """Wait for all processes, and return the error of this or another process."""
        processes = tuple(range(jax.process_count()))
        barrier = Barrier(processes, self._series, self._timeout_secs, what=what)
        try:
            reports = RENDEZVOUS.exchange(
                barrier, json.dumps("" if own is None else error_line(own, SerializationError))
            )
        except BarrierTimeoutError as missed:
            return own or ProcessesError(
                f"{what}: waited {self._timeout_secs:g} s, and {missed.missing('did not come')}. "
                "Look for its error, or increase "
                "GlobalAsyncCheckpointManager(timeout_secs=...)",
                processes=missed.processes,
            )
        except DeadlockError as error:
            return own or error
        failed = {
            process: json.loads(report) for process, report in reports.items() if report != '""'
        }
        if own is not None or not failed:
            return own
        return ProcessesError(
            f"{what} failed: {format_by_process(failed)}", processes=tuple(failed)
        )


def _failure(act: Callable[[], Any]) -> BaseException | None:
    try:
        act()
    except Exception as error:
        return error
    return None


class GlobalAsyncCheckpointManager(AsyncManager, door.CheckpointManager):
    """Asynchronous checkpoint manager that writes one checkpoint at a time.

    With several processes, each has a manager and calls its methods in the same order.

    Args:
        timeout_secs: The timeout for the other processes, in seconds.

    Raises:
        ProcessesError: There are several processes but no coordination service.

    Example:
        >>> import os, tempfile, numpy as np
        >>> from xlashard.legacy.serialization import (
        ...     GlobalAsyncCheckpointManager, get_tensorstore_spec,
        ... )
        >>> folder = tempfile.mkdtemp()
        >>> manager = GlobalAsyncCheckpointManager(timeout_secs=60)
        >>> manager.serialize(
        ...     [np.ones(4)],
        ...     [get_tensorstore_spec(f"{folder}/unfinished/w")],
        ...     on_commit_callback=lambda: os.rename(f"{folder}/unfinished", f"{folder}/step_1"),
        ... )
        >>> manager.wait_until_finished()
        >>> os.listdir(folder)
        ['step_1']
    """

    def serialize(
        self,
        gdas: Sequence[Any],
        tensorstore_specs: Sequence[Any],
        *,
        on_commit_callback: Callable[[], None] | None = None,
        temp_checkpoint_dir: str | None = None,
        final_checkpoint_dir: str | None = None,
        transaction: Any = None,
    ) -> None:
        """Start writing arrays, after waiting for the previous checkpoint.

        When it returns, the arrays may be deleted or donated.

        Args:
            gdas: A list of arrays, as for `async_serialize`.
            tensorstore_specs: A TensorStore spec for each array.
            on_commit_callback: Called in process 0 once all processes have written their shards.
            temp_checkpoint_dir: Instead of a callback, as in 2022: the folder of the arrays.
            final_checkpoint_dir: The folder to which `temp_checkpoint_dir` is renamed.
            transaction: A TensorStore transaction in which to write.

        Raises:
            SerializationError: This checkpoint or the previous one could not be written.
            ProcessesError: Another process failed.
            ArgumentError: The lists differ in length, or only one folder is given.
        """
        with short_tracebacks:
            commit = _commit_action(on_commit_callback, temp_checkpoint_dir, final_checkpoint_dir)
            self.wait_until_finished()
            futures: list[Any] = []
            try:
                run_coroutine(serialize_all(gdas, tensorstore_specs, futures, transaction))
            except Exception as error:
                self._report_failure(error)
                raise
            self._add_futures(futures)
            self._start_async_commit(commit)

    def _report_failure(self, error: Exception) -> None:
        """Report an error of this process to the processes that wait for it."""
        self._number()
        reporting = threading.Thread(target=self._sync, args=(_WRITING, error), name="checkpoint")
        reporting.start()
        reporting.join()

    def deserialize(self, *args: Any, **kwargs: Any) -> list[Array]:
        """Wait for the pending checkpoint, then read arrays; see `run_deserialization`."""
        with short_tracebacks:
            self.wait_until_finished()
            return deserialize_all("deserialize", args, kwargs)


def _commit_action(
    callback: Callable[[], None] | None, temporary: Any, final: Any
) -> Callable[[], None] | None:
    """Return the function that commits a checkpoint."""
    if temporary is None and final is None:
        return callback
    if temporary is None or final is None:
        raise ArgumentError(
            f"temp_checkpoint_dir={temporary!r} and final_checkpoint_dir={final!r}: pass both, or "
            "on_commit_callback=lambda: os.rename(temporary, final)"
        )

    def rename() -> None:
        # Object stores cannot rename: programs write to the final folder directly.
        if str(temporary) != str(final):
            if door.is_remote_storage(str(temporary)):
                raise SerializationError(
                    f"{temporary!r} cannot be renamed to {final!r}, because an object store has no "
                    "folders: pass final_checkpoint_dir for both",
                    stored_at=str(temporary),
                )
            Path(temporary).rename(final)
        if callback is not None:
            callback()

    return rename
