"""What processes tell each other: a store that all share, and meetings in it.

| modules | what is in them |
|---|---|
| `store` | values by key, of any size |
| `meeting` | coming together before something that all must do |
"""

from xlashard.processes.meeting import Invitation, MissedError, meetings

__all__ = ["Invitation", "MissedError", "meetings"]
