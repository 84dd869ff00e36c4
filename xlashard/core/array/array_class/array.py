"""`Array`: one buffer handle that spans all addressable devices.

Its operators, NumPy-style methods and `x.at[...]` are programs on its devices.
"""

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.transfer import (
    Handle,
    HandleType,
    callback_result,
    collect_garbage,
    split,
    with_sharding,
)
from xlashard.core.array.array_class.base import ArrayBase, check_alive, type_text
from xlashard.core.array.array_class.deletion import DELETE, SHARDS, record_shards, release_shards
from xlashard.core.array.array_class.indexing import Indexing, is_long, wide_integers, widened
from xlashard.core.array.array_class.protocols import HostProtocols
from xlashard.core.array.array_class.shard import Shard
from xlashard.core.array.array_class.wrappers import wrap_jax_function
from xlashard.core.array.placement.read import BRING_HERE, Policy, start_read, to_host
from xlashard.core.sharding import Sharding, from_jax, is_of_jax, to_jax
from xlashard.core.sharding.base import is_index
from xlashard.errors import ArgumentError, NotAddressableError, PlacementError
from xlashard.support.tracebacks import short_tracebacks, shortened

if TYPE_CHECKING:
    # Only a stub: the members are generated from JAX's, with parameters that a checker cannot see.
    from xlashard.core.array.array_class.typed import Typed  # pyright: ignore[reportMissingModuleSource]
else:

    class Typed:
        """Empty at run time."""

        __slots__ = ()


class _Method:
    """A method of `jax.Array`, generated at first use, as generating it takes a while.

    It replaces this descriptor in the class. `help()` and `signature()` show JAX's own method.

    Args:
        kind: The class that has the method.
        name: The method.
        operands: Names of the arguments in errors; those of JAX's method if empty.
    """

    def __init__(self, kind: type, name: str, operands: tuple[str, ...] = ()) -> None:
        self._kind = kind
        self._name = name
        self._operands = operands
        self.__doc__ = getattr(HandleType, name).__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        call = getattr(HandleType, self._name)
        wrapper: Any = wrap_jax_function(call, self._name, None, self._operands)
        update_wrapper(wrapper, call)
        # Not JAX's private name: bound methods are pickled by name.
        wrapper.__name__ = wrapper.__qualname__ = self._name
        setattr(self._kind, self._name, wrapper)
        # Not by `getattr`: a subclass that overrides the method calls it by `super()`.
        return wrapper.__get__(instance, owner)


class Operators(ArrayBase):
    """Operators of NumPy arrays; in-place operators fall back to these."""

    __slots__ = ()
    __hash__: None = None  # pyright: ignore[reportIncompatibleMethodOverride]
    __array_priority__ = 100

    def __setitem__(self, index: Any, value: Any) -> None:
        raise ArgumentError(
            "an Array is immutable, so x[index] = y is not possible: write x = x.at[index].set(y)"
        )


_UNARY = "neg pos abs invert round"
_BINARY = (
    "eq ne lt le gt ge add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod "
    "rmod divmod rdivmod pow rpow matmul rmatmul and rand or ror xor rxor lshift rlshift "
    "rshift rrshift contains"
)

for _names, _operands in ((_UNARY, ()), (_BINARY, ("left", "right"))):
    for _name in _names.split():
        setattr(Operators, f"__{_name}__", _Method(Operators, f"__{_name}__", _operands))


class NumpyMethods(ArrayBase):
    """Methods and properties that compute an array from an array."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: object) -> Self:
        return self.copy()

    @property
    def imag(self) -> Self:
        """Imaginary part."""
        return _imag(self)

    @property
    def flat(self) -> Any:
        """Unsupported: an Array cannot be written through an iterator.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("an Array has no flat iterator: write x.ravel()")

    @property
    def at(self) -> "Updates[Self]":
        """Updates of slices: `x.at[index].set(y)` is `x` with `y` at that index."""
        return Updates(self)


_METHODS = (
    "all any argmax argmin argpartition argsort astype byteswap choose clip compress conj "
    "conjugate copy cumprod cumsum diagonal dot flatten max mean min nonzero prod ptp ravel "
    "repeat reshape round searchsorted sort squeeze std sum swapaxes take to_device trace "
    "transpose var view _multi_slice _split"
)
"""Methods of `jax.Array`; JAX's own code calls those with an underscore on any array."""

