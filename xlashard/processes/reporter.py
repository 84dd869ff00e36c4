"""What a process does while it waits for others: says so, and looks whether that is in vain."""

import logging
import threading
from collections.abc import Callable

from xlashard._jax import coordination
from xlashard.processes.names import named_processes
from xlashard.processes.notes import InVain, Wait, caller, in_vain, own_note, read_note

logger = logging.getLogger("xlashard.processes")
"""Says whom this process waits for."""

# Seconds after which it is said: twice as long each time.
_FIRST = 10.0
# Whose doing a message tells.
_SHOWN = 4


class Reporter:
    """One wait of this thread, from when it takes longer than a moment.

    Args:
        what: What is waited for, in words.
        folder: The folder of the meeting.
        told: Is told, too, who is missing and for how many seconds.
    """

    def __init__(
        self, what: str, folder: str, told: Callable[[tuple[int, ...], float], None] | None
    ) -> None:
        self._what = what
        self._folder = folder
        self._told = told
        self._where = ""
        self._next = _FIRST
        self._suspected: InVain | None = None

    def look(self, missing: tuple[int, ...], seconds: float) -> InVain | None:
        """To be called about once a second. Whether waiting on is in vain."""
        if self._told is not None:
            self._told(missing, seconds)
        self._where = self._where or caller()
        main = threading.current_thread() is threading.main_thread()
        wait = Wait(self._what, self._where, main, self._folder, missing)
        own_note.begin(wait)
        if seconds >= self._next:
            self._next = max(2 * self._next, seconds)
            doing = doing_text(missing)
            logger.warning(
                "%s: still waiting for %s (%.0f s)%s",
                self._what,
                named_processes(missing),
                seconds,
                f": {doing}" if doing else "",
            )
        before, self._suspected = self._suspected, in_vain(coordination.process_index(), wait)
        found = self._suspected
        if found is not None and (found.certain or (before and before.notes == found.notes)):
            return found
        return None

    def done(self) -> None:
        """The waiting is over."""
        if self._where:
            own_note.finish()


def doing_text(processes: tuple[int, ...]) -> str:
    """What some processes do instead of coming, as far as they say."""
    told = [(process, read_note(process)) for process in processes[:_SHOWN]]
    return ", ".join(f"process {process} {note}" for process, note in told if note.number)
