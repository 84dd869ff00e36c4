"""`ArrayBase`: the slots of an `Array` and the properties that read its buffers."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xlashard._jax.runtime.transfer import Handle, HandleType, deleted_like, lacks_buffer
from xlashard.core.array.array_class.deletion import (
    SHARD,
    describe_deleted,
    list_arrays_with_shard,
    shards_lock,
)
from xlashard.core.sharding import Sharding
from xlashard.errors import ArgumentError, DeletedError
from xlashard.support.formatting import typed

# Slots that may be unset; an unset slot reads as None.
_OPTIONAL = frozenset(
    {"_exclusive", "_exposed", "_own_sharding", "_shards_or_cause", "_value_cache"}
)


class ArrayBase(jax.Array):
    """Base class with one buffer handle.

    Attributes:
        _buffers: The buffers, under a sharding of JAX; unset while `_exposed` has several shards.
        _handle: The same; code that reads it may pass them to other arrays.
        _exclusive: True while no other array can share the buffers: from the end of the program
            that computed them until `_handle` is read. The mark of a call that began to donate them
            stands for True as well.
        _exposed: The handle, if code outside of this package has it and can delete its shards.
        _own_sharding: The sharding by which the caller placed the array, or that of its buffers,
            once read.
        _shards_or_cause: The list of shards, once read; of a deleted array `_deleted_by`. One slot
            for both, so that no array grows and the end of an array is the end of its list.
        _value_cache: The value on the host, once read.
    """

    # Reading an unset slot takes 2 µs, setting one 8 ns: results of programs have those set that
    # are read on most of them, other arrays all.
    __slots__ = (
        "__weakref__",
        "_buffers",
        "_exclusive",
        "_exposed",
        "_own_sharding",
        "_shards_or_cause",
        "_value_cache",
    )

    _buffers: Handle
    _exclusive: object

    _exposed: Handle | None
    _own_sharding: Sharding | None
    _shards_or_cause: Any
    _value_cache: Any

    @property
    def _deleted_by(self) -> str | None:
        """The callable that the array was donated to, or `DELETE`."""
        kept = self._shards_or_cause
        return None if type(kept) is list else kept

    @_deleted_by.setter
    def _deleted_by(self, cause: str | None) -> None:
        with shards_lock:
            self._shards_or_cause = cause

    def _keep_shards(self, shards: list[Any]) -> list[Any]:
        """Keep the list of shards, and return the kept one.

        If another thread has deleted the array meanwhile, nothing is kept.
        """
        with shards_lock:
            kept = self._shards_or_cause
            if type(kept) is list:
                return kept
            if kept is None and not self._buffers.is_deleted():
                self._shards_or_cause = shards
            return shards

    # Written out, since Python calls such a property in half of the time of any other; from the
    # abstract value, as those of JAX's class are properties of Python again.

    @property
    def aval(self) -> Any:
        """Abstract value: shape, dtype, weak type."""
        return self._buffers.aval

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension, over all devices."""
        return self._buffers.aval.shape

    @property
    def dtype(self) -> np.dtype:
        """Type of the elements."""
        return self._buffers.aval.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._buffers.aval.shape)

    @property
    def size(self) -> int:
        """Number of elements over all devices; replicas count once."""
        return self._buffers.size

    @property
    def itemsize(self) -> int:
        """Size of an element in bytes."""
        return self._buffers.itemsize

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes; replicas count once."""
        return self._buffers.nbytes

    @property
    def weak_type(self) -> bool:
        """True if the other operand decides the dtype, as with a Python number."""
        return self._buffers.aval.weak_type

    @property
    def committed(self) -> bool:
        """True if computations must stay on the devices of the array."""
        return self._buffers.committed

    @property
    def is_fully_addressable(self) -> bool:
        """True if all devices of the array belong to this process."""
        return self._buffers.is_fully_addressable

    @property
    def is_fully_replicated(self) -> bool:
        """True if every device of the array holds all of it."""
        return self._buffers.is_fully_replicated

    @property
    def traceback(self) -> Any:
        """Python traceback of the array's creation, as the runtime recorded it."""
        return self._buffers.traceback

    # JAX reads it on each argument of a traced call; `__getattr__` takes 20 times as long.
    _committed = committed

    @property
    def _handle(self) -> Handle:
        self._exclusive = False
        return self._buffers

    @_handle.setter
    def _handle(self, handle: Handle) -> None:
        """Give a new array its buffers."""
        self._exclusive = False
        self._buffers = handle
        self._exposed = self._own_sharding = self._shards_or_cause = self._value_cache = None

    def _expose(self) -> None:
        """Check the shards at each use from now on, since other code can delete one alone.

        Reads of an unset slot come to `__getattr__`, those of jaxlib's dispatcher too: arrays that
        are not exposed pay nothing.
        """
        if self._exposed is not None:
            return
        self._exposed = handle = self._buffers
        if handle.sharding.num_devices > 1:
            del self._buffers
        else:
            for whole in list_arrays_with_shard(handle):
                whole._expose()

    def _lose_shard(self, consumer: str) -> Handle:
        """Become a deleted array; Arrays over its other shards stay alive.

        The runtime would start a program with the other shards, and wait for the missing device.

        Args:
            consumer: The callable that the lost shard was donated to, `DELETE`, or "" if unknown.
        """
        exposed = self._exposed
        self._buffers = dead = deleted_like(self._buffers if exposed is None else exposed)
        if self._deleted_by is None:
            self._deleted_by = SHARD + consumer
        self._value_cache = None
        return dead

    if TYPE_CHECKING:

        def __init__(self) -> None: ...

    else:
        # Hidden from type checkers, which would accept every attribute.

        def __getattr__(self, name: str) -> Any:
            """Find an attribute that the ordinary lookup did not find."""
            if name in ("_buffers", "_handle"):  # the commonest: each read of an exposed array
                handle = self._exposed
                if handle is not None:
                    is_lost = lacks_buffer(handle) and not handle.is_deleted()
                    return self._lose_shard("") if is_lost else handle
                raise ArgumentError(
                    "this Array has no buffers, for it was made by Array(): make one with "
                    "device_put(value), make_array_from_callback(...) or Array.from_jax(x)"
                )
            if name in _OPTIONAL:
                return None
            own = getattr(type(self), name, None)
            if isinstance(own, property):
                # Python calls __getattr__ if a property raises AttributeError, and drops its text.
                return own.__get__(self)
            if name.startswith("_") and not name.startswith("__"):
                # JAX reads private members of its own class on any array.
                return getattr(self._handle, name)
            kind = "an Array" if type(self).__name__ == "Array" else f"a {type(self).__name__}"
            raise AttributeError(f"{kind} has no attribute {name!r}", name=name, obj=self)


