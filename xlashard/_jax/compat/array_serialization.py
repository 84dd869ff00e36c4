"""TensorStore, and what JAX has for checkpoints on top of it.

JAX calls that module experimental; what is taken from it has been there under the same names since
2022, some of it with an underscore.
"""

try:
    import tensorstore
except ModuleNotFoundError as error:
    if error.name != "tensorstore":
        raise
    raise ModuleNotFoundError(  # no-catalogue: raised at import
        "checkpoints of single arrays are files of TensorStore, which is not installed: "
        "pip install 'xlashard[legacy]'",
        name="tensorstore",
    ) from None

from collections.abc import Mapping
from typing import Any

from jax.experimental.array_serialization import serialization, tensorstore_impl

TS_CONTEXT: Any = serialization.TS_CONTEXT
"""How much TensorStore reads and writes at a time, and how much it keeps of what it read."""

CHUNK_LAYOUT: Any = tensorstore_impl._TS_CHUNK_LAYOUT
"""How an array is cut into files where its metadata leave that open."""

ManagerBase = serialization.GlobalAsyncCheckpointManagerBase
"""What libraries of today ask of a checkpoint manager whether it is one."""

LimitInFlightBytes = tensorstore_impl._LimitInFlightBytes
"""A number of bytes that reads share out among each other."""

spec_has_metadata = tensorstore_impl._spec_has_metadata
estimate_read_memory_footprint = tensorstore_impl.estimate_read_memory_footprint
is_remote_storage = serialization.is_remote_storage
get_tensorstore_spec = serialization.get_tensorstore_spec


def metadata_of_driver(x: Any, driver: str) -> Mapping[str, Any]:
    """What JAX lets a driver other than the era's write down beside an array."""
    return tensorstore_impl._get_tensorstore_metadata(x, driver=driver)


__all__ = [
    "CHUNK_LAYOUT",
    "TS_CONTEXT",
    "LimitInFlightBytes",
    "ManagerBase",
    "estimate_read_memory_footprint",
    "get_tensorstore_spec",
    "is_remote_storage",
    "metadata_of_driver",
    "spec_has_metadata",
    "tensorstore",
]
