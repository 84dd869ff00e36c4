"""Comparison of a program between its processes, before its first run.

| module | contents |
|---|---|
| `fingerprint` | digest and description of a program, and the proposals of a process |
| `exchange` | exchange of proposals between the processes of a program |
| `difference` | differences of two programs, down to the line of Python |

This module has the groups of this process, and the policy of comparison.
"""

import os
import threading
from typing import TYPE_CHECKING

from xlashard._jax.runtime import coordination
from xlashard.config import read_flags
from xlashard.support.lazily import dataclass, deferred

if TYPE_CHECKING:
    from xlashard.core.processes import store
    from xlashard.core.program.consistency import exchange as groups
    from xlashard.core.program.consistency.fingerprint import (
        ProcessCopies,
        ProgramFingerprint,
        ValueNamer,
    )
else:
    store = deferred("xlashard.core.processes.store")
    groups = deferred("xlashard.core.program.consistency.exchange")


@dataclass(frozen=True)
class Policy:
    """Policy for the comparison of programs of several processes.

    Attributes:
        enabled: Whether programs are compared.
        includes_jit: Whether those of `jax.jit` are, too.
        timeout: Timeout of a process for its peers, in seconds; long, since a peer may compile
            for a long time.
    """

    enabled: bool = True
    includes_jit: bool = False
    timeout: float = 3600.0


class ConsistencyChecker:
    """Programs that this process has compared with its peers.

    A digest that matched in a group is never compared again, even if a process drops the program:
    its peers have no reason to repeat the exchange.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._groups: dict[tuple[int, ...], groups.ConsistencyGroup] = {}
        self._lock = threading.Lock()
        self._is_announced = False

    def use(self, policy: Policy) -> Policy:
        """Set the policy, and return the previous one."""
        before, self.policy = self.policy, policy
        return before

    def admit(
        self,
        fingerprint: "ProgramFingerprint",
        naming: "ValueNamer | None" = None,
        copies: "ProcessCopies" = tuple,
    ) -> bool:
        """Return once all processes of a program have arrived at its first run.

        Args:
            fingerprint: The program.
            naming: Returns the name of a closed-over value.
            copies: Returns the arguments of which every process passes its own copy.

        Returns:
            Whether the result is final; False where comparison is turned off.

        Raises:
            ProgramsDifferError: A process has another program.
            UnequalError: An argument's copies differ between processes.
            ProcessesError: A process did not arrive.
        """
        policy = self.policy
        if not is_shared(fingerprint):
            return True
        if self._is_announced == policy.enabled:
            self._announce(policy.enabled)
        if policy.enabled:
            self.group(fingerprint.group).admit(fingerprint, naming, policy.timeout, copies)
        return policy.enabled

    def compare(self, fingerprint: "ProgramFingerprint") -> None:
        """Compare a program now, whatever the policy.

        Args:
            fingerprint: The program.

        Raises:
            ProgramsDifferError: A process has another program.
            ProcessesError: A process did not arrive.
        """
        self.group(fingerprint.group).admit(fingerprint, None, self.policy.timeout)

    def group(self, processes: tuple[int, ...]) -> "groups.ConsistencyGroup":
        """Return the group of these processes."""
        with self._lock:
            return self._groups.setdefault(processes, groups.ConsistencyGroup(processes))

    def _announce(self, enabled: bool) -> None:
        """Announce to the peers whether this process takes part in comparisons."""
        key = f"{groups.UNCHECKED}/{coordination.process_index()}"
        with self._lock:
            if enabled:
                store.drop(key)
            else:
                store.write(key, b"", overwrite=True)
            self._is_announced = not enabled


def is_shared(fingerprint: "ProgramFingerprint") -> bool:
    """Return whether a program runs on devices of this process and of reachable peers."""
    group = fingerprint.group
    if len(group) < 2 or coordination.client() is None:
        return False
    return coordination.process_index() in group


_FLAGS = read_flags(os.environ)

CONSISTENCY = ConsistencyChecker(
    Policy(_FLAGS.check_programs, _FLAGS.check_jit_programs, _FLAGS.programs_timeout)
)
"""Consistency checks of this process."""
