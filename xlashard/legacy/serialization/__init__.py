"""Checkpoints of single arrays in TensorStore, as programs of 2022 and 2023 wrote them.

The private names are those of `jax.experimental.gda_serialization.serialization`.

| file | contents |
|---|---|
| `tensorstore_specs` | TensorStore specs, errors that name their path, and running of coroutines |
| `array_writing` | arrays to TensorStore |
| `reading` | arrays from TensorStore, by both signatures of 2022 |
| `manager` | asynchronous checkpoints that all processes commit together |
"""

from xlashard._jax.array_serialization import (
    TS_CONTEXT,
    LimitInFlightBytes,
    ManagerBase,
    estimate_read_memory_footprint,
    spec_has_metadata,
)
from xlashard.errors import ProcessesError
from xlashard.legacy.serialization.array_writing import async_serialize, run_serialization
from xlashard.legacy.serialization.manager import AsyncManager, GlobalAsyncCheckpointManager
from xlashard.legacy.serialization.reading import async_deserialize, run_deserialization
from xlashard.legacy.serialization.tensorstore_specs import get_metadata, get_tensorstore_spec

BarrierTimeoutError = ProcessesError
GlobalAsyncCheckpointManagerBase = ManagerBase
_LimitInFlightBytes = LimitInFlightBytes
_get_metadata = get_metadata
_spec_has_metadata = spec_has_metadata

__all__ = [
    "TS_CONTEXT",
    "AsyncManager",
    "BarrierTimeoutError",
    "GlobalAsyncCheckpointManager",
    "GlobalAsyncCheckpointManagerBase",
    "LimitInFlightBytes",
    "async_deserialize",
    "async_serialize",
    "estimate_read_memory_footprint",
    "get_metadata",
    "get_tensorstore_spec",
    "run_deserialization",
    "run_serialization",
]
