"""Buffer handles: arrays over results of programs, data of key arrays, values for one device.

Constructors return a key array of JAX (`jax.random.key`) for keys, never an `Array`: NumPy cannot
hold its elements, and all operations on keys are in `jax.random`. Its data is an array of integers
with trailing dimensions, which is placed like any array.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xlashard._jax import originals
from xlashard._jax.runtime.transfer import Handle, HandleType, Tracer, aval_of, split
from xlashard.core.array.array_class.array import Array, wrap
from xlashard.core.array.array_class.base import check_alive_as, handle_of
from xlashard.core.array.array_class.shard import Shard
from xlashard.core.array.placement.put import host_value
from xlashard.core.array.placement.read import read_value
from xlashard.core.array.placement.target import ResolvedSharding, resolve_sharding
from xlashard.core.array.reshard.execute import reshard
from xlashard.core.sharding import (
    GSPMDSharding,
    NamedSharding,
    Sharding,
    SingleDeviceSharding,
    from_jax,
)
from xlashard.errors import ArgumentError

type KindOf = Callable[[Any], type[Array]]
"""Function from the handle of a result to the class of its array."""


def wrap_output(kind_of: KindOf | None, handles: Sequence[Any]) -> Array:
    """Return an array over the only one of some handles: a new result of a program.

    Args:
        kind_of: Returns its class; None for `Array`.
        handles: Its handle in a tuple, as jaxlib's dispatcher has it.
    """
    # The constructors of derived classes take other arguments.
    out = Array() if kind_of is None else object.__new__(kind_of(handles[0]))
    out._buffers, out._exclusive = handles[0], True
    out._own_sharding = out._value_cache = None
    return out


def unwrapped(handle: Any) -> Any:
    """Return the class of a result that stays JAX's own array.

    Args:
        handle: The result's buffers.
    """
    return HandleType


def wrap_result(value: Any, kind: type[Array] = Array) -> Any:
    """Return an array of a class over a handle; other values are returned as they are."""
    if type(value) is not HandleType or kind is HandleType:
        return value
    out = kind()
    out._handle = value
    return out


def as_class[A: Array](array: Array, kind: type[A]) -> A:
    """Return an Array as one of another class, with the same buffers and sharding."""
    out = kind()
    out._handle, out._own_sharding = array._handle, array._own_sharding
    return out


def live_arrays(platform: str | None = None) -> list[Array]:
    """Return all arrays whose buffers are alive in this process, JAX's own included.

    An array of JAX is listed as a new `Array` over its buffers: deleting it deletes them. A buffer
    is listed once, as part of the array with the most devices; shards of an array are not listed.
    The search goes over all objects of the process.

    Args:
        platform: Restricts the list to devices of this platform.

    Example:
        >>> import numpy as np
        >>> from xlashard import device_put, live_arrays
        >>> x = device_put(np.zeros(1000, np.float32))
        >>> x.nbytes <= sum(array.nbytes for array in live_arrays())
        True
    """
    handles = [h for h in originals.live_arrays(platform) if type(h) is HandleType]
    widest_first = sorted(handles, key=lambda h: -h.sharding.num_devices)
    seen: set[tuple[int, int]] = set()
    kept: set[int] = set()
    for handle in widest_first:
        buffers = _buffers(handle)
        if buffers and buffers <= seen:
            continue
        seen |= buffers
        kept.add(id(handle))
    arrays = _find_arrays()
    return [arrays[id(h)] if id(h) in arrays else wrap(h) for h in handles if id(h) in kept]


def _find_arrays() -> dict[int, Array]:
    """Return the Arrays of this process by the id of their handle.

    No list of them is kept: each result of a program would have to enter it.
    """
    arrays: dict[int, Array] = {}
    for x in gc.get_objects():
        # The class of the object itself: `isinstance` would call the `__class__` of proxies.
        if issubclass(type(x), Array):
            with suppress(ArgumentError):  # without buffers yet
                arrays.setdefault(id(x._buffers), x)
    return arrays


def _buffers(handle: Handle) -> set[tuple[int, int]]:
    """Return device and address of each buffer; nothing if empty or hidden by the runtime."""
    if handle.is_deleted() or not handle.size:
        return set()
    parts = [handle] if handle.sharding.num_devices == 1 else split(handle)
    try:
        return {(id(part.device), part.unsafe_buffer_pointer()) for part in parts}
    except RuntimeError:
        return set()


def is_key_array(x: Any) -> bool:
    """Return True for an array of typed keys."""
    return isinstance(x, jax.Array) and is_key_dtype(x.dtype)


def is_key_dtype(dtype: Any) -> bool:
    """Return True for a dtype of keys."""
    return not isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def canonical_dtype(dtype: Any) -> Any:
    """Return the dtype on devices of a requested dtype.

    Raises:
        ArgumentError: No device has the dtype.
    """
    try:
        if is_key_dtype(dtype):
            return dtype
        canonical = jax.dtypes.canonicalize_dtype(dtype)
        aval_of(np.empty(0, canonical))
        return canonical
    except TypeError:
        raise ArgumentError(
            f"dtype {dtype!r} is unsupported by devices: expected one such as 'float32' or 'int32'"
        ) from None


def key_handle(keys: Any) -> Handle:
    """Return the handle of a key array's data, with the key's own dimensions last."""
    return jax.random.key_data(keys)


def keys_over(handle: Handle, like: Any) -> Any:
    """Return the key array over data, with the generator of another key array."""
    return jax.random.wrap_key_data(handle, impl=jax.random.key_impl(like))


def key_shards(keys: Any) -> list[Shard]:
    """Return the shards of a key array on the devices of this process.

    Args:
        keys: A key array of JAX.

    Returns:
        A `Shard` per device, in the order of the device assignment, whose data are keys.

    Raises:
        ArgumentError: The value is no array of keys.

    Example:
        >>> keys = jax.random.split(jax.random.key(0), 4)
        >>> [shard.data.shape for shard in key_shards(keys)]
        [(4,)]
    """
    if not is_key_array(keys):
        raise ArgumentError(
            f"key_shards takes an array of keys such as jax.random.key(0), not "
            f"{type(keys).__name__}"
        )
    sharding = from_jax(keys.sharding)
    count = len(sharding.addressable_positions)
    return Shard.all_of(sharding, keys.shape, [keys.addressable_data(n) for n in range(count)])


def resolve_key_data(logical: ResolvedSharding, extra: tuple[int, ...]) -> ResolvedSharding:
    """Resolve the sharding of a key array for its data.

    Args:
        logical: The resolved sharding of the key array.
        extra: Dimensions of one key.
    """
    sharding: Sharding = logical.sharding
    if not isinstance(sharding, NamedSharding | SingleDeviceSharding):
        tiling = replace(logical.tiling, counts=(*logical.tiling.counts, *(1 for _ in extra)))
        sharding = GSPMDSharding(
            sharding.devices, tiling.to_tile_assignment(), memory_kind=sharding.memory_kind
        )
    return resolve_sharding((*logical.shape, *extra), sharding)


class PieceInput(NamedTuple):
    """A value that is put on one device as a tile.

    Attributes:
        value: A NumPy array or a single-device handle; for keys their data.
        weak_type: Whether its dtype is weak.
        keys: The key array, if the value is one.
    """

    value: Any
    weak_type: bool
    keys: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value; for keys that of the key array."""
        return tuple((self.value if self.keys is None else self.keys).shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the value; for keys that of the key array."""
        return (self.value if self.keys is None else self.keys).dtype


class TracedValueError(ArgumentError, jax.errors.UnexpectedTracerError):
    """A traced value where only a concrete one has buffers; an error of JAX's class too."""

    def __init__(self, message: str) -> None:
        # JAX's class would add the address of its own page.
        Exception.__init__(self, message)


def as_piece_input(x: Any, name: Callable[[], str], instead: str) -> PieceInput:
    """Read a value; a sharded array is moved to its first device.

    Args:
        x: A NumPy array, a number, an Array, an array or keys of JAX.
        name: Returns the name of the value in errors.
        instead: Advice for a traced value.

    Raises:
        ArgumentError: The value is of another type.
        TracedValueError: The value is traced.
        DeletedError: The value is deleted.
    """
    if isinstance(x, Tracer):
        raise TracedValueError(
            f"{name()} is traced, but only concrete values can be put on single devices: {instead}"
        )
    if isinstance(x, np.ndarray):
        return PieceInput(*host_value(x, name))
    if is_key_array(x):
        return PieceInput(_on_one_device(key_handle(x)), False, x)
    if not isinstance(x, Array | HandleType):
        return PieceInput(*host_value(x, name))
    check_alive_as(name, x)
    handle: Handle = handle_of(x)
    return PieceInput(_on_one_device(handle), handle.weak_type)


def _on_one_device(handle: Handle) -> Any:
    if not handle.is_fully_addressable:
        # Must be wholly in this process: the others may not read the value, and take no part.
        whole = handle.is_fully_replicated and split(handle)
        return whole[0] if whole else read_value(Array.from_jax(handle))
    if handle.sharding.num_devices == 1:
        return handle
    device = from_jax(handle.sharding).devices[0]
    return reshard(handle, resolve_sharding(handle.shape, SingleDeviceSharding(device)))
