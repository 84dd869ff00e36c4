"""`jax.experimental.multihost_utils`; what is not here is as it is today."""

from xlashard.legacy.multihost_utils import (
    global_array_to_host_local_array,
    host_local_array_to_global_array,
    process_allgather,
)
from xlashard.multihost import assert_equal, broadcast_one_to_all, sync_global_devices

__all__ = [
    "assert_equal",
    "broadcast_one_to_all",
    "global_array_to_host_local_array",
    "host_local_array_to_global_array",
    "process_allgather",
    "sync_global_devices",
]
