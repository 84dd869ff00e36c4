"""`jax.experimental.gda_serialization.serialization`, and what took its place in 2023."""

from xlashard._jax.compat.array_serialization import (
    TS_CONTEXT,
    ManagerBase,
    estimate_read_memory_footprint,
    spec_has_metadata,
)
from xlashard._jax.compat.array_serialization import LimitInFlightBytes as _LimitInFlightBytes
from xlashard.errors import ProcessesError
from xlashard.legacy.serialization import (
    AsyncManager,
    GlobalAsyncCheckpointManager,
    async_deserialize,
    async_serialize,
    get_tensorstore_spec,
    run_deserialization,
    run_serialization,
)
from xlashard.legacy.serialization import get_metadata as _get_metadata

BarrierTimeoutError = ProcessesError
GlobalAsyncCheckpointManagerBase = ManagerBase
_spec_has_metadata = spec_has_metadata

__all__ = [
    "TS_CONTEXT",
    "AsyncManager",
    "BarrierTimeoutError",
    "GlobalAsyncCheckpointManager",
    "GlobalAsyncCheckpointManagerBase",
    "_LimitInFlightBytes",
    "_get_metadata",
    "_spec_has_metadata",
    "async_deserialize",
    "async_serialize",
    "estimate_read_memory_footprint",
    "get_tensorstore_spec",
    "run_deserialization",
    "run_serialization",
]
