"""Indexing and iterating: on the devices, and without a program where a shard is the answer."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Self

import jax

from xlashard._jax.tracebacks import shorten
from xlashard._jax.transfer import HandleType
from xlashard.array.forwarding import forwarding
from xlashard.array.guards import free_transfers
from xlashard.array.holder import Holder, check_alive, type_text
from xlashard.array.host import check_reduced
from xlashard.array.long_index import is_long, wide_integers, widened
from xlashard.array.nested import bare
from xlashard.array.results import as_arrays
from xlashard.array.shard_index import has_explicit_axes, rows_as_shards, whole_shard
from xlashard.errors import ArgumentError

# Rows that one program hands out: a program per row would pay its start for each, one for all
# rows of a long array would take minutes to compile.
_ROWS_AT_ONCE = 64


@partial(jax.jit, static_argnums=2)
def _rows(x: Any, start: Any, count: int) -> list[Any]:
    chunk = jax.lax.dynamic_slice_in_dim(x, start, count, axis=0)
    return [jax.lax.index_in_dim(chunk, i, axis=0, keepdims=False) for i in range(count)]


def _rows_uncut(handle: Any) -> Any:
    """The array with whole rows: on explicit axes JAX takes no row of a dimension that is cut."""
    sharding = handle.sharding
    entries = sharding.spec.partitions
    if entries[:1] in ((), (None,)):
        return handle
    whole_rows = sharding.update(spec=sharding.spec.update(partitions=(None, *entries[1:])))
    with free_transfers():
        return jax.device_put(handle, whole_rows)


_get_item = forwarding(HandleType.__getitem__, "indexing", None)


class Indexing(Holder):
    """`x[...]` and `for row in x`."""

    __slots__ = ()

    def __getitem__(self, index: Any, /) -> Self:
        handle = self._handle
        try:
            if not handle.is_fully_replicated:
                check_reduced(handle)
                shard = whole_shard(handle, index)
                if shard is not None:
                    return as_arrays(type(self), shard, ())
            if is_long(handle):
                with wide_integers(handle):
                    return _get_item(self, widened(bare(index)))
            return _get_item(self, index)
        except Exception as error:
            shorten(error)
            raise

    def __iter__(self) -> Iterator[Self]:
        return self._iterate(reverse=False)

    def __reversed__(self) -> Iterator[Self]:
        return self._iterate(reverse=True)

    def _iterate(self, *, reverse: bool) -> Iterator[Self]:
        check_alive(self)
        if not self.ndim:
            raise ArgumentError(
                f"iteration over an Array without dimensions, {type_text(self)}: for a loop of one "
                "round write x.ravel()"
            )
        check_reduced(self._handle)
        length = self.shape[0]
        starts = range(0, length, _ROWS_AT_ONCE)
        return self._chunks(reversed(starts) if reverse else starts, length, reverse)

    def _chunks(self, starts: Any, length: int, reverse: bool) -> Iterator[Self]:
        row_at = rows_as_shards(self._handle)
        if row_at is not None:
            for row in range(length - 1, -1, -1) if reverse else range(length):
                check_alive(self)
                yield as_arrays(type(self), row_at(row), ())
            return
        typed = _rows_uncut(self._handle) if has_explicit_axes(self._handle) else None
        for start in starts:
            check_alive(self)
            count = min(_ROWS_AT_ONCE, length - start)
            with free_transfers(), wide_integers(self._buffers):
                if typed is not None:
                    rows = [typed[i] for i in range(start, start + count)]
                else:
                    rows = _rows(self._handle, start, count)
            yield from as_arrays(type(self), rows[::-1] if reverse else rows, (self,))
