"""Programs of several processes: coming together, what each has, and what all do together.

| modules | what is in them |
|---|---|
| `initialize` | making this process one of several |
| `environments`, `place`, `coming`, `security` | where it runs, who it is, and meeting the others |
| `ending`, `gone` | how a program of several processes ends |
| `barriers`, `watchdog`, `stuck` | waiting for the others, and saying who does not get on |
| `programs` | whether programs are compared |
| `gather`, `broadcast`, `equal` | values between processes |
| `calls`, `leaves`, `packing` | what those have in common: meeting, reading trees, sending bytes |
| `host_local` | host-local arrays and global ones |
| `host_mesh`, `views`, `linear` | a process's box of a mesh, and arrays seen through it |
| `parts`, `pieces` | whether what processes give or hold fits together |
"""

from xlashard.multihost.assert_equal import assert_equal
from xlashard.multihost.barriers import barrier, sync_global_devices
from xlashard.multihost.host_collectives import broadcast_one_to_all, process_allgather
from xlashard.multihost.host_local.convert import (
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
