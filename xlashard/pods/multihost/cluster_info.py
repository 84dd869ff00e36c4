"""Cluster detection: place of this process, and the launch command of its environment."""

import logging
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from xlashard._jax.runtime import coordination
from xlashard._jax.runtime.coordination import Cluster, tpu_attribute
from xlashard.config import read_flags
from xlashard.core.processes import checked_seconds
from xlashard.errors import ArgumentError, ProcessesError
from xlashard.support.lazily import dataclass

# Seconds that a process waits while no other has connected. A launcher starts all processes at
# once, so a lone process was not started by it. Over ssh and by hand the starts are some seconds
# apart, as on a machine that is busy emulating them; Kubernetes starts each pod when capacity is
# available.
_AT_ONCE = 10.0


_OVER_SSH = 15.0


_BY_HAND = 30.0


_WHEN_THERE_IS_ROOM = 300.0


@dataclass(frozen=True)
class LaunchEnvironment:
    """A kind of environment in which several processes run.

    Attributes:
        title: Name in messages.
        alone: Seconds that a process waits while no other has connected.
        launch: Returns the command, or instructions, that start all processes, from the program's
            command and the number of processes.
    """

    title: str
    alone: float
    launch: Callable[[str, int], str]


def _on_tpu_vm(command: str, processes: int) -> str:
    name = tpu_attribute("NODE_ID") or "$TPU_NAME"
    zone = tpu_attribute("ZONE") or "$ZONE"
    every = " (on every slice)" if tpu_attribute("MEGASCALE_NUM_SLICES") else ""
    quoted = shlex.quote(command)
    return (
        f"gcloud compute tpus tpu-vm ssh {name} --zone={zone} --worker=all --command={quoted}"
        f"{every}"
    )


def _on_kubernetes(command: str, processes: int) -> str:
    return (
        f"let the Job's (or JobSet's) container run `{command}`, with parallelism: {processes}, "
        f"completions: {processes} and completionMode: Indexed; `kubectl get pods` lists the pods "
        "that are not running yet"
    )


def _by_hand(command: str, processes: int) -> str:
    return (
        f"{command}, {processes} times with the same coordinator and with process_id 0 … "
        f"{processes - 1}"
    )


EMULATED = LaunchEnvironment("an emulated pod", _BY_HAND, "xlashard pod -n {1} -- {0}".format)


GIVEN = LaunchEnvironment("its arguments", _BY_HAND, _by_hand)


SLURM = LaunchEnvironment("Slurm", _AT_ONCE, "srun --ntasks={1} {0}".format)


_BY_CLUSTER = {
    "gcetpu": LaunchEnvironment("a Cloud TPU slice", _OVER_SSH, _on_tpu_vm),
    "gketpu": LaunchEnvironment("a TPU slice in GKE", _WHEN_THERE_IS_ROOM, _on_kubernetes),
    "K8sCluster": LaunchEnvironment("Kubernetes", _WHEN_THERE_IS_ROOM, _on_kubernetes),
    "slurm": SLURM,
    "ompi": LaunchEnvironment("Open MPI", _AT_ONCE, "mpirun -n {1} {0}".format),
}


def unlaunched_tasks(variables: Mapping[str, str]) -> int:
    """Return the number of tasks of a Slurm job from inside its batch script; otherwise 0.

    A program started there without `srun` runs once, and only the job's variables reveal the other
    tasks.
    """
    if "SLURM_JOB_ID" not in variables or "SLURM_STEP_NODELIST" in variables:
        return 0
    tasks = variables.get("SLURM_NTASKS", "")
    return int(tasks) if tasks.isdecimal() else 0


@dataclass(frozen=True)
class MutualTLS:
    """Certificates for mutual authentication of JAX's coordination service and its clients.

    Attributes:
        certificate: Path of this process's certificate chain, in PEM.
        key: Path of its private key, in PEM.
        authority: Path of the CA certificates that validate the peer, in PEM.
        peer_uri_prefix: Required prefix of a URI among the subject names of the peer's certificate,
            such as `"spiffe://example.org/"`. By default clients check the coordinator's host name.

    Example:
        >>> from xlashard import multihost
        >>> tls = multihost.MutualTLS("own.pem", "own.key", "ca.pem")
        >>> tls.authority
        'ca.pem'
    """

    certificate: str
    key: str
    authority: str
    peer_uri_prefix: str | None = None

    def for_jax(self) -> dict[str, Any]:
        """Return the keyword arguments of `jax.distributed.initialize`."""
        return {
            "mtls_cert_file": self.certificate,
            "mtls_key_file": self.key,
            "mtls_ca_file": self.authority,
            "mtls_peer_uri_prefix": self.peer_uri_prefix,
            "verify_secure_credentials": True,
        }


