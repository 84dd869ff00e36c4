"""Entries of the names of the array classes before `jax.Array`, and of their checkpoints."""

from xlashard.legacy.entries.entry import EntryTable, moved, works

_HERE = "xlashard.legacy.modules.arrays"
_DEVICE_ARRAYS = "xlashard.legacy.arrays.device_arrays"

_LEGACY = f"{_DEVICE_ARRAYS}:LegacyArray."

_SHARDS = "xlashard.legacy.arrays.shards"

_MAKE = "jax.make_array_from_callback(shape, NamedSharding(mesh, P(...)), data_callback)"

_KEPT = "The mapping is immutable, because it is cached."

_IS_INSTANCE = "`isinstance` is True for every fully addressable array, including today's."

_SERIALIZATION = "xlashard.legacy.serialization"

_OF_ARRAYS = "jax.experimental.array_serialization.serialization"

_FILES = "jax.experimental.array_serialization.tensorstore_impl"

_MODULE = "from jax.experimental.array_serialization import serialization"

_READING = (
    "Files of every compressor are read, whatever the spec. "
    "A missing chunk is an error instead of zeros."
)

_METADATA = "get_tensorstore_spec(path, arr=x)['metadata']"

_DTYPE = "`dtype` is included, and the compressor is gzip; today's are zstd, without `dtype`."

_ERRORS = "An error of one process is raised in all processes immediately."

ENTRIES: EntryTable = {
    "jax._src.device_array": {
        "": works("0.4.14", "jax.Array"),
        "DeviceArray": works("0.4.14", "jax.Array", _DEVICE_ARRAYS),
        "_DeviceArray": works("0.4.14", "jax.Array", _DEVICE_ARRAYS),
        "make_device_array": works("0.4.14", "jax.device_put(buffer, device)", _DEVICE_ARRAYS),
    },
    "jax.experimental.array": {
        "": works("0.4.4", "jax.Array"),
        "Array": works("0.4.4", "jax.Array").noting(
            "`isinstance` holds for every concrete `jax.Array`."
        ),
        **moved(
            "0.4.4", "jax", *("make_array_from_callback", "make_array_from_single_device_arrays")
        ),
    },
    "jax.experimental.global_device_array": {
        "": works("0.4.7", "jax.Array"),
        "GlobalDeviceArray": works("0.4.7", _MAKE, "xlashard.legacy.arrays.gda").but(
            "It is also an Array: operations on it return Arrays. The constructor checks its "
            "arguments even with `_enable_checks=False`, and pickling includes the mesh."
        ),
        "Shard": works("0.4.7", "x.addressable_shards", _SHARDS).but(
            "Shards are equal if device, index and replica id are."
        ),
        "get_shard_indices": works(
            "0.4.7", "NamedSharding(mesh, P(...)).devices_indices_map(shape)", _SHARDS
        ).but(_KEPT),
        "get_shard_indices_replica_ids": works(
            "0.4.7", "[(s.index, s.replica_id) for s in x.global_shards]", _SHARDS
        ).but(_KEPT),
        "get_shard_shape": works(
            "0.4.7", "NamedSharding(mesh, P(...)).shard_shape(shape)", _SHARDS
        ).but("A dimension that is not divisible is an error; its size was rounded down."),
        "_GdaFastPathArgs": works("0.4.7", _MAKE, f"{_HERE}:_GdaFastPathArgs"),
        "_hashed_index": works("0.4.7", "hash(tuple((s.start, s.stop) for s in index))"),
        "Device": works("0.4.7", "jax.Device"),
        "DeviceArray": works("0.4.7", "jax.Array"),
        "ArrayLike": works("0.4.7", "jax.typing.ArrayLike"),
        "Index": works("0.4.7", "tuple[slice, ...]"),
        "Shape": works("0.4.7", "tuple[int, ...]"),
        "MeshAxes": works("0.4.7", "jax.sharding.PartitionSpec", _SHARDS),
        "_get_shard_indices_replica_ids_uncached": works("0.4.7", "x.global_shards", _SHARDS),
    },
    "jax.numpy": {"DeviceArray": works("0.4.14", "jax.Array", _DEVICE_ARRAYS).but(_IS_INSTANCE)},
    "jax.Array": {
        "device_buffer": works("0.4.22", "x.addressable_data(0)", _LEGACY),
        "device_buffers": works(
            "0.4.22", "[shard.data for shard in x.addressable_shards]", _LEGACY
        ),
        "sharding_spec": works("0.4.7", "x.sharding", _LEGACY),
        "indices": works("0.4.7", "x.sharding.devices_indices_map(x.shape)", _LEGACY),
        "one_replica_buffer_indices": works("0.4.7", "shard.replica_id == 0", _LEGACY),
        "to_py": works("0.4.7", "np.asarray(x)", _LEGACY),
    },
    "jax.Device": {
        "__call__": works("0.4.27", "x.device", f"{_DEVICE_ARRAYS}:device_itself").noting(
            "`x.device()` was a method; `x.device` is the device today, and calling it returns it."
        )
    },
    "jax.experimental.gda_serialization.serialization": {
        "": works("0.4.12", _MODULE, _SERIALIZATION),
        "_spec_has_metadata": works("0.4.12", "'metadata' in spec", _SERIALIZATION),
        "estimate_read_memory_footprint": works(
            "0.4.12", f"{_FILES}.estimate_read_memory_footprint", _SERIALIZATION
        ),
        **{
            name: works("0.4.12", f"{_OF_ARRAYS}.{name}", _SERIALIZATION)
            for name in (
                *("get_tensorstore_spec", "TS_CONTEXT", "_LimitInFlightBytes"),
                "GlobalAsyncCheckpointManagerBase",
            )
        },
        **{
            name: works("0.4.12", f"{_OF_ARRAYS}.{name}", _SERIALIZATION).but(note)
            for name, note in (
                ("async_serialize", _READING),
                ("async_deserialize", _READING),
                ("run_serialization", _READING),
                ("run_deserialization", _READING),
                ("AsyncManager", _ERRORS),
                ("GlobalAsyncCheckpointManager", _ERRORS),
                ("BarrierTimeoutError", "It is raised for every failure of another process."),
            )
        },
        "_get_metadata": works("0.4.12", _METADATA, _SERIALIZATION).but(_DTYPE),
    },
    _OF_ARRAYS: {
        "": works("0.4.12", _MODULE, _SERIALIZATION).but(
            "It takes the arguments of 2022 and today's, and returns GlobalDeviceArrays with "
            "`jax_array` off."
        ),
        "_get_metadata": works("0.7.0", _METADATA, _SERIALIZATION).but(_DTYPE),
    },
}
