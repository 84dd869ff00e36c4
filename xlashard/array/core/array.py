"""`Array`: one buffer handle that spans all addressable devices."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
from jax.experimental.layout import Format, Layout

from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard._jax.runtime.transfer import (
    HandleType,
    callback_result,
    collect_garbage,
    deleted_like,
    split,
    with_sharding,
)
from xlashard.array.core.base import Handle, check_alive, type_text
from xlashard.array.core.donation import DELETE, SHARD, SHARDS, record_shard, release_shards
from xlashard.array.core.indexing import Indexing
from xlashard.array.core.members import NumpyMethods, Operators
from xlashard.array.core.protocols import HostProtocols
from xlashard.array.core.shard import Shard
from xlashard.array.core.typed import Typed
from xlashard.array.host.read import BRING_HERE, start_read
from xlashard.errors import ArgumentError, NotAddressableError
from xlashard.lazily import deferred
from xlashard.sharding import Sharding, from_jax, to_jax
from xlashard.sharding.checks import is_index

if TYPE_CHECKING:
    from xlashard.array.host import to_host as gathering
    from xlashard.array.host.to_host import Policy
else:
    gathering = deferred("xlashard.array.host.to_host")


class Array(Typed, Operators, NumpyMethods, Indexing, HostProtocols):
    """An array dealt out over devices.

    It is made by a constructor (`device_put`, `make_array_from_callback`, ...), by a program, or
    from an array of JAX (`Array.from_jax`); JAX's own functions take it as it is. It never
    changes. Every operation on it runs on the devices that hold it and gives an Array again.

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
        """An array of JAX as an Array, sharing its buffers.

        Args:
            x: A concrete array. An Array comes back as it is.

        Raises:
            ArgumentError: It is a tracer, a key array, or no array of JAX.
        """
        # By its type too, for a derived class may answer `isinstance` otherwise.
        if isinstance(x, cls) and issubclass(type(x), cls):
            return x
        if type(x) is not HandleType:
            raise ArgumentError(
                f"Array.from_jax takes a concrete jax.Array, not {type(x).__name__}: "
                "device_put(x) makes one of NumPy arrays and numbers; key arrays stay jax.Arrays"
            )
        out = cls()
        out._handle = callback_result(x)
        if isinstance(x.sharding, Sharding):
            # Programs of JAX don't know our classes on their arguments.
            out._handle = with_sharding(x, to_jax(x.sharding, x.shape))
            out._own_sharding = x.sharding
        return out

    def to_jax(self) -> jax.Array:
        """JAX's own array over the same buffers."""
        return self._handle

    @property
    def aval(self) -> Any:
        """The abstract value: shape, dtype, weak type."""
        return self._buffers.aval

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dimension, over all devices."""
        return self._buffers.shape

    @property
    def dtype(self) -> np.dtype:
        """The type of the elements."""
        return self._buffers.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self._buffers.ndim

    @property
    def size(self) -> int:
        """The number of elements, over all devices, copies counted once."""
        return self._buffers.size

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes."""
        return self._buffers.itemsize

    @property
    def nbytes(self) -> int:
        """The size of all elements in bytes, copies counted once."""
        return self._buffers.nbytes

    @property
    def weak_type(self) -> bool:
        """Whether the dtype gives way to the other operand's, as a Python number's does."""
        return self._buffers.weak_type

    @property
    def sharding(self) -> Sharding:
        """Which slice is on which device.

        It is the object by which the array was placed, or an equal one; for a sharding of a class
        that a user wrote, the `GSPMDSharding` of the same tiles, which JAX understands as well.
        """
        own = self._own_sharding
        return from_jax(self._buffers.sharding) if own is None else own

    @property
    def committed(self) -> bool:
        """Whether computations with it must stay on its devices."""
        return self._buffers.committed

    @property
    def is_fully_addressable(self) -> bool:
        """Whether all its devices belong to this process."""
        return self._buffers.is_fully_addressable

    @property
    def is_fully_replicated(self) -> bool:
        """Whether each of its devices holds all of it."""
        return self._buffers.is_fully_replicated

    @property
    def layout(self) -> Layout | None:
        """The order of the dimensions in each device's memory; None where the runtime won't say."""
        check_alive(self)
        return self._buffers.format.layout

    @property
    def format(self) -> Format:
        """Layout and sharding in one, as constructors take it."""
        check_alive(self)
        sharding: Any = self.sharding
        if not isinstance(sharding, jax.sharding.Sharding):
            sharding = self._buffers.sharding
        return Format(self._buffers.format.layout, sharding)

    @property
    def device(self) -> Device | Sharding:
        """The device that holds it; the sharding if there are several."""
        check_alive(self)
        devices = self._buffers.sharding.device_set
        return next(iter(devices)) if len(devices) == 1 else self.sharding

    def devices(self) -> set[Device]:
        """All devices that hold it or a part of it, in any process."""
        check_alive(self)
        return self._buffers.devices()

    @property
    def device_buffer(self) -> Any:
        """Gone since `jax.Array` took the place of DeviceArray."""
        raise AttributeError("device_buffer is deprecated: write x.addressable_data(0)")

    @property
    def device_buffers(self) -> Any:
        """Gone since `jax.Array` took the place of ShardedDeviceArray."""
        raise AttributeError(
            "device_buffers is deprecated: write [shard.data for shard in x.addressable_shards]"
        )

    def addressable_data(self, index: int) -> "Array":
        """The data on one of this process's devices.

        Args:
            index: Which of them, in the order of the device assignment.

        Raises:
            IndexError: This process has not so many of the array's devices.
        """
        check_alive(self)
        buffers = split(self._handle)
        if not is_index(index):
            raise ArgumentError(
                f"addressable_data: index must be an integer, not {type(index).__name__}: write "
                "x.addressable_data(0)"
            )
        if not -len(buffers) <= index < len(buffers):
            advice = f"give one from 0 to {len(buffers) - 1}" if buffers else BRING_HERE
            raise IndexError(
                f"addressable_data({index}): {len(buffers)} of the array's devices are "
                f"addressable: {advice}"
            )
        return self._shard(buffers[index])

    @property
    def addressable_shards(self) -> list[Shard]:
        """The pieces on this process's devices, in the order of the device assignment."""
        check_alive(self)
        data = [self._shard(buffer) for buffer in split(self._handle)]
        return Shard.all_of(self.sharding, self.shape, data)

    def _shard(self, buffer: Handle) -> "Array":
        """Return an Array over one of the buffers, to delete which is to delete a part of this."""
        if self._buffers.sharding.num_devices > 1:
            record_shard(buffer, self)
        return wrap(buffer)

    def _lose_shard(self, taker: str) -> None:
        """Become a deleted array; Arrays over its other shards stay alive.

        The runtime would start a program with the other shards, and wait for the missing device.

        Args:
            taker: The callable that the lost shard was donated to, or `DELETE`.
        """
        if self._deleted_by is None:
            self._buffers = deleted_like(self._buffers)
            self._deleted_by = SHARD + taker
        self._value_cache = None

    @property
    def global_shards(self) -> list[Shard]:
        """The pieces on all devices; the data of other processes' is None."""
        local = {shard.device: shard for shard in self.addressable_shards}
        sharding, shape = self.sharding, self.shape
        return [local.get(device) or Shard(device, sharding, shape) for device in sharding.devices]

    def on_device_size_in_bytes(self) -> int:
        """What it takes in the memories of all its devices together, copies and padding counted.

        Raises:
            NotAddressableError: None of its devices belongs to this process.
        """
        check_alive(self)
        if self._buffers.is_fully_addressable or split(self._buffers):
            return self._buffers.on_device_size_in_bytes()
        raise NotAddressableError(  # no-catalogue: needs several processes
            f"only their own processes know what the devices of an Array {type_text(self)} hold, "
            f"and this process has none of them: use x.nbytes, or {BRING_HERE}"
        )

    def unsafe_buffer_pointer(self) -> int:
        """The address of the buffer on its only device; good as long as the array is alive.

        Raises:
            ValueError: It is on several devices.
        """
        return self._only("unsafe_buffer_pointer").unsafe_buffer_pointer()

    def unsafe_raw_buffer(self) -> Any:
        """The runtime's own object for the buffer on its only device.

        Raises:
            ValueError: It is on several devices.
        """
        return self._only("unsafe_raw_buffer").unsafe_raw_buffer()

    def _only(self, name: str) -> Any:
        check_alive(self)
        count = self._handle.sharding.num_devices
        if count != 1:
            raise ValueError(
                f"{name}() speaks of one buffer, this Array {type_text(self)} is on {count} "
                f"devices: write [shard.data.{name}() for shard in x.addressable_shards]"
            )
        return self._handle

    def platform(self) -> str:
        """The kind of devices that hold it: `"cpu"`, `"gpu"`, `"tpu"`."""
        return self._buffers.platform()

    @property
    def traceback(self) -> Any:
        """Where it was made, as the runtime recorded it."""
        return self._buffers.traceback

    def is_deleted(self) -> bool:
        """Whether its buffers are gone."""
        return self._buffers.is_deleted()

    def is_ready(self) -> bool:
        """Whether it is computed."""
        check_alive(self)
        return self._buffers.is_ready()

    def delete(self) -> None:
        """Gives its memory back at once; any later use of it is an error."""
        if not self._buffers.is_deleted():
            self._deleted_by = DELETE
        self._value_cache = None
        self._buffers.delete()
        if SHARDS:
            release_shards([self], DELETE)
        collect_garbage()

    def block_until_ready(self) -> Self:
        """Waits until it is computed."""
        try:
            self._buffers.block_until_ready()
        except RuntimeError:
            check_alive(self)
            raise
        return self

    def to_host(self, policy: "Policy" = "replicated", *, timeout: float = 60.0) -> np.ndarray:
        """The value as a read-only NumPy array, or this process's part of it; it never hangs.

        Where all of the array's devices belong to this process, every policy gives the whole value.

        Args:
            policy: `"replicated"`: the whole value, if this process holds every piece of it.
                `"local"`: the block of the array that this process's pieces make up; no other
                process is asked. `"gather"`: the whole value in every process that has one of the
                array's devices; all of them must call this.
            timeout: How long `"gather"` waits for the other processes to call it, in seconds.

        Raises:
            NotAddressableError: Pieces are in other processes (`"replicated"`), or this process's
                make up no block (`"local"`).
            ProcessesError: Processes that did not come to gather, or came with other arrays.
            DeletedError: The buffers are gone.

        Example:
            >>> import jax, numpy as np
            >>> from xlashard import device_put
            >>> device_put(np.arange(3), jax.devices()[0]).to_host("local")
            array([0, 1, 2], dtype=int32)
        """
        with short_tracebacks:
            return gathering.to_host(self, policy, timeout)

    def copy_to_host_async(self) -> None:
        """Starts bringing the value to the host, for whoever reads it soon."""
        start_read(self)


def wrap(handle: Handle, sharding: Any = None) -> Array:
    """Return an `Array` that shares the buffers of a handle.

    Args:
        handle: The handle.
        sharding: The caller's own sharding, which the array returns as `x.sharding`. One of a
            user's class, which JAX's compiled functions could not read, is left out.
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
        # Written out: a call per leaf is a third of what wrapping one costs.
        out = Array()
        out._buffers = handle
        out._exclusive = True
        append(out)
    return treedef.unflatten(leaves)


def wrap_kinds(plan: tuple[Any, tuple[type[Array], ...]], handles: Sequence[Handle]) -> Any:
    """Return the pytree of arrays of the given classes over new handles of a program, in order."""
    treedef, kinds = plan
    new, leaves = object.__new__, []
    append = leaves.append
    for kind, handle in zip(kinds, handles, strict=False):  # checking costs something, too
        out = new(kind)  # their own constructors are for people
        out._buffers = handle
        out._exclusive = True
        append(out)
    return treedef.unflatten(leaves)
