"""Writing arrays to TensorStore: each process writes its shards with replica id 0."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import jax
import numpy as np

from xlashard._jax.array_serialization import CHUNK_LAYOUT, TS_CONTEXT, tensorstore
from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard._jax.runtime.transfer import Tracer
from xlashard.array.core.base import check_alive
from xlashard.array.core.handles import is_key_array
from xlashard.array.placement.put import as_host_value
from xlashard.errors import ArgumentError, PlacementError, XlashardError
from xlashard.legacy.serialization.deserialize_args import as_list
from xlashard.legacy.serialization.tensorstore_specs import (
    Spec,
    gather_or_cancel,
    run_coroutine,
    spec_to_write,
    stored_at,
    write_error,
)
from xlashard.wording import typed


class WriteOptions(TypedDict, total=False):
    """Rarely used options of writing.

    Attributes:
        chunk_layout: The chunk layout, if the spec lacks one.
        primary_host: The process that writes the metadata; None for every process with a shard.
        replica_id: The replica id of the shards that are written.
        transaction: A TensorStore transaction in which to write.
    """

    chunk_layout: Any
    primary_host: int | None
    replica_id: int
    transaction: Any


@dataclass(frozen=True)
class _ShardToWrite:
    """Shard that this process writes.

    Attributes:
        index: The index of the shard.
        data: The data, on one device or in host memory.
    """

    index: tuple[slice, ...]
    data: Any


@dataclass(frozen=True)
class _Plan:
    """Plan of writing one array.

    Attributes:
        spec: The TensorStore spec, with metadata.
        pieces: The shards that this process writes.
        unchanging: True if the memory of the shards is immutable.
        options: The caller's options.
    """

    spec: Spec
    pieces: tuple[_ShardToWrite, ...]
    unchanging: bool
    options: WriteOptions

    @property
    def writes_metadata(self) -> bool:
        """True if this process writes the metadata."""
        primary = self.options.get("primary_host")
        return bool(self.pieces) if primary is None else jax.process_index() == primary


async def async_serialize(
    gda_inp: Any,
    tensorstore_spec: Any,
    commit_future: list[Any] | None = None,
    context: Any = TS_CONTEXT,
    **options: Unpack[WriteOptions],
) -> None:
    """Write one array.

    Every process that holds shards calls it and writes its own shards, each replica once.

    Args:
        gda_inp: An Array, a GlobalDeviceArray or an array of JAX. Of a host value, which must be
            equal in all processes, process 0 writes all.
        tensorstore_spec: `get_tensorstore_spec(path)`, or another TensorStore spec.
        commit_future: A list that receives futures; wait for them with `.result()`. The array may
            be deleted or donated when the call returns. Without it, the call waits itself.
        context: The TensorStore context, with limits and caches.
        **options: `chunk_layout`, `primary_host`, `replica_id`, `transaction`.

    Raises:
        SerializationError: The array cannot be written.
        PlacementError: There are several processes, and the array is fully addressable.
        ArgumentError: The value is not an array, is a tracer, or contains PRNG keys; or the spec
            is invalid.
        DeletedError: The array was deleted or donated.

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
        # An existing array must have the same type before a shard overwrites part of it.
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
            # Awaiting a completed future costs a turn of the event loop per shard.
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
        value = as_host_value(x, lambda: f"the value to write at {where!r}").value
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
            f"the value to write at {where!r} is a tracer: call async_serialize outside of jit, "
            "grad and vmap"
        )
    if not isinstance(x, jax.Array):
        return
    if is_key_array(x):
        raise ArgumentError(
            f"the value to write at {where!r} contains PRNG keys, which cannot be stored: write "
            "jax.random.key_data(keys), and call jax.random.wrap_key_data(...) after reading"
        )
    check_alive(x)
    if jax.process_count() > 1 and x.is_fully_addressable:
        raise PlacementError(  # no-catalogue: needs several processes
            f"the array {typed(x.dtype, x.shape)} to write at {where!r} is host-local, so every "
            "process would overwrite it: pass host_local_array_to_global_array(x, mesh, spec), or "
            "np.asarray(x) if it is equal in all processes"
        )


def run_serialization(gdas: Sequence[Any], tensorstore_specs: Sequence[Any]) -> None:
    """Write arrays concurrently, and wait until they are written.

    Args:
        gdas: A list of arrays, as for `async_serialize`.
        tensorstore_specs: A TensorStore spec for each array.

    Raises:
        SerializationError: An array cannot be written.
        ArgumentError: The lists differ in length.

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
    """Write arrays concurrently; see `async_serialize`."""
    specs = as_list(specs, "tensorstore_specs")
    arrays = as_list(gdas, "gdas", len(specs))
    await gather_or_cancel(
        async_serialize(x, spec, commit_futures, **options)
        for x, spec in zip(arrays, specs, strict=True)
    )


@dataclass(frozen=True, eq=False)
class WriteFuture:
    """TensorStore future whose errors name the array.

    Programs call `result()` in any thread, or await it.

    Attributes:
        future: The future of TensorStore.
        spec: The spec of the array.
    """

    future: Any
    spec: Spec

    def result(self, timeout: float | None = None) -> Any:
        """Wait until the array is written.

        Args:
            timeout: The timeout in seconds; None for no timeout.

        Raises:
            SerializationError: The array cannot be written.
            TimeoutError: The timeout elapsed.
        """
        try:
            return self.future.result(timeout=timeout)
        except ValueError as error:
            # no-catalogue: needs a storage that fails late
            raise write_error(error, self.spec) from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the array is written, and return its error; None on success."""
        error = self.future.exception(timeout=timeout)
        return write_error(error, self.spec) if isinstance(error, ValueError) else error

    def done(self) -> bool:
        """Return True once the array is written, or has failed."""
        return self.future.done()

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from self.future.__await__())
        except ValueError as error:
            # no-catalogue: needs a storage that fails late
            raise write_error(error, self.spec) from None
