"""Writing arrays to TensorStore: each process writes its shards with replica id 0."""

from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xlashard._jax.array_serialization import CHUNK_LAYOUT, TS_CONTEXT, tensorstore
from xlashard._jax.runtime.transfer import Tracer
from xlashard.core.array.array_class.base import check_alive, type_text
from xlashard.core.array.array_class.handles import is_key_array
from xlashard.core.array.placement.put import as_host_value
from xlashard.errors import ArgumentError, PlacementError, XlashardError
from xlashard.legacy.arrays.shards import Shard
from xlashard.legacy.serialization.tensorstore_specs import (
    Spec,
    as_list,
    gather_or_cancel,
    run_coroutine,
    spec_to_write,
    stored_at,
    write_error,
)
from xlashard.support.tracebacks import short_tracebacks


async def async_serialize(
    gda_inp: Any,
    tensorstore_spec: Any,
    commit_future: list[Any] | None = None,
    context: Any = TS_CONTEXT,
    *,
    chunk_layout: Any = CHUNK_LAYOUT,
    primary_host: int | None = None,
    replica_id: int = 0,
    transaction: Any = None,
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
        chunk_layout: The chunk layout, if the spec lacks one.
        primary_host: The process that writes the metadata; None for every process with a shard.
        replica_id: The replica id of the shards that are written.
        transaction: A TensorStore transaction in which to write.

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
        x = _checked(gda_inp, stored_at(tensorstore_spec))
        shards = _shards_to_write(x, replica_id)
        is_primary = bool(shards) if primary_host is None else jax.process_index() == primary_host
        for shard in shards:
            if isinstance(shard.data, jax.Array):
                shard.data.copy_to_host_async()
        if not shards and not is_primary:
            return
        try:
            spec = spec_to_write(tensorstore_spec, x)
            # An existing array must have the same type before a shard overwrites part of it.
            store = await tensorstore.open(
                tensorstore.Spec(spec),
                open=True,
                create=is_primary,
                assume_metadata=not is_primary,
                context=context,
                chunk_layout=chunk_layout,
                transaction=transaction,
            )
            unchanging = isinstance(x, jax.Array)
            writings = [_begin(store, shard, unchanging) for shard in shards]
            if commit_future is None:
                for writing in writings:
                    await writing.commit
                return
            commit_future += [WriteFuture(writing.commit, spec) for writing in writings]
            for writing in writings:
                # Awaiting a completed future costs a turn of the event loop per shard.
                if not writing.copy.done():
                    await writing.copy
        except XlashardError:
            raise
        except ValueError as error:
            raise write_error(error, tensorstore_spec) from None


def _begin(store: Any, shard: Any, unchanging: bool) -> Any:
    data = np.asarray(shard.data)
    return store[shard.index].write(data, can_reference_source_data_indefinitely=unchanging)


def _shards_to_write(x: Any, replica_id: int) -> list[Any]:
    """Return the shards that this process writes; of a host value, process 0 writes all."""
    if not isinstance(x, jax.Array):
        return [Shard(None, (), 0, x)] if jax.process_index() == 0 else []
    return [shard for shard in x.addressable_shards if shard.replica_id == replica_id]


def _checked(x: Any, where: str) -> Any:
    """Return an array, or a host value as a NumPy array, after checking that it can be written."""
    if isinstance(x, Tracer):
        raise ArgumentError(
            f"the value to write at {where!r} is a tracer: call async_serialize outside of jit, "
            "grad and vmap"
        )
    if not isinstance(x, jax.Array):
        return as_host_value(x, lambda: f"the value to write at {where!r}").value
    if is_key_array(x):
        raise ArgumentError(
            f"the value to write at {where!r} contains PRNG keys, which cannot be stored: write "
            "jax.random.key_data(keys), and call jax.random.wrap_key_data(...) after reading"
        )
    check_alive(x)
    if jax.process_count() > 1 and x.is_fully_addressable:
        raise PlacementError(  # no-catalogue: needs several processes
            f"the array {type_text(x)} to write at {where!r} is host-local, so every "
            "process would overwrite it: pass host_local_array_to_global_array(x, mesh, spec), or "
            "np.asarray(x) if it is equal in all processes"
        )
    return x


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
        run_coroutine(serialize_all(gdas, tensorstore_specs, commits))
        for commit in commits:
            commit.result()


async def serialize_all(
    gdas: Sequence[Any],
    specs: Sequence[Any],
    commit_futures: list[Any] | None,
    transaction: Any = None,
) -> None:
    """Write arrays concurrently; see `async_serialize`."""
    specs = as_list(specs, "tensorstore_specs")
    arrays = as_list(gdas, "gdas", len(specs))
    await gather_or_cancel(
        async_serialize(x, spec, commit_futures, transaction=transaction)
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
        with suppress(ValueError):
            yield from self.future.__await__()
        return self.result()
