"""Checkpoints that are written while the program goes on: whole in all processes, or an error."""

import json
import logging
import threading
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import jax

from xlashard import Array
from xlashard._jax import coordination
from xlashard._jax.serialization import ManagerBase, is_remote_storage
from xlashard._jax.tracebacks import short_tracebacks
from xlashard.errors import ArgumentError, DeadlockError, ProcessesError, SerializationError
from xlashard.legacy.serialization.event_loop import run_coroutine
from xlashard.legacy.serialization.reading import deserialize_all
from xlashard.legacy.serialization.tensorstore_specs import get_tensorstore_spec
from xlashard.legacy.serialization.writing import serialize_all
from xlashard.processes import RENDEZVOUS, Barrier, BarrierTimeoutError

logger = logging.getLogger("xlashard.legacy")
"""Says what a program that never waits for its checkpoint would not hear."""

# Managers that write do so in the same order in all processes.
_numbers = count()
_WRITING, _COMMITTING = "writing a checkpoint", "committing a checkpoint"


class AsyncManager:
    """Waits, in a thread, for what is being written, and for the other processes.

    Programs derive from it: `_add_futures(futures)`, whose `result()` is waited for, then
    `_start_async_commit(on_commit_callback)`.

    Args:
        timeout_secs: How long a process that is done waits for the others, in seconds.
    """

    def __init__(self, timeout_secs: float = 300) -> None:
        if jax.process_count() > 1 and coordination.client() is None:
            raise ProcessesError(  # no-catalogue: needs processes without a coordinator
                f"this is one of {jax.process_count()} processes that can't hear of each other: "
                "call jax.distributed.initialize() at the start of the program",
                processes=(),
            )
        self._timeout_secs = timeout_secs
        self._commit_futures: Sequence[Any] = ()
        self._thread: threading.Thread | None = None
        self._exception: BaseException | None = None
        self._series = ""

    def check_for_errors(self) -> None:
        """Raises what went wrong meanwhile, once; it waits for nothing.

        Raises:
            SerializationError: Something could not be written.
            ProcessesError: Another process failed, or did not come.
        """
        error, self._exception = self._exception, None
        if error is not None:
            raise error  # no-catalogue: raises an error of JAX or of the caller again

    def wait_until_finished(self) -> None:
        """Returns when all processes have written what they were given, and it is committed.

        Raises:
            SerializationError: Something could not be written.
            ProcessesError: Another process failed, or did not come.
        """
        with short_tracebacks:
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            self.check_for_errors()

    def _add_futures(self, futures: Sequence[Any]) -> None:
        self._commit_futures = futures

    def _start_async_commit(self, on_commit_callback: Callable[[], None] | None) -> None:
        self._number()
        self._thread = threading.Thread(
            target=self._commit, args=(on_commit_callback,), name="checkpoint"
        )
        self._thread.start()

    def _number(self) -> None:
        """Tells its meetings from those of other managers, alike in all processes."""
        self._series = self._series or f"legacy checkpoints/{next(_numbers)}"

    def _commit(self, on_commit_callback: Callable[[], None] | None) -> None:
        """Waits for this process, then for the others; then the first process commits."""
        error = _failure(self._wait_for_futures)
        error = self._heard(_WRITING, error)
        if error is None:
            if jax.process_index() == 0 and on_commit_callback is not None:
                error = _failure(on_commit_callback)
            error = self._heard(_COMMITTING, error)
        if error is not None:
            logger.warning("a checkpoint was not written: %s", error)
        self._exception = error

    def _wait_for_futures(self) -> None:
        futures, self._commit_futures = self._commit_futures, ()
        for future in futures:
            future.result()

    def _heard(self, what: str, own: BaseException | None) -> BaseException | None:
        """Why it failed, here or in another process, once all are as far as this one."""
        everybody = tuple(range(jax.process_count()))
        invitation = Barrier(everybody, self._series, self._timeout_secs, what=what)
        try:
            came = RENDEZVOUS.exchange(
                invitation, json.dumps("" if own is None else _first_line(own))
            )
        except BarrierTimeoutError as missed:
            text = f"{what}: waited {self._timeout_secs:g} s, and {missed}"
            doing = f" ({missed.doing})" if missed.doing else ""
            return own or ProcessesError(
                f"{text}{doing}. See what became of it, or give "
                "GlobalAsyncCheckpointManager(timeout_secs=...) more time",
                processes=missed.processes,
            )
        except DeadlockError as error:
            return own or error
        failed = {process: json.loads(said) for process, said in came.items() if said != '""'}
        if own is not None or not failed:
            return own
        told = "; ".join(f"process {process}: {text}" for process, text in failed.items())
        return ProcessesError(f"{what} failed: {told}", processes=tuple(failed))


