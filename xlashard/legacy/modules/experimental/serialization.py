"""Checkpoints of single arrays."""

from xlashard.legacy.modules.entry import Entry, Treatment

_HERE = "xlashard.legacy.serialization.jax_module"
_OF_GDAS = "jax.experimental.gda_serialization.serialization"
_OF_ARRAYS = "jax.experimental.array_serialization.serialization"
_FILES = "jax.experimental.array_serialization.tensorstore_impl"
_MODULE = "from jax.experimental.array_serialization import serialization"
_GONE = "0.4.12"
_ZSTD = (
    "Pieces are packed by zstd, which is faster than the era's gzip; either is read, whatever a "
    "spec says. A part that is missing is an error, where it was read as zeros."
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
        "The compressor is zstd, not gzip; `dtype` is there, which today's function leaves out.",
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
        note="A process that fails says so to the others, which raise it at once.",
    ),
    _entry("GlobalAsyncCheckpointManagerBase"),
    _entry(
        "GlobalAsyncCheckpointManager",
        note="A process that fails says so to the others, which raise it at once.",
    ),
    _entry("BarrierTimeoutError", note="It is what is raised for any failure of other processes."),
    Entry(
        _OF_ARRAYS,
        _GONE,
        "differs",
        _HERE,
        _MODULE,
        "Takes the arguments of 2022 and of today, and gives GlobalDeviceArrays without "
        "`jax_array`.",
    ),
    Entry(
        f"{_OF_ARRAYS}._get_metadata",
        "0.7.0",
        "differs",
        f"{_HERE}:_get_metadata",
        "get_tensorstore_spec(path, arr=x)['metadata']",
        "The compressor is zstd, not gzip; `dtype` is there, which today's function leaves out.",
    ),
)
