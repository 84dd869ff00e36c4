"""Arrays before `jax.Array`, the first module of `jax.Array`, and their checkpoints."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from xlashard._jax.trace.tracing import Tracer
from xlashard.legacy.arrays.device_arrays import DeviceArray
from xlashard.legacy.arrays.shards import Device, Index, Shape
from xlashard.legacy.modules.entry import Entry, differs, moved, works, works_in
from xlashard.legacy.shardings.partition_spec import PartitionSpec
from xlashard.sharding import Sharding

ArrayLike = np.ndarray | DeviceArray
Buffer = DeviceArray
Shard = jax.Shard
device_array_types: list[Any] = [DeviceArray]


def _hashed_index(x: Index) -> int:
    """Return a hash of an index, by the bounds of its slices."""
    return hash(tuple((entry.start, entry.stop) for entry in x))


class _GdaFastPathArgs(NamedTuple):
    """Precomputed arguments of the constructor, which ignores them."""

    global_indices_replica_ids: Mapping[Device, tuple[Index, int]]
    local_devices: Sequence[Device]


class _ArrayType(type):
    """Metaclass that counts concrete arrays of JAX and of this package as instances."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, jax.Array) and not isinstance(instance, Tracer)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls or issubclass(subclass, jax.Array)


class Array(metaclass=_ArrayType):
    """Array class: every concrete `jax.Array` is an instance, and calling it makes one.

    Example:
        >>> one = jax.numpy.ones(3)
        >>> made = Array(one.aval, one.sharding, [one], committed=True)
        >>> isinstance(made, Array), made.shape
        (True, (3,))
    """

    def __new__(
        cls,
        aval: Any,
        sharding: Any,
        arrays: Sequence[jax.Array],
        committed: bool = True,
        _skip_checks: bool = False,
    ) -> Any:
        """Make an array of single-device arrays.

        Args:
            aval: Its type, or its shape.
            sharding: Its sharding.
            arrays: An array on each of this process's devices.
            committed: Not used: an array over given devices is committed to them.
            _skip_checks: Not used.
        """
        return jax.make_array_from_single_device_arrays(
            tuple(getattr(aval, "shape", aval)), sharding, arrays
        )


_GDA = "jax.experimental.global_device_array"
_ARRAY = "jax.experimental.array"
_DEVICE_ARRAY = "jax._src.device_array"
_DEVICE_ARRAYS = "xlashard.legacy.arrays.device_arrays"
_SHARDS = "xlashard.legacy.arrays.shards"
_MAKE = "jax.make_array_from_callback(shape, NamedSharding(mesh, P(...)), data_callback)"
_KEPT = "The mapping is immutable, because it is cached."
_IS_INSTANCE = "`isinstance` is True for every fully addressable array, including today's."

_SERIALIZATION = "xlashard.legacy.serialization"
_OF_GDAS = "jax.experimental.gda_serialization.serialization"
_OF_ARRAYS = "jax.experimental.array_serialization.serialization"
_FILES = "jax.experimental.array_serialization.tensorstore_impl"
_MODULE = "from jax.experimental.array_serialization import serialization"
_ZSTD = (
    "Shards are compressed with zstd, which is faster than gzip; both are read, whatever the spec. "
    "A missing chunk is an error instead of zeros."
)
_ERRORS = "An error of one process is raised in all processes immediately."
_METADATA = (
    "get_tensorstore_spec(path, arr=x)['metadata']",
    "The compressor is zstd, not gzip; `dtype` is included, which today's function omits.",
)

