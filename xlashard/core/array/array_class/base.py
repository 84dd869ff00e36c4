"""`ArrayBase`: slots of an `Array`; records of donations, for errors; reshapes of single buffers.

The first call of a program marks the arrays that it donates. Repeat calls go from the dispatcher to
PJRT without entering Python and cannot mark anything; but they donate arrays of the shapes, dtypes
and shardings of the first call, which are recorded here.
"""

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xlashard._jax import originals
from xlashard._jax.runtime.global_state import BoundedCache
from xlashard._jax.runtime.shardings import default_memory_kind
from xlashard._jax.runtime.transfer import (
    Handle,
    HandleType,
    assemble,
    copy_to,
    deleted_like,
    host_view,
    lacks_buffer,
    make_aval,
    put,
)
from xlashard.core.sharding import SingleDeviceSharding
from xlashard.errors import ArgumentError, DeletedError
from xlashard.support.formatting import typed

_SHOWN = 3

type _Kind = tuple[Any, ...]


class DonationTracker:
    """Record of the arrays that a callable donates; it is dropped with the callable.

    Args:
        name: Name of the callable.

    Attributes:
        paths: Path of the argument that donates handles of a kind.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # Bounds the memory of a function that is called with ever new shapes.
        self.paths = BoundedCache(4096)
        with _lock:
            _trackers.add(self)

    def note(self, path: str, handle: Any) -> str:
        """Record that the callable donates handles of the type and sharding of this one.

        Args:
            path: Path of the donated argument.
            handle: A handle, which may be deleted.

        Returns:
            Name of the callable with the path of the argument.
        """
        kind = _kind(handle)
        if self.paths.get(kind) is None:
            self.paths.add(kind, path)
        return self.takes(path)

    def takes(self, path: str) -> str:
        """Return the name with the path of an argument: `update, as state['w']`."""
        return f"{self.name}, as {path}"


_trackers: weakref.WeakSet[DonationTracker] = weakref.WeakSet()
_lock = threading.Lock()


def _kind(handle: Any) -> _Kind:
    return handle.shape, handle.dtype, handle.sharding


def likely_donations(handle: Any) -> list[str]:
    """Return the callables that donate handles like this one, sorted by name."""
    kind = _kind(handle)
    with _lock:
        known = list(_trackers)
    paths = ((tracker, tracker.paths.get(kind)) for tracker in known)
    return sorted(tracker.takes(path) for tracker, path in paths if path is not None)


def _deletion_cause(handle: Any, consumer: str | None) -> tuple[str, bool]:
    """Describe why a handle is deleted; return True, too, if it may have been donated to a call.

    Args:
        handle: The deleted handle.
        consumer: The callable that it was donated to, if known.
    """
    if consumer == SHARD:
        return "one of its shards was deleted or donated by itself", False
    if consumer is not None:
        target = "one of its shards" if consumer.startswith(SHARD) else "it"
        consumer = consumer.removeprefix(SHARD)
        if consumer == DELETE:
            return f"{DELETE} was called on {target}", False
        return f"{target} was donated to {consumer}", True
    likely = likely_donations(handle)
    if not likely:
        return f"{DELETE} was called on it, or it was donated to a program", True
    if len(likely) == 1:
        return f"it was most likely donated to {likely[0]}", True
    more = f" ({len(likely) - _SHOWN} more take such arrays)" if len(likely) > _SHOWN else ""
    return f"it was most likely donated to one of: {'; '.join(likely[:_SHOWN])}{more}", True


DELETE = "delete()"
"""Marks an array that `delete()` deleted."""

SHARD = "a shard: "
"""Prefix of the mark of an array one of whose shards was deleted or donated."""

SHARDS: dict[int, tuple[weakref.ref[Any], list[weakref.ref[Any]]]] = {}
"""Handles that are one shard of larger Arrays, by id, each with those Arrays."""


# Reentrant, as a finalizer or a signal handler may delete an array meanwhile.
_shards_lock = threading.RLock()


def record_shards(handles: Iterable[Any], whole: Any) -> None:
    """Record that deleting or donating one of some handles deletes a shard of an Array."""
    ref = weakref.ref(whole)
    with _shards_lock:
        for handle in handles:
            key = id(handle)
            known = SHARDS.get(key)
            if known is None:
                # Python clears modules before it frees some handles: the callback reads no global.
                SHARDS[key] = (weakref.ref(handle, partial(SHARDS.pop, key)), [ref])
            elif ref is not known[1][-1]:
                known[1][:] = [r for r in known[1] if r is not ref and r() is not None]
                known[1].append(ref)


def arrays_with_shard(handle: Any) -> list[Any]:
    """Return the recorded Arrays of which a handle is one shard."""
    _, wholes = SHARDS.get(id(handle), (None, ()))
    return [whole for known in wholes if (whole := known()) is not None]


def release_shards(values: Iterable[Any], consumer: str) -> None:
    """Delete the Arrays that lost a shard because values were deleted or donated.

    Args:
        values: Leaves of donated arguments, whether a program has taken them over or not.
        consumer: The callable that they were donated to, or `DELETE`.
    """
    for value in values:
        handle = getattr(value, "_buffers", value)
        if id(handle) in SHARDS and handle.is_deleted():
            for array in arrays_with_shard(handle):
                array._lose_shard(consumer)


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
            that computed them until `_handle` is read.
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
    _exclusive: bool | None

    _exposed: Handle | None
    _own_sharding: Any
    _shards_or_cause: Any
    _value_cache: Any

    @property
    def _deleted_by(self) -> str | None:
        """The callable that the array was donated to, or `DELETE`."""
        kept = self._shards_or_cause
        return None if type(kept) is list else kept

    @_deleted_by.setter
    def _deleted_by(self, cause: str | None) -> None:
        with _shards_lock:
            self._shards_or_cause = cause

    def _keep_shards(self, shards: list[Any]) -> list[Any]:
        """Keep the list of shards, and return the kept one.

        If another thread has deleted the array meanwhile, nothing is kept.
        """
        with _shards_lock:
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
        elif SHARDS:
            for whole in arrays_with_shard(handle):
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
        if isinstance(x, ArrayBase):
            if x._buffers.is_deleted():
                raise DeletedError(_deleted_array_text(x._buffers, x._deleted_by)) from None
        elif type(x) is HandleType and x.is_deleted():
            raise DeletedError(_deleted_array_text(x, None)) from None


def check_alive_as(name: Callable[[], str], x: Any) -> None:
    """Check that an array is not deleted.

    Raises:
        DeletedError: It is deleted; the message begins with its name.
    """
    try:
        check_alive(x)
    except DeletedError as error:
        raise DeletedError(f"{name()}: {error}") from None


def _deleted_array_text(handle: Handle, consumer: str | None) -> str:
    return deleted_text(f"an Array {type_text(handle)}", handle, consumer)


def deleted_text(name: str, handle: Handle, consumer: str | None) -> str:
    """Describe a deleted array: what deleted it, and what to do instead.

    Args:
        name: The array as errors name it.
        handle: Its handle.
        consumer: The callable that it was donated to, if known.
    """
    how, is_donated = _deletion_cause(handle, consumer)
    advice = "make it anew"
    if is_donated:
        advice = (
            "use what that call returned, or leave the array out of what it donates "
            "(donate_argnums, donate=True)"
        )
    return f"{name} has been deleted: {how}; {advice}"


def reshape_buffer(handle: Handle, shape: tuple[int, ...], weak_type: bool | None = None) -> Handle:
    """Return an uncommitted copy of a single-device handle in another shape.

    On a CPU the host copies the elements. Elsewhere no transfer can change the shape of a buffer,
    and a program on the device copies them.

    Args:
        handle: A single-device handle.
        shape: A shape with as many elements.
        weak_type: Whether the dtype of the result is weak; by default that of the handle.
    """
    sharding = handle.sharding
    (device,) = sharding.device_set
    aval = make_aval(
        shape, handle.dtype, sharding, handle.weak_type if weak_type is None else weak_type
    )
    if device.platform == "cpu":
        window = host_view(handle)[0].reshape(shape)
        return put(aval, sharding, [window], [device], committed=False)
    return assemble(aval, sharding, [reshape_by_program(handle, shape)], committed=False)


def reshape_by_program(handle: Handle, shape: tuple[int, ...]) -> Handle:
    """Reshape by a program, on any platform."""
    (device,) = handle.sharding.device_set
    kind, normal = handle.sharding.memory_kind, default_memory_kind(device)
    # Within a trace too, where the handle is a concrete value.
    with jax.ensure_compile_time_eval():
        if kind in (None, normal):
            return _in_shape(handle, shape)
        # Programs run on the default memory of the device.
        own = SingleDeviceSharding(device, memory_kind=normal).jax_sharding()
        return copy_to(_in_shape(copy_to(handle, own), shape), handle.sharding)


@partial(originals.jit, static_argnums=1)
def _in_shape(x: Any, shape: tuple[int, ...]) -> Any:
    return jax.lax.reshape(x, shape)