def own_handles[A: ArrayBase](kind: type[A], handles: Iterable[Handle]) -> list[A]:
    """Return arrays of a class over new handles of a program, in order."""
    arrays, new = [], object.__new__  # the constructors of derived classes take other arguments
    for handle in handles:
        array = new(kind)
        array._buffers, array._exclusive = handle, True
        array._own_sharding = array._value_cache = None
        arrays.append(array)
    return arrays


def handle_of(x: Any) -> Any:
    """Return the handle of an Array; other values are returned as they are."""
    return x._handle if isinstance(x, ArrayBase) else x


def type_text(x: Any) -> str:
    """Return shape and dtype, as in `float32[4,8]`."""
    return typed(x.dtype.name, x.shape)


def check_alive(*operands: Any) -> None:
    """Check that no array among the operands is deleted.

    Raises:
        DeletedError: An operand is deleted; the message names the first.
    """
    for x in operands:
        handle = x._buffers if isinstance(x, ArrayBase) else x
        if type(handle) is HandleType and handle.is_deleted():
            consumer = None if handle is x else x._deleted_by
            text = describe_deleted(f"an Array {type_text(handle)}", handle, consumer)
            raise DeletedError(text) from None


def check_alive_as(name: Callable[[], str], x: Any) -> None:
    """Check that an array is not deleted.

    Raises:
        DeletedError: It is deleted; the message begins with its name.
    """
    try:
        check_alive(x)
    except DeletedError as error:
        raise DeletedError(f"{name()}: {error}") from None