for _name in _METHODS.split():
    setattr(NumpyMethods, _name, _Method(NumpyMethods, _name))

_PROPERTIES = {
    "T": "Transpose: all dimensions in reverse order.",
    "mT": "Matrix transpose: the last two dimensions swapped.",
    "real": "Real part.",
}

for _name, _text in _PROPERTIES.items():
    _getter = wrap_jax_function(getattr(HandleType, _name).fget, _name, None)
    setattr(NumpyMethods, _name, property(_getter, doc=_text))


def _imaginary(handle: Any) -> Any:
    """Return the imaginary part; JAX puts the zeros of a real array on the default device."""
    if jnp.iscomplexobj(handle) or not handle.committed:
        return handle.imag
    return jnp.zeros_like(handle, device=handle.sharding)


_imag = wrap_jax_function(_imaginary, "imag", None)


class Updates[A: NumpyMethods]:
    """Result of `x.at`; index it to select a slice."""

    __slots__ = ("_array",)

    def __init__(self, array: A) -> None:
        self._array = array

    def __getitem__(self, index: Any) -> "PartUpdates[A]":
        return PartUpdates(self._array, index)

    def __repr__(self) -> str:
        return f"{self._array!r}.at"


def _update(name: str) -> Callable[..., Any]:
    def update_array(x: Any, index: Any, *values: Any, **options: Any) -> Any:
        if not is_long(x):
            return getattr(x.at[index], name)(*values, **options)
        with wide_integers(x):
            return getattr(x.at[widened(index)], name)(*values, **options)

    wrapper = wrap_jax_function(update_array, f"x.at[index].{name}", None)

    @shortened
    def update(self: "PartUpdates[Any]", *args: Any, **kwargs: Any) -> Any:
        return wrapper(self._array, self._index, *args, **kwargs)

    update.__name__ = name
    update.__doc__ = f"`jax.numpy.ndarray.at[index].{name}`, as an `Array`."
    return update


class PartUpdates[A: NumpyMethods]:
    """Result of `x.at[index]`; each method returns a new array with that slice changed."""

    __slots__ = ("_array", "_index")

    def __init__(self, array: A, index: Any) -> None:
        self._array = array
        self._index = index

    def __repr__(self) -> str:
        return f"{self._array!r}.at[{self._index!r}]"


_UPDATES = "get set apply add subtract multiply mul divide power min max"

for _name in _UPDATES.split():
    setattr(PartUpdates, _name, _update(_name))


