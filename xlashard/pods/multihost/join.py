"""`initialize` and `leave`: entry and exit of a process of a multi-process program."""

import errno
import logging
import os
import socket
from typing import NoReturn

from xlashard._jax.runtime import coordination
from xlashard.core.processes.process_facts import digest_code, installed_versions
from xlashard.core.processes.stack_dump import stack_server
from xlashard.errors import ArgumentError, ProcessesError
from xlashard.pods.multihost.cluster_info import (
    ClusterInfo,
    InitializeRequest,
    MutualTLS,
    arguments_text,
    bind_address,
    check_types,
    find_cluster,
    split_address,
    start_text,
)
from xlashard.pods.multihost.connections import Connection, ProcessIdentity, address_text
from xlashard.pods.multihost.job_socket import job_socket
from xlashard.pods.multihost.shutdown import ShutdownHandler
from xlashard.pods.multihost.startup_barrier import (
    MissingProcessesError,
    ProcessConflictError,
    StartupBarrier,
    wait_for_all,
)
from xlashard.support.background import flush_output
from xlashard.support.formatting import format_processes
from xlashard.support.lazily import dataclass
from xlashard.support.tracebacks import short_tracebacks

logger = logging.getLogger("xlashard.multihost")


# Modules of the user whose digests are compared at the start: of strangers, messages are read up to
# a mebibyte.
_MOST_MODULES = 1000
# Seconds for all processes to arrive once one other has; JAX waits as long.
_ARRIVAL_TIMEOUT = 300.0
# Seconds before the first log message; doubled after each message.
_FIRST_LOG_SECONDS = 5.0
# Seconds for JAX's own client to connect; all processes are present by then.
_JAX_CONNECT_TIMEOUT = 60
# Seconds by which JAX's heartbeats, which abort this process, time out later than ours.
_JAX_HEARTBEAT_MARGIN = 30
# Largest exit code; the system keeps eight bits.
_LARGEST_EXIT_CODE = 255


@dataclass(frozen=True)
class Pod:
    """The processes of this program, and the place of this process among them.

    Attributes:
        process: Index of this process.
        count: Number of processes.
        coordinator: Host and port of the coordination service of process 0; empty for one process.
        found_by: Source of the information: `"Slurm"`, `"Open MPI"`, `"its arguments"`, …
    """

    process: int
    count: int
    coordinator: str
    found_by: str


class _Joined:
    """State that the first call of `initialize` leaves."""

    def __init__(self) -> None:
        self.pod: Pod | None = None
        self.ending: ShutdownHandler | None = None


_joined = _Joined()


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float | None = None,
    heartbeat: float = 100.0,
    bind: str | None = None,
    tls: MutualTLS | None = None,
) -> Pod:
    """Join this process to the others that run the program. Call it before anything else.

    Without arguments the cluster is detected from the environment: Cloud TPU slices, GKE,
    Kubernetes, Slurm, Open MPI (by JAX's own detection) and `xlashard pod`. If the environment does
    not specify several processes, there is one, and nothing is started.

    All processes meet before JAX's runtime starts. A process that sees no peer for some seconds
    raises an error with the command that starts all processes. From then on every process detects
    when a peer is killed, and ends with a message and exit code 75.

    Args:
        coordinator: Host and port at which the other processes reach process 0.
        processes: Expected number of processes. It is an error if the environment specifies another
            number.
        process_id: Index of this process.
        timeout: How long to wait for the other processes, in seconds. By default 300 once another
            process has connected, and before that 10 to 30, or 300 where each process is started
            when capacity is available (GKE).
        heartbeat: Seconds of silence after which a process, or its machine, counts as gone and all
            others end with exit code 75. A process is silent that is stopped (SIGSTOP), or whose
            native code keeps Python's lock.
        bind: Host and port at which process 0 listens; by default those of `coordinator`, so that
            no other address of its machine is open.
        tls: Certificates for mutual authentication of JAX's service and its clients.

    Returns:
        The place of this process. A later call with the same arguments, or without arguments,
        returns it again.

    Raises:
        ArgumentError: An argument has the wrong type.
        ProcessesError: Some processes did not arrive, they are inconsistent, or JAX has already
            been initialized with its devices.

    Example:
        >>> from xlashard import multihost
        >>> multihost.initialize().count
        1
    """
    with short_tracebacks:
        request = InitializeRequest(
            coordinator, processes, process_id, timeout, heartbeat, bind, tls
        )
        check_types(request)
        if _joined.pod is not None:
            _check_same(_joined.pod, request)
            return _joined.pod
        if coordination.client() is not None:
            pod = Pod(
                coordination.process_index(),
                coordination.process_count(),
                coordination.coordinator_address() or "",
                "jax.distributed",
            )
            _check_same(pod, request)
            _joined.ending = ShutdownHandler(None)
        else:
            pod = _join(request)
        if pod.count > 1:
            _joined.pod = pod
            stack_server.open()
            job_socket.open()
        return pod


