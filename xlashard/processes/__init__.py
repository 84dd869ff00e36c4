"""What processes tell each other: a store that all share, and meetings in it.

| modules | what is in them |
|---|---|
| `store` | values by key, of any size |
| `meeting` | coming together before something that all must do |
| `notes`, `reporter` | what a process that waits leaves for the others, and says |
| `sameness` | whether all have the same values, by digests, and where they differ |
| `asking`, `stacks`, `calls` | what each process is doing, also where its main thread hangs |
| `connections`, `roll_call`, `lines` | who has come, before there is a store, and who is gone |
| `names` | processes in messages, and names in keys |
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
