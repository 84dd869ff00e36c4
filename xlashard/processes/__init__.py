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

from xlashard.processes.meeting import Invitation, MissedError, checked_seconds, meetings
from xlashard.processes.names import grouped, named_processes, processes_of, told_by_process
from xlashard.processes.sameness import (
    Difference,
    Named,
    differences,
    digest,
    odd_ones,
    told_differences,
)

__all__ = [
    "Difference",
    "Invitation",
    "MissedError",
    "Named",
    "checked_seconds",
    "differences",
    "digest",
    "grouped",
    "meetings",
    "named_processes",
    "odd_ones",
    "processes_of",
    "told_by_process",
    "told_differences",
]
