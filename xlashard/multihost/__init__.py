"""Programs of several processes: startup, host-level collectives, host-local arrays, shutdown.

| modules | contents |
|---|---|
| `lifecycle/` | `initialize`, cluster detection, watchdog, failed peers, shutdown |
| `barriers` | `barrier` and `sync_global_devices` |
| `host_collectives`, `assert_equal` | values of pytrees exchanged or compared between processes |
| `collective_call`, `leaves`, `packing` | agreement on calls, reading of trees, transport |
| `host_local/` | conversion between host-local and global arrays |
| `consistency` | equality of data that several processes provide for one array |
| `program_checks` | setting of the comparison of programs before their first run |
"""

from xlashard.multihost.assert_equal import assert_equal
from xlashard.multihost.barriers import barrier, sync_global_devices
from xlashard.multihost.host_collectives import broadcast_one_to_all, process_allgather
from xlashard.multihost.host_local.conversions import (
    global_array_to_host_local_array,
    host_local_array_to_global_array,
)
from xlashard.multihost.lifecycle.cluster_info import MutualTLS
from xlashard.multihost.lifecycle.initialize import Pod, initialize, leave
from xlashard.multihost.lifecycle.peer_failure import GONE_EXIT_CODE
from xlashard.multihost.lifecycle.watchdog import STUCK_EXIT_CODE, Watchdog
from xlashard.multihost.program_checks import check_programs, checked_programs

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
