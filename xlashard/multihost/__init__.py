"""Programs of several processes: what each has, what all have, and what they do together."""

from xlashard.multihost.host_local import (
    global_array_to_host_local_array,
    host_local_array_to_global_array,
)

__all__ = [
    "global_array_to_host_local_array",
    "host_local_array_to_global_array",
]
