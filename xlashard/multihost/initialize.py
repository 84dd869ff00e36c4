"""`initialize`: makes this process one of several that run the same program."""

import errno
import logging
import os
import socket
from dataclasses import dataclass, replace

from xlashard._jax import coordination
from xlashard._jax.coordination import Cluster, Joining
from xlashard.config import read_flags
from xlashard.errors import ProcessesError
from xlashard.multihost import environments
from xlashard.multihost.ending import Ending, end_without
from xlashard.multihost.environments import Environment
from xlashard.multihost.security import MutualTLS
from xlashard.processes import named_processes
from xlashard.processes.lines import Lines
from xlashard.processes.roll_call import (
    AbsentError,
    Caller,
    ConflictError,
    Connection,
    RollCall,
    call_roll,
)

logger = logging.getLogger("xlashard.multihost")

# Seconds for all to come, once one other has. JAX waits as long.
_ALL = 300.0
# Seconds that JAX's own client has to connect; all processes are there by then.
_CONNECT = 60
# Seconds after which it is said who is missing, and then twice as long each time.
_FIRST_WORD = 5.0
_LOOPBACK = "127.0.0.1"


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


@dataclass(frozen=True)
class _Place:
    """What is known before the processes meet."""

    environment: Environment
    processes: int
    process_id: int
    coordinator: str
    local_devices: tuple[int, ...] | None


@dataclass(frozen=True)
class _Request:
    """The arguments of `initialize`."""

    coordinator: str | None
    processes: int | None
    process_id: int | None
    timeout: float | None
    heartbeat: float
    bind: str | None
    tls: MutualTLS | None


class _Joined:
    """What came of the first call."""

    def __init__(self) -> None:
        self.pod: Pod | None = None


