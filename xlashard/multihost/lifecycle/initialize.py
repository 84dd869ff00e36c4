"""`initialize`: makes this process one of several that run the same program."""

import os
import sys
from typing import NoReturn

from xlashard._jax import coordination
from xlashard._jax.coordination import Joining
from xlashard._jax.tracebacks import short_tracebacks
from xlashard.errors import ArgumentError, ProcessesError
from xlashard.lazily import dataclass
from xlashard.multihost.lifecycle.cluster_info import (
    InitializeRequest,
    MutualTLS,
    address_text,
    arguments_text,
    bind_address,
    check_types,
    find_cluster,
)
from xlashard.multihost.lifecycle.join import join_processes
from xlashard.multihost.lifecycle.shutdown import ShutdownHandler
from xlashard.processes.stack_dump import stack_server

# Seconds that JAX's own client has to connect; all processes are there by then.
_CONNECT = 60
# Of exit codes; the system keeps eight bits.
_LAST_CODE = 255


@dataclass(frozen=True)
class Pod:
    """The processes that run this program, and this one's place among them.

    Attributes:
        process: The number of this process.
        count: How many there are.
        coordinator: Host and port of process 0's coordination service; empty for one process.
        found_by: What said so: `"Slurm"`, `"Open MPI"`, `"its arguments"`, …
    """

    process: int
    count: int
    coordinator: str
    found_by: str


class _Joined:
    """What came of the first call."""

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
    """Makes this process one of those that run the program together. Call it before anything else.

    Without arguments it asks the environment: Cloud TPU slices, GKE, Kubernetes, Slurm, Open MPI
    (through JAX's own detection) and `xlashard pod` are known. Where nothing says that there is
    more than one process, there is one, and nothing is started.

    All processes come together before JAX's runtime starts. A process that sees no other for some
    seconds raises an error with the command that starts them all. From then on each notices when
    another is killed, and ends with a message and exit code 75.

    Args:
        coordinator: Host and port at which the others reach process 0.
        processes: How many there must be. If the environment says another number, that is an error.
        process_id: The number of this process.
        timeout: How long to wait for the others, in seconds. By default 300 once another one has
            come, and before that 10 to 30, or 300 where each is started when there is room (GKE).
        heartbeat: After how many seconds of silence JAX takes a process, or its machine, for dead
            and ends all others.
        bind: Host and port at which process 0 listens; by default those of `coordinator`, so that
            nothing listens at other addresses of its machine.
        tls: Certificates by which JAX's service and its clients make sure of each other.

    Returns:
        The place of this process. A later call with the same arguments, or none, returns it again.

    Raises:
        ArgumentError: An argument has the wrong type.
        ProcessesError: Not all came, or they don't fit together, or JAX has devices already.

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
            return _again(_joined.pod, request)
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
        return pod


def leave(code: int, how: str) -> NoReturn:
    """Ends this process at once, while others may wait for something that it will not do.

    Python's and JAX's own way to end waits for the other processes and for all threads. Tell the
    others before, so that they leave too: what they wait for does not come any more.

    Args:
        code: The exit code.
        how: What ended it, for the others: ``"ValueError: no more data"``.

    Raises:
        ArgumentError: `code` is no exit code, or `how` no text; the process goes on.
    """
    if type(code) is not int or not 0 <= code <= _LAST_CODE:
        shown = repr(code) if isinstance(code, int | float | str) else type(code).__name__
        raise ArgumentError(
            f"leave: code must be an integer from 0 to {_LAST_CODE}, not {shown}: write "
            "leave(1, 'ValueError: no more data')"
        )
    if not isinstance(how, str):
        raise ArgumentError(
            f"leave: how must be a text, not {type(how).__name__}: write leave({code}, str(error))"
        )
    if _joined.ending is not None:
        _joined.ending.leave(code, how)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join(request: InitializeRequest) -> Pod:
    info = find_cluster(request)
    if info.processes == 1:
        return Pod(0, 1, "", info.environment.title)
    if coordination.backend_has_started():
        raise ProcessesError(
            f"JAX was asked for devices before initialize() made this process number "
            f"{info.process_id} of {info.processes}, so it has those of this process alone: call "
            "xlashard.multihost.initialize() first, before jax.devices(), any array and any "
            "computation",
            processes=(info.process_id,),
        )
    bind = bind_address(info, request)
    connections = join_processes(info, request, bind)
    joining = Joining(
        info.coordinator,
        address_text(bind),
        info.processes,
        info.process_id,
        info.local_devices,
        _CONNECT,
        max(1, round(request.heartbeat)),
        {} if request.tls is None else request.tls.for_jax(),
    )
    own = next(iter(connections.values())).socket.getsockname()[0]
    coordination.collect_on_cpu(own.removeprefix("::ffff:"))
    coordination.join(joining)
    _joined.ending = ShutdownHandler(connections)
    return Pod(info.process_id, info.processes, info.coordinator, info.environment.title)


def _again(pod: Pod, request: InitializeRequest) -> Pod:
    _check_same(pod, request)
    return pod


def _check_same(pod: Pod, request: InitializeRequest) -> None:
    now = (pod.coordinator, pod.count, pod.process)
    asked = (request.coordinator, request.processes, request.process_id)
    if all(value is None or value == known for value, known in zip(asked, now, strict=True)):
        return
    raise ProcessesError(  # no-catalogue: needs several processes
        f"this process is number {pod.process} of {pod.count} already, with the coordinator "
        f"{pod.coordinator or '(none)'}: initialize() can't make it "
        f"{arguments_text(request)}; call it once, or with the same arguments",
        processes=(pod.process,),
    )
