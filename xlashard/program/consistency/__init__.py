"""Programs that agree: the processes of one compare it before they run it for the first time.

| modules | what is in them |
|---|---|
| `fingerprint` | what they must have in common, as a digest and, for errors, in words |
| `subject` | what a process says when it comes |
| `group` | coming together, and what follows |
| `agreements` | all groups of this process, and whether and how long it looks for them |
| `difference`, `listing`, `message` | in what two programs differ, down to the line of Python |
"""

import typing as _typing

from xlashard.lazily import on_demand as _on_demand
from xlashard.program.consistency.checker import CONSISTENCY, ConsistencyChecker, Policy, is_shared

if _typing.TYPE_CHECKING:
    from xlashard.program.consistency.fingerprint import ClosedOver, ProgramFingerprint, ValueNamer
else:
    _fingerprint = {
        "xlashard.program.consistency.fingerprint": (
            "ClosedOver",
            "ValueNamer",
            "ProgramFingerprint",
        )
    }
    __getattr__, __dir__ = _on_demand(__name__, globals(), _fingerprint)

__all__ = [
    "CONSISTENCY",
    "ClosedOver",
    "ConsistencyChecker",
    "Policy",
    "ProgramFingerprint",
    "ValueNamer",
    "is_shared",
]
