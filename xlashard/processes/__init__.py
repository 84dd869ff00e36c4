"""What processes tell each other: a store that all share, and meetings in it.

| modules | what is in them |
|---|---|
| `store` | values by key, of any size |
| `meeting` | coming together before something that all must do |
| `sameness` | whether all have the same values, by digests, and where they differ |
"""

from xlashard.processes.meeting import Invitation, MissedError, meetings
from xlashard.processes.sameness import (
    Difference,
    Named,
    differences,
    digest,
    named_processes,
    odd_ones,
)

__all__ = [
    "Difference",
    "Invitation",
    "MissedError",
    "Named",
    "differences",
    "digest",
    "meetings",
    "named_processes",
    "odd_ones",
]
