"""Coming together with the other processes, in the words of the person who started them."""

import errno
import logging
import os
import socket

from xlashard.errors import ProcessesError
from xlashard.multihost.place import Place, Request, address_text, split, start_text
from xlashard.processes import named_processes
from xlashard.processes.connections import Caller, Connection
from xlashard.processes.roll_call import AbsentError, ConflictError, RollCall, call_roll

logger = logging.getLogger("xlashard.multihost")

# Seconds for all to come, once one other has. JAX waits as long.
_ALL = 300.0
# Seconds after which it is said who is missing, and then twice as long each time.
_FIRST_WORD = 5.0


def come_together(place: Place, request: Request, bind: tuple[str, int]) -> dict[int, Connection]:
    """The connections to the others, by process, when all have come.

    Raises:
        ProcessesError: Some did not come, or don't fit.
    """
    secured = request.tls is not None
    me = Caller(place.process_id, place.processes, socket.gethostname(), os.getpid(), secured)
    alone, everybody = (
        (place.environment.alone, _ALL)
        if request.timeout is None
        else (request.timeout, request.timeout)
    )
    call = RollCall(me, split(place.coordinator), bind, alone, everybody, _Words(place).told)
    try:
        return call_roll(call)
    except AbsentError as error:
        # no-catalogue: needs several processes
        raise ProcessesError(_absent_text(place, error), processes=error.processes) from None
    except ConflictError as error:
        raise ProcessesError(  # no-catalogue: needs several processes
            f"initialize() of process {place.process_id} of {place.processes}, found by "
            f"{place.environment.title}: {error}",
            processes=(place.process_id,),
        ) from None
    except OSError as error:
        # no-catalogue: needs several processes
        raise ProcessesError(_listen_text(place, bind, error), processes=(0,)) from None


def _absent_text(place: Place, error: AbsentError) -> str:
    reached = ""
    if error.reason:
        reached = f" (process 0 at {place.coordinator}: {error.reason})"
    return (
        f"process {place.process_id} of {place.processes} has waited {error.seconds:.0f} s for "
        f"{named_processes(error.processes)}{reached}. "
        f"{start_text(place.environment, place.processes)}"
    )


def _listen_text(place: Place, bind: tuple[str, int], error: OSError) -> str:
    where = address_text(bind)
    if error.errno == errno.EADDRINUSE:
        return (
            f"process 0 of {place.processes} can't listen at {where}, which another program of "
            "this machine has: end what is left of an earlier run, or let all use another port: "
            "export JAX_COORDINATOR_PORT=8477"
        )
    return (
        f"process 0 of {place.processes} can't listen at {where} ({error}): the coordinator must "
        "be an address of the machine of process 0; if the others reach it by "
        f"{place.coordinator}, and it has another one itself, write "
        f"initialize(bind='0.0.0.0:{bind[1]}')"
    )


class _Words:
    """Logs who is missing, less and less often."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._next = _FIRST_WORD

    def told(self, missing: tuple[int, ...], seconds: float) -> None:
        if seconds < self._next:
            return
        start = self._next == _FIRST_WORD
        self._next = max(2 * self._next, seconds)
        advice = start_text(self._place.environment, self._place.processes) if start else ""
        logger.warning(
            "process %d of %d: still waiting for %s (%.0f s)%s",
            self._place.process_id,
            self._place.processes,
            named_processes(missing),
            seconds,
            f". {advice}" if advice else "",
        )