class Array(Typed, Operators, NumpyMethods, Indexing, HostProtocols):
    """An array sharded over devices.

    Constructors (`device_put`, `make_array_from_callback`, ...) and programs create it, and
    `Array.from_jax` wraps an array of JAX; JAX's own functions accept it. It is immutable. Every
    operation runs on the devices that hold it and returns an Array.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import Mesh, NamedSharding, P, device_put
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> x = device_put(np.arange(3, dtype=np.int32), NamedSharding(mesh, P("data")))
        >>> x + 1
        Array([1, 2, 3], dtype=int32)
    """

    __slots__ = ()

    @classmethod
    def from_jax(cls, x: jax.Array) -> Self:
        """Return an Array that shares the buffers of an array of JAX.

        Args:
            x: A concrete array. An Array is returned as it is.

        Raises:
            ArgumentError: `x` is a tracer, a key array, or no array of JAX.
        """
        # By its type too: a derived class may answer `isinstance` differently.
        if isinstance(x, cls) and issubclass(type(x), cls):
            return x
        if type(x) is not HandleType:
            raise ArgumentError(
                f"Array.from_jax takes a concrete jax.Array, not {type(x).__name__}: "
                "device_put(x) makes one of NumPy arrays and numbers; key arrays stay jax.Arrays"
            )
        out = cls()
        out._handle = callback_result(x)
        if isinstance(x.sharding, Sharding) or not is_of_jax(x.sharding):
            # Programs of JAX cannot read a sharding of this package on their arguments.
            out._handle = with_sharding(x, to_jax(from_jax(x.sharding), x.shape))
        if isinstance(x.sharding, Sharding):
            out._own_sharding = x.sharding
        out._expose()
        return out

    def to_jax(self) -> jax.Array:
        """Return JAX's own array over the same buffers."""
        self._expose()
        return self._handle

    @property
    def sharding(self) -> Sharding:
        """Sharding: the slice of the array on each device.

        It is the object by which the array was placed, or an equal one. For a sharding of a user's
        class it is the `GSPMDSharding` with the same tiles, which JAX can read.
        """
        own = self._own_sharding
        if own is None:
            own = self._own_sharding = from_jax(self._buffers.sharding)
        return own

    @property
    def layout(self) -> Layout | None:
        """Order of the dimensions in device memory; None where the runtime does not expose it."""
        check_alive(self)
        return self._buffers.format.layout

    @property
    def format(self) -> Format:
        """Layout and sharding as one `Format`, which constructors accept.

        A deleted array has no layout; its sharding is part of its type.
        """
        sharding: Any = self.sharding
        if not isinstance(sharding, jax.sharding.Sharding):
            sharding = self._buffers.sharding
        return Format(self._buffers.format.layout, sharding)

    @property
    def device(self) -> Device | Sharding:
        """The device of the array; its sharding if there are several."""
        check_alive(self)
        devices = self._buffers.sharding.device_set
        return next(iter(devices)) if len(devices) == 1 else self.sharding

    def devices(self) -> set[Device]:
        """Return all devices of the array, in any process."""
        check_alive(self)
        return self._buffers.devices()

    @property
    def device_buffer(self) -> Any:
        """Removed; `jax.Array` replaced DeviceArray."""
        raise AttributeError("device_buffer is deprecated: write x.addressable_data(0)")

    @property
    def device_buffers(self) -> Any:
        """Removed; `jax.Array` replaced ShardedDeviceArray."""
        raise AttributeError(
            "device_buffers is deprecated: write [shard.data for shard in x.addressable_shards]"
        )

    def addressable_data(self, index: int) -> "Array":
        """Return the data on one device of this process.

        Args:
            index: Number of the device in the order of the device assignment. A fully replicated
                array ignores it, as JAX's does: every device has the same data.

        Raises:
            IndexError: This process has fewer devices of the array.
        """
        kept = self._shards_or_cause
        if type(kept) is list and type(index) is int and not self._buffers.is_deleted():
            number = 0 if self.is_fully_replicated else index
            if 0 <= number < len(kept):
                return kept[number].data
        check_alive(self)
        buffers = split(self._handle)
        if buffers and self.is_fully_replicated and is_index(index):
            index = 0
        number = self._check_shard_number(index, len(buffers))
        return self._wrap_shards([buffers[number]])[0]

    def _check_shard_number(self, index: int, count: int) -> int:
        """Return the number of a shard of this process, checked."""
        if not is_index(index):
            raise ArgumentError(
                f"addressable_data: index must be an integer, not {type(index).__name__}: write "
                "x.addressable_data(0)"
            )
        if not -count <= index < count:
            advice = f"give one from 0 to {count - 1}" if count else BRING_HERE
            raise IndexError(
                f"addressable_data({index}): {count} of the array's devices are addressable: "
                f"{advice}"
            )
        return index

    @property
    def addressable_shards(self) -> list[Shard]:
        """Shards on the devices of this process, in the order of the device assignment."""
        kept = self._shards_or_cause
        if type(kept) is list and not self._buffers.is_deleted():
            return kept
        check_alive(self)
        shards = Shard.all_of(self.sharding, self.shape, self._wrap_shards(split(self._handle)))
        return self._keep_shards(shards)

    def _wrap_shards(self, buffers: Sequence[Handle]) -> "list[Array]":
        """Return Arrays over some of the buffers; deleting one deletes a part of this array."""
        if self._buffers.sharding.num_devices > 1:
            record_shards(buffers, self)
        return [wrap(buffer) for buffer in buffers]

    @property
    def global_shards(self) -> list[Shard]:
        """Shards on all devices; `data` is None for those of other processes."""
        local = {shard.device: shard for shard in self.addressable_shards}
        sharding, shape = self.sharding, self.shape
        return [local.get(device) or Shard(device, sharding, shape) for device in sharding.devices]

    def on_device_size_in_bytes(self) -> int:
        """Return the bytes in the memories of all devices, with replicas and padding.

        Raises:
            NotAddressableError: No device of the array belongs to this process.
        """
        check_alive(self)
        if self._buffers.is_fully_addressable or split(self._buffers):
            return self._buffers.on_device_size_in_bytes()
        raise NotAddressableError(  # no-catalogue: needs several processes
            f"this process has no device of an Array {type_text(self)}, and cannot query its "
            f"memory: use x.nbytes, or {BRING_HERE}"
        )

    def unsafe_buffer_pointer(self) -> int:
        """Return the address of the buffer on the only device, valid while the array is alive.

        Raises:
            PlacementError: The array is on several devices.
        """
        return self._only("unsafe_buffer_pointer").unsafe_buffer_pointer()

    def unsafe_raw_buffer(self) -> Any:
        """Return the runtime's own object for the buffer on the only device.

        Raises:
            PlacementError: The array is on several devices.
        """
        return self._only("unsafe_raw_buffer").unsafe_raw_buffer()

    def _only(self, name: str) -> Any:
        check_alive(self)
        count = self._handle.sharding.num_devices
        if count != 1:
            raise PlacementError(
                f"{name}() requires an array on one device, but this Array {type_text(self)} is on "
                f"{count} devices: write [shard.data.{name}() for shard in x.addressable_shards]",
                also=jax.errors.JaxRuntimeError,
            )
        return self._handle

    def platform(self) -> str:
        """Return the platform of the devices: `"cpu"`, `"gpu"` or `"tpu"`."""
        return self._buffers.platform()

    def is_deleted(self) -> bool:
        """Return True if the buffers are deleted."""
        return self._buffers.is_deleted()

    def is_ready(self) -> bool:
        """Return True if the array is computed."""
        check_alive(self)
        return self._buffers.is_ready()

    def delete(self) -> None:
        """Free the memory at once; any later use of the array is an error."""
        # Set in any case, which drops the list of shards.
        self._deleted_by = self._deleted_by if self._buffers.is_deleted() else DELETE
        self._value_cache = None
        self._buffers.delete()
        if SHARDS:
            release_shards([self], DELETE)
        collect_garbage()

    def block_until_ready(self) -> Self:
        """Wait until the array is computed, and return it."""
        try:
            self._buffers.block_until_ready()
        except RuntimeError:
            check_alive(self)
            raise
        return self

    def to_host(self, policy: Policy = "replicated", *, timeout: float = 60.0) -> np.ndarray:
        """Return the value, or this process's part of it, as a read-only NumPy array.

        If all devices of the array belong to this process, every policy returns the whole value.

        Args:
            policy: `"replicated"`: the whole value, if this process holds every tile. `"local"`:
                the block that the tiles of this process form; no other process takes part.
                `"gather"`: the whole value in every process that has a device of the array; all of
                them must call this.
            timeout: Seconds for which `"gather"` waits for the other processes.

        Raises:
            NotAddressableError: Tiles are in other processes (`"replicated"`), or those of this
                process form no block (`"local"`).
            ProcessesError: A process did not call it before the timeout, or with another array.
            DeletedError: The array is deleted.

        Example:
            >>> import jax, numpy as np
            >>> from xlashard import device_put
            >>> device_put(np.arange(3), jax.devices()[0]).to_host("local")
            array([0, 1, 2], dtype=int32)
        """
        with short_tracebacks:
            return to_host(self, policy, timeout)

    def copy_to_host_async(self) -> None:
        """Start the transfer of the value to the host."""
        start_read(self)


def wrap(handle: Handle, sharding: Sharding | None = None) -> Array:
    """Return an `Array` that shares the buffers of a handle.

    Args:
        handle: The handle.
        sharding: The caller's own sharding, which the array returns as `x.sharding`. A sharding of
            a user's class is dropped, as JAX's compiled functions cannot read it.
    """
    out = Array()
    out._handle = handle
    if isinstance(sharding, jax.sharding.Sharding):
        out._own_sharding = sharding
    return out


def wrap_tree(treedef: Any, handles: Sequence[Handle]) -> Any:
    """Return the pytree whose leaves are `Array`s over new handles of a program, in order."""
    leaves = []
    append = leaves.append
    for handle in handles:
        # Inlined: a call per leaf is a third of the cost of wrapping one.
        out = Array()
        out._buffers = handle
        out._exclusive = True
        out._own_sharding = out._value_cache = None
        append(out)
    return treedef.unflatten(leaves)
