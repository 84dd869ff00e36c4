"""`jax.experimental.gda_serialization` and `array_serialization`: checkpoints of single arrays."""

from xlashard.legacy.modules.entry import Entry, Treatment

_HERE = "xlashard.legacy.serialization"
_OF_GDAS = "jax.experimental.gda_serialization.serialization"
_OF_ARRAYS = "jax.experimental.array_serialization.serialization"
_FILES = "jax.experimental.array_serialization.tensorstore_impl"
_MODULE = "from jax.experimental.array_serialization import serialization"
_GONE = "0.4.12"
_ZSTD = (
    "Shards are compressed with zstd, which is faster than gzip; both are read, whatever the spec. "
    "A missing chunk is an error instead of zeros."
)


def _entry(name: str, today: str = "", note: str = "") -> Entry:
    treatment: Treatment = "differs" if note else "works"
    today = today or f"{_OF_ARRAYS}.{name}"
    return Entry(f"{_OF_GDAS}.{name}", _GONE, treatment, f"{_HERE}:{name}", today, note)


ENTRIES: tuple[Entry, ...] = (
    Entry(_OF_GDAS, _GONE, "works", _HERE, _MODULE),
    _entry("get_tensorstore_spec"),
    _entry(
        "_get_metadata",
        "get_tensorstore_spec(path, arr=x)['metadata']",
        "The compressor is zstd, not gzip; `dtype` is included, which today's function omits.",
    ),
    _entry("_spec_has_metadata", "'metadata' in spec"),
    _entry("TS_CONTEXT"),
    _entry("_LimitInFlightBytes"),
    _entry("estimate_read_memory_footprint", f"{_FILES}.estimate_read_memory_footprint"),
    _entry("async_serialize", note=_ZSTD),
    _entry("async_deserialize", note=_ZSTD),
    _entry("run_serialization", note=_ZSTD),
    _entry("run_deserialization", note=_ZSTD),
    _entry(
        "AsyncManager",
        note="An error of one process is raised in all processes immediately.",
    ),
    _entry("GlobalAsyncCheckpointManagerBase"),
    _entry(
        "GlobalAsyncCheckpointManager",
        note="An error of one process is raised in all processes immediately.",
    ),
    _entry("BarrierTimeoutError", note="It is raised for every failure of another process."),
    Entry(
        _OF_ARRAYS,
        _GONE,
        "differs",
        _HERE,
        _MODULE,
        "It takes the arguments of 2022 and today's, and returns GlobalDeviceArrays with "
        "`jax_array` off.",
    ),
    Entry(
        f"{_OF_ARRAYS}._get_metadata",
        "0.7.0",
        "differs",
        f"{_HERE}:_get_metadata",
        "get_tensorstore_spec(path, arr=x)['metadata']",
        "The compressor is zstd, not gzip; `dtype` is included, which today's function omits.",
    ),
)
