"""Programs of several processes: startup, host-level collectives, host-local arrays, shutdown.

The room behind it is `xlashard.pods.multihost`.
"""

from xlashard.pods.multihost.cluster_info import MutualTLS
from xlashard.pods.multihost.collective_call import barrier, sync_global_devices
from xlashard.pods.multihost.host_collectives import (
    assert_equal,
    broadcast_one_to_all,
    process_allgather,
)
from xlashard.pods.multihost.host_local_arrays import (
    global_array_to_host_local_array,
    host_local_array_to_global_array,
)
from xlashard.pods.multihost.join import Pod, initialize, leave
from xlashard.pods.multihost.program_checks import check_programs, checked_programs
from xlashard.pods.multihost.shutdown import GONE_EXIT_CODE
from xlashard.pods.multihost.watchdog import STUCK_EXIT_CODE, Watchdog

__all__ = [
    "GONE_EXIT_CODE",
    "STUCK_EXIT_CODE",
    "MutualTLS",
    "Pod",
    "Watchdog",
    "assert_equal",
    "barrier",
    "broadcast_one_to_all",
    "check_programs",
    "checked_programs",
    "global_array_to_host_local_array",
    "host_local_array_to_global_array",
    "initialize",
    "leave",
    "process_allgather",
    "sync_global_devices",
]