ENTRIES: tuple[Entry, ...] = (
    Entry(_DEVICE_ARRAY, "0.4.14", "works", __name__, "jax.Array"),
    *works_in(
        _DEVICE_ARRAY,
        {
            _DEVICE_ARRAYS: (
                ("DeviceArray", "0.4.14", "jax.Array"),
                ("_DeviceArray", "0.4.14", "jax.Array"),
                ("make_device_array", "0.4.14", "jax.device_put(buffer, device)"),
            )
        },
    ),
    Entry(_ARRAY, "0.4.4", "works", __name__, "jax.Array"),
    *works(
        _ARRAY,
        "0.4.4",
        __name__,
        Array=("jax.Array", "`isinstance` holds for every concrete `jax.Array`."),
    ),
    *moved(
        _ARRAY,
        "0.4.4",
        "jax",
        *("make_array_from_callback", "make_array_from_single_device_arrays"),
    ),
    Entry(_GDA, "0.4.7", "works", __name__, "jax.Array"),
    *differs(
        _GDA,
        "0.4.7",
        "xlashard.legacy.arrays.gda",
        GlobalDeviceArray=(
            _MAKE,
            "It is also an Array: operations on it return Arrays. The constructor checks its "
            "arguments even with `_enable_checks=False`, and pickling includes the mesh.",
        ),
    ),
    *differs(
        _GDA,
        "0.4.7",
        _SHARDS,
        Shard=(
            "x.addressable_shards",
            "Shards are equal if device, index and replica id are.",
        ),
        get_shard_indices=("NamedSharding(mesh, P(...)).devices_indices_map(shape)", _KEPT),
        get_shard_indices_replica_ids=(
            "[(s.index, s.replica_id) for s in x.global_shards]",
            _KEPT,
        ),
        get_shard_shape=(
            "NamedSharding(mesh, P(...)).shard_shape(shape)",
            "A dimension that is not divisible is an error; its size was rounded down.",
        ),
    ),
    *works(
        _GDA,
        "0.4.7",
        __name__,
        _GdaFastPathArgs=_MAKE,
        _hashed_index="hash(tuple((s.start, s.stop) for s in index))",
        Device="jax.Device",
        DeviceArray="jax.Array",
        ArrayLike="jax.typing.ArrayLike",
        Index="tuple[slice, ...]",
        Shape="tuple[int, ...]",
    ),
    *works_in(
        _GDA,
        {
            _SHARDS: (
                ("MeshAxes", "0.4.7", "jax.sharding.PartitionSpec"),
                ("_get_shard_indices_replica_ids_uncached", "0.4.7", "x.global_shards"),
            )
        },
    ),
    *differs("jax.numpy", "0.4.14", _DEVICE_ARRAYS, DeviceArray=("jax.Array", _IS_INSTANCE)),
    # Today's arrays are instances of the classes of 2022, so they need their members.
    *works_in(
        "jax.Array",
        {
            f"{_DEVICE_ARRAYS}:LegacyArray": (
                ("device_buffer", "0.4.22", "x.addressable_data(0)"),
                ("device_buffers", "0.4.22", "[shard.data for shard in x.addressable_shards]"),
                ("sharding_spec", "0.4.7", "x.sharding"),
                ("indices", "0.4.7", "x.sharding.devices_indices_map(x.shape)"),
                ("one_replica_buffer_indices", "0.4.7", "shard.replica_id == 0"),
                ("to_py", "0.4.7", "np.asarray(x)"),
            )
        },
    ),
    Entry(
        "jax.Device.__call__",
        "0.4.27",
        "works",
        f"{_DEVICE_ARRAYS}:device_itself",
        "x.device",
        "`x.device()` was a method; `x.device` is the device today, and calling it returns it.",
    ),
    Entry(_OF_GDAS, "0.4.12", "works", _SERIALIZATION, _MODULE),
    *works(
        _OF_GDAS,
        "0.4.12",
        _SERIALIZATION,
        get_tensorstore_spec=f"{_OF_ARRAYS}.get_tensorstore_spec",
        _spec_has_metadata="'metadata' in spec",
        TS_CONTEXT=f"{_OF_ARRAYS}.TS_CONTEXT",
        _LimitInFlightBytes=f"{_OF_ARRAYS}._LimitInFlightBytes",
        estimate_read_memory_footprint=f"{_FILES}.estimate_read_memory_footprint",
        GlobalAsyncCheckpointManagerBase=f"{_OF_ARRAYS}.GlobalAsyncCheckpointManagerBase",
    ),
    *differs(
        _OF_GDAS,
        "0.4.12",
        _SERIALIZATION,
        _get_metadata=_METADATA,
        async_serialize=(f"{_OF_ARRAYS}.async_serialize", _ZSTD),
        async_deserialize=(f"{_OF_ARRAYS}.async_deserialize", _ZSTD),
        run_serialization=(f"{_OF_ARRAYS}.run_serialization", _ZSTD),
        run_deserialization=(f"{_OF_ARRAYS}.run_deserialization", _ZSTD),
        AsyncManager=(f"{_OF_ARRAYS}.AsyncManager", _ERRORS),
        GlobalAsyncCheckpointManager=(f"{_OF_ARRAYS}.GlobalAsyncCheckpointManager", _ERRORS),
        BarrierTimeoutError=(
            f"{_OF_ARRAYS}.BarrierTimeoutError",
            "It is raised for every failure of another process.",
        ),
    ),
    Entry(
        _OF_ARRAYS,
        "0.4.12",
        "differs",
        _SERIALIZATION,
        _MODULE,
        "It takes the arguments of 2022 and today's, and returns GlobalDeviceArrays with "
        "`jax_array` off.",
    ),
    *differs(_OF_ARRAYS, "0.7.0", _SERIALIZATION, _get_metadata=_METADATA),
)