def _failure(act: Callable[[], Any]) -> BaseException | None:
    try:
        act()
    except Exception as error:
        return error
    return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return text if isinstance(error, SerializationError) else f"{type(error).__name__}: {text}"


class GlobalAsyncCheckpointManager(AsyncManager, ManagerBase):
    """Writes arrays while the program goes on; one checkpoint at a time.

    In several processes all of them have one, and call its methods in the same order.

    Args:
        timeout_secs: How long a process that has written its part waits for the others, in
            seconds.

    Raises:
        ProcessesError: One of several processes that can't hear of each other.

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
        """Begins to write arrays; waits for the checkpoint before this one first.

        When it returns, the arrays may be deleted or donated.

        Args:
            gdas: As for `async_serialize`: a list, not a tree.
            tensorstore_specs: Where to, one for each.
            on_commit_callback: Is called in the first process when all have written all.
            temp_checkpoint_dir: As until 2022, in place of a callback: the folder of the arrays,
            final_checkpoint_dir: and what it is renamed to when all have written all.
            transaction: One of TensorStore's, in which to write.

        Raises:
            SerializationError: The checkpoint before this one could not be written; or this one.
            ProcessesError: The same in another process.
            ArgumentError: Lists of different lengths, or none; one folder without the other.
        """
        with short_tracebacks:
            commit = _commit_action(on_commit_callback, temp_checkpoint_dir, final_checkpoint_dir)
            self.wait_until_finished()
            futures: list[Any] = []
            try:
                options: Any = {"transaction": transaction}
                run_coroutine(serialize_all(gdas, tensorstore_specs, futures, options))
            except Exception as error:
                self._tell_others(error)
                raise
            self._add_futures(futures)
            self._start_async_commit(commit)

    def _tell_others(self, error: Exception) -> None:
        """Lets those who wait for this process hear why it doesn't come."""
        self._number()
        telling = threading.Thread(target=self._heard, args=(_WRITING, error), name="checkpoint")
        telling.start()
        telling.join()

    def serialize_with_paths(
        self,
        arrays: Sequence[Any],
        paths: Sequence[str],
        *,
        on_commit_callback: Callable[[], None] | None = None,
        transaction: Any = None,
    ) -> None:
        """As `serialize`, to the folders of these paths."""
        self.serialize(
            arrays,
            [get_tensorstore_spec(path) for path in paths],
            on_commit_callback=on_commit_callback,
            transaction=transaction,
        )

    def deserialize(self, *args: Any, **kwargs: Any) -> list[Array]:
        """Waits for the checkpoint that is being written, and reads; see `run_deserialization`."""
        with short_tracebacks:
            self.wait_until_finished()
            return deserialize_all("deserialize", args, kwargs)

    def deserialize_with_paths(
        self, shardings: Sequence[Any], paths: Sequence[str], *args: Any, **kwargs: Any
    ) -> list[Array]:
        """As `deserialize`, from the folders of these paths."""
        specs = [get_tensorstore_spec(path) for path in paths]
        return self.deserialize(shardings, specs, *args, **kwargs)


def _commit_action(
    callback: Callable[[], None] | None, temporary: Any, final: Any
) -> Callable[[], None] | None:
    """What commits a checkpoint."""
    if temporary is None and final is None:
        return callback
    if temporary is None or final is None:
        raise ArgumentError(
            f"temp_checkpoint_dir={temporary!r}, final_checkpoint_dir={final!r}: give both, or "
            "on_commit_callback=lambda: os.rename(temporary, final)"
        )

    def rename() -> None:
        # Stores of objects have no rename: there programs write to the final folder at once.
        if str(temporary) != str(final):
            if is_remote_storage(str(temporary)):
                raise SerializationError(
                    f"{temporary!r} can't be renamed to {final!r}, for a store of objects has no "
                    "folders: give final_checkpoint_dir for both",
                    stored_at=str(temporary),
                )
            Path(temporary).rename(final)
        if callback is not None:
            callback()

    return rename
