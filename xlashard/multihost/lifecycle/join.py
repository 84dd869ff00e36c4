"""Join of all processes, with errors and log messages that contain the launch command."""

import errno
import logging
import os
import socket

from xlashard.errors import ProcessesError
from xlashard.multihost.lifecycle.cluster_info import (
    ClusterInfo,
    InitializeRequest,
    address_text,
    split_address,
    start_text,
)
from xlashard.processes import format_processes
from xlashard.processes.connections import Connection, ProcessIdentity
from xlashard.processes.startup_barrier import (
    MissingProcessesError,
    ProcessConflictError,
    StartupBarrier,
    wait_for_all,
)

logger = logging.getLogger("xlashard.multihost")

# Seconds for all processes to arrive once one other has; JAX waits as long.
_ALL = 300.0
# Seconds before the first log message; doubled after each message.
_FIRST_LOG = 5.0


def join_processes(
    info: ClusterInfo, request: InitializeRequest, bind: tuple[str, int]
) -> dict[int, Connection]:
    """Wait until all processes have arrived; return the connections by process.

    Raises:
        ProcessesError: Some processes did not arrive, or are inconsistent.
    """
    secured = request.tls is not None
    me = ProcessIdentity(
        info.process_id, info.processes, socket.gethostname(), os.getpid(), secured
    )
    alone, timeout = (
        (info.environment.alone, _ALL)
        if request.timeout is None
        else (request.timeout, request.timeout)
    )
    call = StartupBarrier(
        me, split_address(info.coordinator), bind, alone, timeout, _WaitLog(info).on_wait
    )
    try:
        return wait_for_all(call)
    except MissingProcessesError as error:
        # no-catalogue: needs several processes
        raise ProcessesError(_absent_text(info, error), processes=error.processes) from None
    except ProcessConflictError as error:
        raise ProcessesError(  # no-catalogue: needs several processes
            f"initialize() of process {info.process_id} of {info.processes}, found by "
            f"{info.environment.title}: {error}",
            processes=(info.process_id,),
        ) from None
    except OSError as error:
        # no-catalogue: needs several processes
        raise ProcessesError(_listen_text(info, bind, error), processes=(0,)) from None


def _absent_text(info: ClusterInfo, error: MissingProcessesError) -> str:
    reached = ""
    if error.reason:
        reached = f" (process 0 at {info.coordinator}: {error.reason})"
    return (
        f"process {info.process_id} of {info.processes} has waited {error.seconds:.0f} s for "
        f"{format_processes(error.processes)}{reached}. "
        f"{start_text(info.environment, info.processes)}"
    )


def _listen_text(info: ClusterInfo, bind: tuple[str, int], error: OSError) -> str:
    where = address_text(bind)
    if error.errno == errno.EADDRINUSE:
        return (
            f"process 0 of {info.processes} cannot listen at {where}, which another program on "
            "this machine uses: end the processes of an earlier run, or set another port in all "
            "processes: export JAX_COORDINATOR_PORT=8477"
        )
    return (
        f"process 0 of {info.processes} cannot listen at {where} ({error}): the coordinator must "
        "be an address of the machine of process 0; if the other processes reach that machine by "
        f"{info.coordinator}, but its own address differs, write "
        f"initialize(bind='0.0.0.0:{bind[1]}')"
    )


class _WaitLog:
    """Logs the missing processes at increasing intervals."""

    def __init__(self, info: ClusterInfo) -> None:
        self._place = info
        self._next = _FIRST_LOG

    def on_wait(self, missing: tuple[int, ...], seconds: float) -> None:
        if seconds < self._next:
            return
        start = self._next == _FIRST_LOG
        self._next = max(2 * self._next, seconds)
        advice = start_text(self._place.environment, self._place.processes) if start else ""
        logger.warning(
            "process %d of %d: still waiting for %s (%.0f s)%s",
            self._place.process_id,
            self._place.processes,
            format_processes(missing),
            seconds,
            f". {advice}" if advice else "",
        )