_joined = _Joined()
_ONE = Environment("one process", 0.0, lambda command, processes: command)


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
            come, and before that 15, or 300 where each is started when there is room (Kubernetes).
        heartbeat: After how many seconds of silence JAX takes a process, or its machine, for dead
            and ends all others.
        bind: Host and port at which process 0 listens; by default those of `coordinator`, so that
            nothing listens at other addresses of its machine.
        tls: Certificates by which JAX's service and its clients make sure of each other.

    Returns:
        The place of this process. A later call with the same arguments, or none, returns it again.

    Raises:
        ProcessesError: Not all came, or they don't fit together, or JAX has devices already.

    Example:
        >>> from xlashard import multihost
        >>> multihost.initialize().count
        1
    """
    request = _Request(coordinator, processes, process_id, timeout, heartbeat, bind, tls)
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
        Ending(None)
    else:
        pod = _join(request)
    _joined.pod = pod
    return pod


def _join(request: _Request) -> Pod:
    place = _find(request)
    if place.processes == 1:
        return Pod(0, 1, "", place.environment.title)
    if coordination.backend_has_started():
        raise ProcessesError(
            f"JAX was asked for devices before initialize() made this process number "
            f"{place.process_id} of {place.processes}, so it has those of this process alone: call "
            "xlashard.multihost.initialize() first, before jax.devices(), any array and any "
            "computation",
            processes=(place.process_id,),
        )
    bind = _bind_address(place, request)
    connections = _come_together(place, request, bind)
    joining = Joining(
        place.coordinator,
        f"{bind[0]}:{bind[1]}",
        place.processes,
        place.process_id,
        place.local_devices,
        _CONNECT,
        max(1, round(request.heartbeat)),
        {} if request.tls is None else request.tls.for_jax(),
    )
    own = next(iter(connections.values())).socket.getsockname()[0]
    coordination.collect_on_cpu(own.removeprefix("::ffff:"))
    coordination.join(joining)
    Ending(Lines(connections, end_without))
    return Pod(place.process_id, place.processes, place.coordinator, place.environment.title)


def _again(pod: Pod, request: _Request) -> Pod:
    _check_same(pod, request)
    return pod


def _check_same(pod: Pod, request: _Request) -> None:
    now = (pod.coordinator, pod.count, pod.process)
    asked = (request.coordinator, request.processes, request.process_id)
    if all(value is None or value == known for value, known in zip(asked, now, strict=True)):
        return
    raise ProcessesError(
        f"this process is number {pod.process} of {pod.count} already, with the coordinator "
        f"{pod.coordinator or '(none)'}: initialize() can't make it "
        f"{_asked_text(request)}; call it once, or with the same arguments",
        processes=(pod.process,),
    )


def _asked_text(request: _Request) -> str:
    asked = {
        "coordinator": request.coordinator,
        "processes": request.processes,
        "process_id": request.process_id,
    }
    return ", ".join(f"{name}={value!r}" for name, value in asked.items() if value is not None)


def _find(request: _Request) -> _Place:
    """Who this process is, from the arguments and the environment."""
    given = (request.coordinator, request.processes, request.process_id)
    if None not in given:
        return _given(request)
    emulated = read_flags(os.environ).pod
    if emulated is not None:
        found = _Place(
            environments.EMULATED,
            emulated.processes,
            emulated.process_id,
            emulated.coordinator,
            None,
        )
        return _agreed(found, request)
    cluster = _cluster()
    if cluster is not None:
        return _agreed(_detected(cluster, request), request)
    return _alone(request)


def _given(request: _Request) -> _Place:
    count, process = request.processes or 0, request.process_id or 0
    if not 0 <= process < count:
        raise ProcessesError(
            f"process_id={process} is none of processes={count}: they are numbered from 0 to "
            f"{count - 1}",
            processes=(process,),
        )
    return _Place(environments.GIVEN, count, process, request.coordinator or "", None)


def _cluster() -> Cluster | None:
    try:
        return coordination.find_cluster()
    except Exception as error:
        raise ProcessesError(
            "the environment looks like one of several processes, and JAX can't tell which of "
            f"them this is ({type(error).__name__}: {error}): write initialize('HOST:PORT', "
            "processes=4, process_id=0), or initialize(processes=1) for this process alone",
            processes=(),
        ) from error


def _detected(cluster: Cluster, request: _Request) -> _Place:
    environment = environments.environment_of(cluster)
    # One process needs no coordinator, and who asks for one only is given it below.
    if cluster.processes == 1 or request.processes == 1:
        return _Place(environment, cluster.processes, cluster.process_id, "", None)
    patience = environment.alone if request.timeout is None else request.timeout
    try:
        address = request.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
        address = address or coordination.cluster_coordinator(max(1, round(patience)))
    except Exception as error:
        raise ProcessesError(
            f"{environment.title} has {cluster.processes} processes, and the address of process 0 "
            f"can't be found ({error}). {_start_text(environment, cluster.processes)}",
            processes=(0,),
        ) from error
    return _Place(
        environment, cluster.processes, cluster.process_id, address, cluster.local_devices
    )


def _agreed(found: _Place, request: _Request) -> _Place:
    """What the environment says, where the arguments say the same or nothing."""
    if request.processes == 1:
        return _Place(_ONE, 1, 0, "", None)
    for name, here, asked in (
        ("processes", found.processes, request.processes),
        ("process_id", found.process_id, request.process_id),
    ):
        if asked is not None and asked != here:
            raise ProcessesError(
                f"initialize({name}={asked}): {found.environment.title} says {name}={here}. "
                f"{_start_text(found.environment, request.processes or found.processes)}",
                processes=(found.process_id,),
            )
    return found if request.coordinator is None else replace(found, coordinator=request.coordinator)


def _alone(request: _Request) -> _Place:
    tasks = environments.unlaunched_tasks(os.environ)
    expected = request.processes or max(1, tasks)
    if expected == 1 and request.coordinator is None:
        return _Place(_ONE, 1, 0, "", None)
    if tasks > 1:
        raise ProcessesError(
            f"this is the batch script of a Slurm job of {tasks} tasks, in which a program starts "
            f"once and not {tasks} times. {_start_text(environments.SLURM, expected)}; or write "
            "initialize(processes=1) for this process alone",
            processes=tuple(range(1, expected)),
        )
    if request.coordinator is None:
        raise ProcessesError(
            f"initialize(processes={expected}): this is one process, and nothing in its environment "
            "says which of several it is. "
            f"{_start_text(environments.EMULATED, expected)}; on other machines by their launcher "
            f"(srun, mpirun, …), or by initialize('HOST:PORT', processes={expected}, process_id=0)",
            processes=tuple(range(1, expected)),
        )
    raise ProcessesError(
        f"initialize({_asked_text(request)}) needs all of coordinator, processes and process_id: "
        f"write initialize({request.coordinator!r}, processes=4, process_id=0)",
        processes=(),
    )


def _start_text(environment: Environment, processes: int) -> str:
    return (
        f"Start it in all {processes}: {environment.launch(environments.own_command(), processes)}"
    )


def _come_together(
    place: _Place, request: _Request, bind: tuple[str, int]
) -> dict[int, Connection]:
    me = Caller(place.process_id, place.processes, socket.gethostname(), os.getpid())
    alone, everybody = (
        (place.environment.alone, _ALL)
        if request.timeout is None
        else (request.timeout, request.timeout)
    )
    call = RollCall(me, _split(place.coordinator), bind, alone, everybody, _Words(place).told)
    try:
        return call_roll(call)
    except AbsentError as error:
        raise ProcessesError(_absent_text(place, error), processes=error.processes) from None
    except ConflictError as error:
        raise ProcessesError(
            f"initialize() of process {place.process_id} of {place.processes}, found by "
            f"{place.environment.title}: {error}; end what is left of an earlier run, and start "
            "each process once with a number of its own",
            processes=(place.process_id,),
        ) from None
    except OSError as error:
        raise ProcessesError(_listen_text(place, bind, error), processes=(0,)) from None


def _absent_text(place: _Place, error: AbsentError) -> str:
    reached = ""
    if error.reason:
        reached = f" (process 0 at {place.coordinator}: {error.reason})"
    return (
        f"process {place.process_id} of {place.processes} has waited {error.seconds:.0f} s for "
        f"{named_processes(error.processes)}{reached}. "
        f"{_start_text(place.environment, place.processes)}"
    )


def _listen_text(place: _Place, bind: tuple[str, int], error: OSError) -> str:
    where = f"{bind[0]}:{bind[1]}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"process 0 of {place.processes} can't listen at {where}, which another program of this "
            "machine has: end what is left of an earlier run, or export JAX_COORDINATOR_PORT=8477 "
            "in all processes"
        )
    return (
        f"process 0 of {place.processes} can't listen at {where} ({error}): the coordinator must be "
        f"an address of the machine of process 0; if the others reach it by {place.coordinator}, "
        f"and it has another one itself, write initialize(bind='0.0.0.0:{bind[1]}')"
    )


class _Words:
    """Logs who is missing, less and less often."""

    def __init__(self, place: _Place) -> None:
        self._place = place
        self._next = _FIRST_WORD

    def told(self, missing: tuple[int, ...], seconds: float) -> None:
        if seconds < self._next:
            return
        start = self._next == _FIRST_WORD
        self._next = max(2 * self._next, seconds)
        advice = _start_text(self._place.environment, self._place.processes) if start else ""
        logger.warning(
            "process %d of %d: still waiting for %s (%.0f s)%s",
            self._place.process_id,
            self._place.processes,
            named_processes(missing),
            seconds,
            f". {advice}" if advice else "",
        )


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ProcessesError(
            f"coordinator {address!r} is no host and port: write '10.0.0.1:8476'", processes=()
        )
    return host.strip("[]"), int(port)


def _bind_address(place: _Place, request: _Request) -> tuple[str, int]:
    """Where process 0 listens: at the address that the others use, and nowhere else."""
    host, port = _split(place.coordinator)
    chosen = request.bind or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    if chosen:
        return _split(chosen)
    if place.process_id != 0 or host == "localhost" or host.startswith("127."):
        return host, port
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return host, port  # which is said where it is listened at
    if address.startswith("127."):
        # Its own name means the loopback address on some systems, where no other machine reaches.
        logger.warning(
            "%s is a loopback address on its own machine, so process 0 listens at all addresses of "
            "the machine; initialize(bind='HOST:%d') names one",
            host,
            port,
        )
        return "0.0.0.0", port
    return address, port
