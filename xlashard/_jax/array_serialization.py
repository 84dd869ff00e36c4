"""TensorStore, and JAX's experimental checkpoint functions on top of it.

The names that are used here, some of them private, have existed since 2022.
"""

try:
    import tensorstore as tensorstore
except ModuleNotFoundError as error:
    if error.name != "tensorstore":
        raise
    raise ModuleNotFoundError(  # no-catalogue: raised at import
        "checkpoints of single arrays are files of TensorStore, which is not installed: "
        "pip install 'xlashard[legacy]'",
        name="tensorstore",
    ) from None

import copy
from typing import Any

from jax.experimental.array_serialization import serialization, tensorstore_impl

TS_CONTEXT: Any = serialization.TS_CONTEXT
"""TensorStore's limits for concurrent reads and writes, and the size of its cache."""

CHUNK_LAYOUT: Any = tensorstore_impl._TS_CHUNK_LAYOUT
"""Default chunk layout of an array whose metadata set none."""

ManagerBase = serialization.GlobalAsyncCheckpointManagerBase
"""Base class by which other libraries recognise a checkpoint manager."""

AsyncManager: Any = serialization.AsyncManager
"""Manager that waits in a thread for pending writes."""

CheckpointManager: Any = serialization.GlobalAsyncCheckpointManager
"""Manager of asynchronous checkpoints of arrays."""

LimitInFlightBytes = tensorstore_impl._LimitInFlightBytes
"""Budget of bytes in flight that concurrent reads share."""

spec_has_metadata = tensorstore_impl._spec_has_metadata
estimate_read_memory_footprint = tensorstore_impl.estimate_read_memory_footprint
is_remote_storage = serialization.is_remote_storage
get_tensorstore_spec = serialization.get_tensorstore_spec


def make_metadata(x: Any, driver: str) -> dict[str, Any]:
    """Return the metadata of JAX for an array and a TensorStore driver, which may be modified."""
    # JAX caches the metadata.
    return copy.deepcopy(tensorstore_impl._get_tensorstore_metadata(x, driver=driver))
