"""Checkpoints as programs of the era wrote them: each array by itself, in files of TensorStore.

| modules | what is in them |
|---|---|
| `specs` | where an array is stored, and what is written down beside it |
| `forms` | the two ways in which programs say what they want to read |
| `writing`, `reading` | arrays to files and back |
| `coroutines` | running those to their end, also in a notebook |
| `commits`, `manager` | writing on while the program does, and when all processes are done |
"""

from xlashard._jax.serialization import TS_CONTEXT, LimitInFlightBytes
from xlashard.legacy.serialization.manager import AsyncManager, GlobalAsyncCheckpointManager
from xlashard.legacy.serialization.reading import async_deserialize, run_deserialization
from xlashard.legacy.serialization.specs import get_metadata, get_tensorstore_spec
from xlashard.legacy.serialization.writing import async_serialize, run_serialization

__all__ = [
    "TS_CONTEXT",
    "AsyncManager",
    "GlobalAsyncCheckpointManager",
    "LimitInFlightBytes",
    "async_deserialize",
    "async_serialize",
    "get_metadata",
    "get_tensorstore_spec",
    "run_deserialization",
    "run_serialization",
]
