"""Communication between the processes of one program: shared keys, barriers and liveness.

| modules | contents |
|---|---|
| `store` | key-value store shared by all processes, for values of any size |
| `rendezvous` | barriers that exchange one text per process |
| `wait_graph` | published status of waiting processes, and deadlock detection |
| `equality` | comparison of values between processes, by digests |
| `stack_dump` | Python stacks of every process, also of a hung one |
| `startup_barrier` | TCP barrier before JAX's runtime starts |
| `connections` | TCP connections that stay open, and detection of killed peers |
| `process_groups` | formatting of process lists, and grouping by value |
"""

from xlashard.processes.equality import (
    NamedValue,
    ValueDifference,
    differences,
    digest,
    format_differences,
    minority,
)
from xlashard.processes.process_groups import (
    format_by_process,
    format_processes,
    group_by_value,
    processes_of,
)
from xlashard.processes.rendezvous import RENDEZVOUS, Barrier, BarrierTimeoutError, checked_seconds

__all__ = [
    "RENDEZVOUS",
    "Barrier",
    "BarrierTimeoutError",
    "NamedValue",
    "ValueDifference",
    "checked_seconds",
    "differences",
    "digest",
    "format_by_process",
    "format_differences",
    "format_processes",
    "group_by_value",
    "minority",
    "processes_of",
]