logger = logging.getLogger("xlashard.multihost")


@dataclass(frozen=True)
class ClusterInfo:
    """Place of this process in the cluster, before it joins."""

    environment: LaunchEnvironment
    processes: int
    process_id: int
    coordinator: str
    local_devices: tuple[int, ...] | None


@dataclass(frozen=True)
class InitializeRequest:
    """Arguments of `initialize`."""

    coordinator: str | None
    processes: int | None
    process_id: int | None
    timeout: float | None
    heartbeat: float
    bind: str | None
    tls: MutualTLS | None


def check_types(request: InitializeRequest) -> None:
    """Check the types of the arguments of `initialize`.

    Raises:
        ArgumentError: An argument has the wrong type.
    """
    for name, kind, expected in (
        ("coordinator", str, "a host and a port, such as '10.0.0.1:8476'"),
        ("processes", int, "an integer from 1 on"),
        ("process_id", int, "an integer from 0 on"),
        ("bind", str, "a host and a port, such as '0.0.0.0:8476'"),
        ("tls", MutualTLS, "a MutualTLS"),
    ):
        value = getattr(request, name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            shown = repr(value) if isinstance(value, int | float | str) else type(value).__name__
            raise ArgumentError(f"initialize: {name} must be {expected}, not {shown:.60}")
    if not 0 < (request.processes or 1) <= _MOST:
        raise ArgumentError(
            f"initialize: processes must be from 1 to {_MOST:,}, not {request.processes!r:.60}"
        )
    if request.timeout is not None:
        checked_seconds(request.timeout, "initialize: timeout")
    checked_seconds(request.heartbeat, "initialize: heartbeat")


# Largest number of processes, ten times that of the largest pod in existence.
_MOST = 1 << 20

_ONE = LaunchEnvironment("one process", 0.0, lambda command, processes: command)


def find_cluster(request: InitializeRequest) -> ClusterInfo:
    """Determine the place of this process from the arguments and the environment.

    Raises:
        ProcessesError: Arguments and environment are incomplete or contradict each other.
    """
    explicit = (request.coordinator, request.processes, request.process_id)
    if None not in explicit:
        return _from_arguments(request)
    emulated = read_flags(os.environ).pod
    if emulated is not None:
        at = emulated.coordinator
        info = ClusterInfo(EMULATED, emulated.processes, emulated.process_id, at, None)
        return _agreed(info, request)
    cluster = _cluster()
    return _agreed(_detected(cluster, request), request) if cluster else _single_process(request)


def _from_arguments(request: InitializeRequest) -> ClusterInfo:
    count, process = request.processes or 0, request.process_id or 0
    split_address(request.coordinator or "")
    if not 0 <= process < count:
        raise ProcessesError(
            f"process_id={process} is invalid for processes={count}: expected 0 to {count - 1}",
            processes=(process,),
        )
    return ClusterInfo(GIVEN, count, process, request.coordinator or "", None)


def _cluster() -> Cluster | None:
    try:
        return coordination.find_cluster()
    except Exception as error:
        raise ProcessesError(  # no-catalogue: needs the environment of a launcher
            "the environment is that of a multi-process job, but JAX cannot determine the process "
            f"id ({type(error).__name__}: {error}): write initialize('HOST:PORT', processes=4, "
            "process_id=0), or initialize(processes=1) for this process alone",
            processes=(),
        ) from error


def _detected(cluster: Cluster, request: InitializeRequest) -> ClusterInfo:
    other = LaunchEnvironment(cluster.name, _BY_HAND, _by_hand)
    environment = _BY_CLUSTER.get(cluster.name, other)
    # One process needs no coordinator; a request for one process is handled below.
    if cluster.processes == 1 or request.processes == 1:
        return ClusterInfo(environment, cluster.processes, cluster.process_id, "", None)
    timeout = environment.alone if request.timeout is None else request.timeout
    try:
        address = request.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
        address = address or coordination.cluster_coordinator(max(1, round(timeout)))
    except Exception as error:
        raise ProcessesError(  # no-catalogue: needs the environment of a launcher
            f"{environment.title} has {cluster.processes} processes, but the address of process 0 "
            f"cannot be determined ({error}). {start_text(environment, cluster.processes)}",
            processes=(0,),
        ) from error
    return ClusterInfo(
        environment, cluster.processes, cluster.process_id, address, cluster.local_devices
    )


def _agreed(info: ClusterInfo, request: InitializeRequest) -> ClusterInfo:
    """Return the detected cluster, provided that the arguments do not contradict it."""
    if request.processes == 1:
        return ClusterInfo(_ONE, 1, 0, "", None)
    for name, known, requested in (
        ("processes", info.processes, request.processes),
        ("process_id", info.process_id, request.process_id),
    ):
        if requested is not None and requested != known:
            raise ProcessesError(  # no-catalogue: needs the environment of a launcher
                f"initialize({name}={requested}): {info.environment.title} specifies "
                f"{name}={known}. "
                f"{start_text(info.environment, request.processes or info.processes)}",
                processes=(info.process_id,),
            )
    return info if request.coordinator is None else replace(info, coordinator=request.coordinator)


def _single_process(request: InitializeRequest) -> ClusterInfo:
    tasks = unlaunched_tasks(os.environ)
    expected = request.processes or max(1, tasks)
    if expected == 1 and request.coordinator is None:
        return ClusterInfo(_ONE, 1, 0, "", None)
    if tasks > 1:
        raise ProcessesError(  # no-catalogue: needs the environment of a launcher
            f"this is the batch script of a Slurm job of {tasks} tasks, which runs a program once "
            f"instead of {tasks} times. {start_text(SLURM, expected)}; or write "
            "initialize(processes=1) for this process alone",
            processes=tuple(range(1, expected)),
        )
    if request.coordinator is None:
        raise ProcessesError(
            f"initialize(processes={expected}): this process was started alone, and its "
            "environment does not specify a process id. "
            f"{start_text(EMULATED, expected)}; on other machines by their launcher "
            f"(srun, mpirun, …), or by initialize('HOST:PORT', processes={expected}, process_id=0)",
            processes=tuple(range(1, expected)),
        )
    raise ProcessesError(
        f"initialize({arguments_text(request)}) needs all of coordinator, processes and "
        f"process_id: write initialize({request.coordinator!r}, processes=4, process_id=0)",
        processes=(),
    )


def start_text(environment: LaunchEnvironment, processes: int) -> str:
    """Return a sentence with the command that starts all processes."""
    command = environment.launch(shlex.join(["python", *sys.orig_argv[1:]]), processes)
    return f"Start it in all {processes}: {command}"


def arguments_text(request: InitializeRequest) -> str:
    """Format the arguments of a call of `initialize`."""
    names = ("coordinator", "processes", "process_id")
    values = ((name, getattr(request, name)) for name in names)
    return ", ".join(f"{name}={value!r}" for name, value in values if value is not None)


def split_address(address: str) -> tuple[str, int]:
    """Split an address into host and port.

    Raises:
        ProcessesError: The address is invalid.
    """
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) >= 1 << 16:
        raise ProcessesError(
            f"coordinator {address!r} is invalid: expected a host and a port, such as "
            "'10.0.0.1:8476'",
            processes=(),
        )
    return host.strip("[]"), int(port)


def bind_address(info: ClusterInfo, request: InitializeRequest) -> tuple[str, int]:
    """Return the address at which process 0 listens; by default only the coordinator's address."""
    host, port = split_address(info.coordinator)
    chosen = request.bind or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    if chosen:
        return split_address(chosen)
    if info.process_id != 0 or host == "localhost" or host.startswith("127."):
        return host, port
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return host, port  # The error is raised by the attempt to listen.
    if address.startswith("127."):
        # On some systems the machine's own name resolves to the loopback address, which other
        # machines cannot reach.
        logger.warning(
            "%s resolves to a loopback address on this machine, so process 0 listens at all "
            "addresses of the machine; initialize(bind='HOST:%d') selects one",
            host,
            port,
        )
        return "0.0.0.0", port
    return address, port
