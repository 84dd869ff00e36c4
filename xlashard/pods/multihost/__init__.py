"""Programs of several processes: startup, host-level collectives, host-local arrays, shutdown.

| modules | contents |
|---|---|
| `join`, `cluster_info` | `initialize`, `leave`, cluster detection, launch commands |
| `startup_barrier`, `connections` | barrier before JAX's runtime starts; killed peers |
| `shutdown` | exit of this process, and of peers that failed |
| `watchdog` | detection of a stalled program |
| `hang_report`, `job_socket` | state of all processes, for a watchdog and for `xlashard hosts` |
| `collective_call` | leaves that processes exchange, and agreement on calls; `barrier` |
| `host_collectives` | values of pytrees exchanged or compared between processes |
| `host_local_arrays`, `host_mesh` | conversion between host-local and global arrays |
| `consistency` | comparison of replicated inputs, and of programs before their first run |

The public names are in `xlashard.multihost`.
"""