def leave(code: int, how: str) -> NoReturn:
    """End this process immediately, without waiting for the other processes or for its threads.

    Normal shutdown of Python and JAX waits for both. Notify the peers first, so that they leave as
    well: this process will not take part in operations that they wait for.

    Args:
        code: The exit code.
        how: Reason of the exit, for the peers: ``"ValueError: no more data"``.

    Raises:
        ArgumentError: `code` is not an exit code, or `how` is not a string; the process continues.
    """
    if type(code) is not int or not 0 <= code <= _LARGEST_EXIT_CODE:
        shown = repr(code) if isinstance(code, int | float | str) else type(code).__name__
        raise ArgumentError(
            f"leave: code must be an integer from 0 to {_LARGEST_EXIT_CODE}, not {shown}: write "
            "leave(1, 'ValueError: no more data')"
        )
    if not isinstance(how, str):
        raise ArgumentError(
            f"leave: how must be a text, not {type(how).__name__}: write leave({code}, str(error))"
        )
    if _joined.ending is not None:
        _joined.ending.leave(code, how)
    flush_output()
    os._exit(code)


def _join(request: InitializeRequest) -> Pod:
    info = find_cluster(request)
    if info.processes == 1:
        return Pod(0, 1, "", info.environment.title)
    if coordination.backend_has_started():
        raise ProcessesError(
            "JAX initialized its devices before initialize() could join this process as number "
            f"{info.process_id} of {info.processes}, so it has only the devices of this process: "
            "call xlashard.multihost.initialize() first, before jax.devices(), any array and any "
            "computation",
            processes=(info.process_id,),
        )
    bind = bind_address(info, request)
    # All processes are here before JAX's service starts, which names no process that is missing.
    connections = join_processes(info, request, bind)
    # The address that peers reach; others of this machine may be closed to them.
    own = next(iter(connections.values())).socket.getsockname()[0]
    coordination.set_cpu_collectives_address(own.removeprefix("::ffff:"))
    coordination.join(
        info.coordinator,
        bind=address_text(bind),
        processes=info.processes,
        process_id=info.process_id,
        timeout=_JAX_CONNECT_TIMEOUT,
        heartbeat=max(1, round(request.heartbeat)) + _JAX_HEARTBEAT_MARGIN,
        local_devices=info.local_devices,
        credentials=None if request.tls is None else request.tls.for_jax(),
    )
    _joined.ending = ShutdownHandler(connections, request.heartbeat)
    return Pod(info.process_id, info.processes, info.coordinator, info.environment.title)


def _check_same(pod: Pod, request: InitializeRequest) -> None:
    now = (pod.coordinator, pod.count, pod.process)
    requested = (request.coordinator, request.processes, request.process_id)
    if all(value is None or value == known for value, known in zip(requested, now, strict=True)):
        return
    raise ProcessesError(  # no-catalogue: needs several processes
        f"this process has already joined as number {pod.process} of {pod.count}, with the "
        f"coordinator {pod.coordinator or '(none)'}: initialize() cannot change it to "
        f"{arguments_text(request)}; call it once, or with the same arguments",
        processes=(pod.process,),
    )


def join_processes(
    info: ClusterInfo, request: InitializeRequest, bind: tuple[str, int]
) -> dict[int, Connection]:
    """Wait until all processes have arrived; return the connections by process.

    Raises:
        ProcessesError: Some processes did not arrive, or are inconsistent.
    """
    host, secured = socket.gethostname(), request.tls is not None
    installed = installed_versions(("jax", "jaxlib", "libtpu"))
    versions = ", ".join(f"{name} {version}" for name, version in installed.items())
    code = dict(sorted(digest_code().items())[:_MOST_MODULES])
    me = ProcessIdentity(
        info.process_id, info.processes, host, os.getpid(), secured, versions, code
    )
    alone, timeout = request.timeout, request.timeout
    if alone is None or timeout is None:
        alone, timeout = info.environment.alone, _ARRIVAL_TIMEOUT
    coordinator, log_missing = split_address(info.coordinator), _WaitLog(info).log_missing
    call = StartupBarrier(me, coordinator, bind, alone, timeout, log_missing)
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
    reached = f" (process 0 at {info.coordinator}: {error.reason})" if error.reason else ""
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
        f"process 0 of {info.processes} cannot listen at {where} ({error.strerror}): the "
        "coordinator must be an address of the machine of process 0; if the other processes reach "
        f"that machine by {info.coordinator}, but its own address differs, write "
        f"initialize(bind='0.0.0.0:{bind[1]}')"
    )


class _WaitLog:
    """Logs the missing processes at increasing intervals."""

    def __init__(self, info: ClusterInfo) -> None:
        self._place = info
        self._next = _FIRST_LOG_SECONDS

    def log_missing(self, missing: tuple[int, ...], seconds: float) -> None:
        if seconds < self._next:
            return
        start = self._next == _FIRST_LOG_SECONDS
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
