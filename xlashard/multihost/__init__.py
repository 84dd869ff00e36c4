"""Programs of several processes: what each has, what all have, and what they do together."""

from xlashard.multihost.broadcast import broadcast_one_to_all
from xlashard.multihost.equal import assert_equal
from xlashard.multihost.gather import process_allgather
from xlashard.multihost.host_local import (
    global_array_to_host_local_array,
    host_local_array_to_global_array,
)

__all__ = [
    "assert_equal",
    "broadcast_one_to_all",
    "global_array_to_host_local_array",
    "host_local_array_to_global_array",
    "process_allgather",
]
