"""Global arrays of the batches that each process's data loader yields."""

import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self, get_args

from xlashard.core.processes import checked_seconds
from xlashard.errors import ArgumentError
from xlashard.pods.multihost.batch_pipeline import BatchPipeline, BatchRequest
from xlashard.pods.multihost.host_batches import DataSource, read_host_batch
from xlashard.support.tracebacks import short_tracebacks

type LastBatch = Literal["drop", "pad"]


class GlobalBatches:
    """Iterator of global batches, made of those that each process's data loader yields.

    A background thread reads the batches of this process, makes global arrays of them
    (`make_array_from_process_local_data`) and puts them on the devices, while the program computes.
    All processes create one, each with its part of the data, and read as many batches; those with
    several read the first batch of each in the same order.

    The threads compare their batches through the coordination service, without devices: at the
    beginning positions, types, and the data of rows that several processes hold; for each batch
    its rows, and whether a process has ended or failed. All processes raise the same error, or
    end, before a collective waits for a missing process.

    Args:
        source: Iterable of this process's batches: of grain, `tf.data`, PyTorch or NumPy. A batch
            is a pytree of arrays `[rows, ...]`.
        sharding: Sharding of the global arrays, for all or as a pytree prefix of a batch.
        prefetch: Number of batches on the devices ahead of the program. 0: without a thread.
        last: With `"drop"`, a batch that is not full in each process is left out, and all end
            with the first one. With `"pad"`, batches are filled up with rows of zeros until all
            have ended; `next` returns the batch and a mask `[rows]`, True for rows of data.
        like: A full batch of this process, or its `jax.ShapeDtypeStruct`s; by default the first
            batch.
        global_shape: Shape of the global arrays, as in `make_array_from_process_local_data`.
        check_every: Number of batches that the processes compare at once, after each has read them
            into its host memory. 0: they compare nothing, and hang after one of them has ended.
        timeout: How long to wait for the batches of other processes, in seconds.

    Raises:
        ArgumentError: An argument is invalid; from `next`, a value that no device can hold.
        ProcessesError: From `next`, if positions or types differ, or another process failed.
        UnequalError: From `next`, if processes that hold the same rows have read other data.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import GlobalBatches, Mesh, NamedSharding, P
        >>> rows = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), P("data"))
        >>> loader = [{"x": np.arange(4)}, {"x": np.arange(3)}]
        >>> with GlobalBatches(loader, rows, last="pad") as batches:
        ...     for batch, mask in batches:
        ...         print(np.asarray(batch["x"]), int(batch["x"].sum(where=mask)))
        [0 1 2 3] 6
        [0 1 2 0] 3
    """

    def __init__(
        self,
        source: Iterable[Any],
        sharding: Any,
        *,
        prefetch: int = 2,
        last: LastBatch = "drop",
        like: Any = None,
        global_shape: Any = None,
        check_every: int = 1,
        timeout: float = 3600.0,
    ) -> None:
        with short_tracebacks:
            for name, value in (("prefetch", prefetch), ("check_every", check_every)):
                if not isinstance(value, int) or value < 0:
                    raise ArgumentError(
                        f"{name} of GlobalBatches is {value!r:.60}: write a number of batches, "
                        f"such as {name}=2"
                    )
            if last not in get_args(LastBatch.__value__):
                raise ArgumentError(
                    f"last of GlobalBatches is {last!r:.60}: write 'drop' or 'pad', for batches "
                    "that are not full"
                )
            self._request = BatchRequest(
                sharding,
                global_shape,
                last == "pad",
                None if like is None else read_host_batch(like, "like"),
                prefetch,
                check_every,
                checked_seconds(timeout, "GlobalBatches: timeout"),
            )
            self._request.list_shardings()
            self._source = DataSource(source)
        self._state: dict[str, Any] | None = None
        self._pipeline: BatchPipeline | None = None

    def __iter__(self) -> Self:
        """Return the iterator itself."""
        return self

    def __next__(self) -> Any:
        """Return the next global batch, with `last="pad"` a pair of it and its mask."""
        with short_tracebacks:
            if self._pipeline is None:
                self.get_state()  # The position before the thread reads on.
                self._pipeline = BatchPipeline(self._source, self._request)
                # The thread of an iterator that a loop has left ends with the iterator.
                weakref.finalize(self, self._pipeline.stop)
            ready = self._pipeline.take()
            if ready.warning:
                warnings.warn(ready.warning, RuntimeWarning, stacklevel=2)
            if ready.state is None:
                raise StopIteration  # no-catalogue: the end of the batches
            self._state = ready.state
            return ready.batch

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last batch that `next` has returned, in this process.

        Batches that were read ahead do not count. The state has the number of batches, and the
        state of a source with `get_state` and `set_state` (grain) or `state_dict` and
        `load_state_dict` (StatefulDataLoader of PyTorch). It is JSON if the source's state is.
        """
        with short_tracebacks:
            if self._state is None:
                self._state = self._source.get_state()
            return dict(self._state)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch of a state that `get_state` has returned in this process.

        A source without a state of its own is read from its beginning up to the position.

        Args:
            state: The state.

        Raises:
            ArgumentError: The state is invalid or of another process, or the source is an iterator
                that was read already.
        """
        with short_tracebacks:
            self.close()
            self._source.set_state(state)
            self._state, self._pipeline = dict(state), None

    def close(self) -> None:
        """End the thread, and drop the batches that were read ahead."""
        if self._pipeline is not None:
            self._pipeline.close()

    def __enter__(self) -> Self:
        """Return the iterator, which is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the iterator."""
        self.close()
