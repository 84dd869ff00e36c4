"""The agreements of this process with others, and whether and how long it looks for them."""

import threading
from typing import TYPE_CHECKING

from xlashard._jax.runtime import coordination
from xlashard.lazily import dataclass, deferred

if TYPE_CHECKING:
    from xlashard.processes import store
    from xlashard.program.consistency import group as meeting
    from xlashard.program.consistency.fingerprint import ProgramFingerprint, ValueNamer
else:
    store = deferred("xlashard.processes.store")
    meeting = deferred("xlashard.program.consistency.group")


@dataclass(frozen=True)
class Policy:
    """How programs of several processes are compared.

    Attributes:
        enabled: Whether they are.
        timeout: How long a process waits for the others, in seconds. Compiling elsewhere may take
            long, and so this is long.
    """

    enabled: bool = True
    timeout: float = 3600.0


class ConsistencyChecker:
    """What this process has agreed on with others.

    A digest that a group has agreed on stays so, whoever forgets the program: nobody waits for
    others that have no reason to come again.
    """

    def __init__(self) -> None:
        self.policy = Policy()
        self._groups: dict[tuple[int, ...], meeting.Group] = {}
        self._lock = threading.Lock()
        self._is_said = False

    def use(self, policy: Policy) -> Policy:
        """Compare programs by a policy from now on; gives the one before."""
        before, self.policy = self.policy, policy
        return before

    def admit(self, fingerprint: "ProgramFingerprint", naming: "ValueNamer | None" = None) -> bool:
        """Return once all processes of a program have come to run it for the first time.

        Args:
            fingerprint: The program.
            naming: Names the values that its function closes over.

        Returns:
            Whether that is settled for good; not where comparing is turned off.

        Raises:
            ProgramsDifferError: They have another one.
            ProcessesError: Some did not come.
        """
        policy = self.policy
        if not is_shared(fingerprint):
            return True
        if self._is_said == policy.enabled:
            self._say(policy.enabled)
        if policy.enabled:
            self.group(fingerprint.group).admit(fingerprint, naming, policy.timeout)
        return policy.enabled

    def compare(self, fingerprint: "ProgramFingerprint") -> None:
        """Return the same for those who need it before they run a program, and in any case.

        Args:
            fingerprint: The program.

        Raises:
            ProgramsDifferError: They have another one.
            ProcessesError: Some did not come.
        """
        self.group(fingerprint.group).admit(fingerprint, None, self.policy.timeout)

    def group(self, processes: tuple[int, ...]) -> "meeting.Group":
        """Return the group of these processes."""
        with self._lock:
            return self._groups.setdefault(processes, meeting.Group(processes))

    def _say(self, enabled: bool) -> None:
        """Announce to the peers whether this process takes part in comparisons."""
        key = f"{meeting.UNCHECKED}/{coordination.process_index()}"
        with self._lock:
            if enabled:
                store.drop(key)
            else:
                store.write(key, b"", overwrite=True)
            self._is_said = not enabled


def is_shared(fingerprint: "ProgramFingerprint") -> bool:
    """Return whether a program runs on devices of this process and of others that it can ask."""
    group = fingerprint.group
    if len(group) < 2 or coordination.client() is None:
        return False
    return coordination.process_index() in group


CONSISTENCY = ConsistencyChecker()
"""The agreements of this process."""
