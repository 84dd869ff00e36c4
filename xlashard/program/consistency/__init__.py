"""Comparison of a program between its processes, before its first run.

| module | contents |
|---|---|
| `fingerprint` | digest and description of a program, and the proposals of a process |
| `exchange` | exchange of proposals between the processes of a program |
| `checker` | all groups of this process, and the policy of comparison |
| `difference`, `listing` | differences of two programs, down to the line of Python |
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
