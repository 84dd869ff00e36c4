"""Arrays to files: each process writes the pieces that it holds and that are the first copies."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import jax
import numpy as np

from xlashard._jax.serialization import CHUNK_LAYOUT, TS_CONTEXT, tensorstore
from xlashard._jax.tracebacks import short_tracebacks
from xlashard._jax.transfer import Tracer
from xlashard.array.holder import check_alive
from xlashard.array.host_put import as_host_value
from xlashard.array.keys import is_key_array
from xlashard.errors import ArgumentError, PlacementError, XlashardError
from xlashard.legacy.serialization.deserialize_args import as_list
from xlashard.legacy.serialization.event_loop import gather_or_cancel, run_coroutine
from xlashard.legacy.serialization.tensorstore_specs import (
    Spec,
    spec_to_write,
    stored_at,
    write_error,
)
from xlashard.wording import typed


class WriteOptions(TypedDict, total=False):
    """What few programs say of writing.

    Attributes:
        chunk_layout: How to cut an array, where the spec doesn't say.
        primary_host: The one process that writes what is beside the pieces; None for each that
            has a piece.
        replica_id: Which copies are written, where there are several.
        transaction: One of TensorStore's, in which to write.
    """

    chunk_layout: Any
    primary_host: int | None
    replica_id: int
    transaction: Any


@dataclass(frozen=True)
class _ShardToWrite:
    """A part of an array that this process writes.

    Attributes:
        index: Which part.
        data: On one device, or in the host's memory.
    """

    index: tuple[slice, ...]
    data: Any


@dataclass(frozen=True)
class _Plan:
    """What is to be written of one array.

    Attributes:
        spec: Where to, with metadata.
        pieces: What this process writes.
        unchanging: Whether nobody will write to the memory of the pieces.
        options: What the caller says besides.
    """

    spec: Spec
    pieces: tuple[_ShardToWrite, ...]
    unchanging: bool
    options: WriteOptions

    @property
    def writes_metadata(self) -> bool:
        """Whether this process writes what is beside the pieces."""
        primary = self.options.get("primary_host")
        return bool(self.pieces) if primary is None else jax.process_index() == primary


async def async_serialize(
    gda_inp: Any,
    tensorstore_spec: Any,
    commit_future: list[Any] | None = None,
    context: Any = TS_CONTEXT,
    **options: Unpack[WriteOptions],
) -> None:
    """Writes one array.

    All processes that hold pieces of it call this, and each writes its own, copies once.

    Args:
        gda_inp: An Array, a GlobalDeviceArray or an array of JAX; of a value on the host, the same
            in all processes, the first process writes all.
        tensorstore_spec: Where to: `get_tensorstore_spec(path)`, or another spec of TensorStore's.
        commit_future: Takes what is still to be waited for, by `.result()`. The array may be
            deleted or donated when this returns. Without it, all is written by then.
        context: TensorStore's limits and caches.
        **options: `chunk_layout`, `primary_host`, `replica_id`, `transaction`.

    Raises:
        SerializationError: It can't be written there.
        PlacementError: In one of several processes: an array of this process alone.
        ArgumentError: No array, a traced one, or keys; no spec.
        DeletedError: A deleted array.

    Example:
        >>> import asyncio, tempfile, numpy as np
        >>> from xlashard.legacy.serialization import async_serialize, get_tensorstore_spec
        >>> spec = get_tensorstore_spec(tempfile.mkdtemp() + "/w")
        >>> asyncio.run(async_serialize(np.arange(4), spec))
    """
    with short_tracebacks:
        await _serialize(_plan(gda_inp, tensorstore_spec, options), commit_future, context)


async def _serialize(plan: _Plan, commits: list[Any] | None, context: Any) -> None:
    for piece in plan.pieces:
        if isinstance(piece.data, jax.Array):
            piece.data.copy_to_host_async()
    if not plan.pieces and not plan.writes_metadata:
        return
    try:
        # What is there already must be of this type before a piece of it is written over.
        store = await tensorstore.open(
            tensorstore.Spec(plan.spec),
            open=True,
            create=plan.writes_metadata,
            assume_metadata=not plan.writes_metadata,
            context=context,
            chunk_layout=plan.options.get("chunk_layout", CHUNK_LAYOUT),
            transaction=plan.options.get("transaction"),
        )
        writings = [_begin(store, piece, plan) for piece in plan.pieces]
        if commits is None:
            for writing in writings:
                await writing.commit
            return
        commits += [WriteFuture(writing.commit, plan.spec) for writing in writings]
        for writing in writings:
            # To await what is done already costs a turn of the loop, for each of many pieces.
            if not writing.copy.done():
                await writing.copy
    except XlashardError:
        raise
    except ValueError as error:
        raise write_error(error, plan.spec) from None


def _begin(store: Any, piece: _ShardToWrite, plan: _Plan) -> Any:
    data = np.asarray(piece.data)
    return store[piece.index].write(data, can_reference_source_data_indefinitely=plan.unchanging)


def _plan(x: Any, given: Any, options: WriteOptions) -> _Plan:
    where = stored_at(given)
    _check(x, where)
    if not isinstance(x, jax.Array):
        value = as_host_value(x, lambda: f"what is to be written at {where!r}").value
        whole = (_ShardToWrite((), value),) if jax.process_index() == 0 else ()
        return _Plan(spec_to_write(given, value), whole, unchanging=False, options=options)
    pieces = tuple(
        _ShardToWrite(shard.index, shard.data)
        for shard in x.addressable_shards
        if shard.replica_id == options.get("replica_id", 0)
    )
    return _Plan(spec_to_write(given, x), pieces, unchanging=True, options=options)


def _check(x: Any, where: str) -> None:
    if isinstance(x, Tracer):
        raise ArgumentError(
            f"what is to be written at {where!r} is traced, and only known values can be: call "
            "async_serialize outside of jit, grad and vmap"
        )
    if not isinstance(x, jax.Array):
        return
    if is_key_array(x):
        raise ArgumentError(
            f"what is to be written at {where!r} are keys, which no file can hold: write "
            "jax.random.key_data(keys), and jax.random.wrap_key_data(...) of what is read"
        )
    check_alive(x)
    if jax.process_count() > 1 and x.is_fully_addressable:
        raise PlacementError(  # no-catalogue: needs several processes
            f"the array {typed(x.dtype, x.shape)} that is to be written at {where!r} is on the "
            "devices of this process alone, and each process would write another one there: write "
            "host_local_array_to_global_array(x, mesh, spec), or np.asarray(x) if all have the same"
        )


def run_serialization(gdas: Sequence[Any], tensorstore_specs: Sequence[Any]) -> None:
    """Writes arrays, all at the same time, and returns when they are written.

    Args:
        gdas: As for `async_serialize`: a list, not a tree.
        tensorstore_specs: Where to, one for each.

    Raises:
        SerializationError: One can't be written.
        ArgumentError: Lists of different lengths, or none.

    Example:
        >>> import tempfile, numpy as np
        >>> from xlashard.legacy.serialization import get_tensorstore_spec, run_serialization
        >>> folder = tempfile.mkdtemp()
        >>> specs = [get_tensorstore_spec(f"{folder}/{name}") for name in ("w", "b")]
        >>> run_serialization([np.ones((2, 2)), np.zeros(2)], specs)
    """
    with short_tracebacks:
        commits: list[WriteFuture] = []
        run_coroutine(serialize_all(gdas, tensorstore_specs, commits, {}))
        for commit in commits:
            commit.result()


async def serialize_all(
    gdas: Sequence[Any],
    specs: Sequence[Any],
    commit_futures: list[Any] | None,
    options: WriteOptions,
) -> None:
    """Writes arrays at the same time; see `async_serialize`."""
    specs = as_list(specs, "tensorstore_specs")
    arrays = as_list(gdas, "gdas", len(specs))
    await gather_or_cancel(
        async_serialize(x, spec, commit_futures, **options)
        for x, spec in zip(arrays, specs, strict=True)
    )


@dataclass(frozen=True, eq=False)
class WriteFuture:
    """A future of TensorStore whose errors say which array they are about.

    Programs call `result()` of it, in any thread, or await it.

    Attributes:
        future: TensorStore's.
        spec: Where the array is stored.
    """

    future: Any
    spec: Spec

    def result(self, timeout: float | None = None) -> Any:
        """Waits until it is written.

        Args:
            timeout: For how long, in seconds; None for as long as it takes.

        Raises:
            SerializationError: It can't be written.
            TimeoutError: It took longer.
        """
        try:
            return self.future.result(timeout=timeout)
        except ValueError as error:
            # no-catalogue: needs a storage that fails late
            raise write_error(error, self.spec) from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits until it is written: why it could not be; None if it is."""
        error = self.future.exception(timeout=timeout)
        return write_error(error, self.spec) if isinstance(error, ValueError) else error

    def done(self) -> bool:
        """Whether it is written, or can't be."""
        return self.future.done()

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from self.future.__await__())
        except ValueError as error:
            # no-catalogue: needs a storage that fails late
            raise write_error(error, self.spec) from None
