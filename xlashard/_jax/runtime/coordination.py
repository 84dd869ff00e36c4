"""JAX's distributed runtime: initialization, process index, and the shared key-value store.

The store is a service of one process, the coordinator. A second write of a key fails unless it
overwrites; readers can wait for a key.
"""

import atexit
import ctypes
import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import jax

from xlashard._jax.private import (
    api,
    cloud_tpu_cluster,
    cloud_tpu_init,
    clusters,
    distributed,
    lib_jax,
    replace_name,
    xla_bridge,
)
from xlashard.support.background import at_exit
from xlashard.support.lazily import dataclass

SHUTDOWN_TIMEOUT = 24 * 24 * 3600
"""Seconds that a process waits at its end for the programs of its peers, in milliseconds 31 bits.

Peers that are killed, or no longer send heartbeats, end it at once.
"""


@dataclass(frozen=True)
class Cluster:
    """Environment of several processes that JAX detects.

    Attributes:
        name: Its name in JAX.
        processes: The number of processes.
        process_id: The index of this process.
        local_devices: The devices of this process; None for all of its machine.
    """

    name: str
    processes: int
    process_id: int
    local_devices: tuple[int, ...] | None


def find_cluster() -> Cluster | None:
    """Return the environment that JAX detects, or None."""
    kind = _detected()
    if kind is None:
        return None
    own = None if cloud_tpu_init.running_in_cloud_tpu_vm else kind.get_local_process_id()
    return Cluster(
        kind.name or kind.__name__,
        kind.get_process_count(),
        kind.get_process_id(),
        None if own is None else (own,),
    )


def cluster_coordinator(seconds: int) -> str:
    """Return host and port of the coordinator in the environment that JAX detects.

    Args:
        seconds: The time to wait until its host name resolves.
    """
    port = os.environ.get("JAX_COORDINATOR_PORT")
    return _detected().get_coordinator_address(timeout_secs=seconds, override_coordinator_port=port)


def tpu_attribute(name: str) -> str | None:
    """Return an attribute of this TPU VM, such as `NODE_ID`; None if it has none."""
    try:
        return cloud_tpu_cluster.get_tpu_env_value(name)
    except Exception:
        # Used in messages only, which do without it if the metadata server fails.
        return None


def _detected() -> Any:
    """Return the class of the first environment that is present, in JAX's order."""
    for kind in clusters.ClusterEnv._cluster_types:
        if not kind.opt_in_only_method and kind.is_env_present():
            return kind
    return None


def join(
    coordinator: str,
    *,
    bind: str,
    processes: int,
    process_id: int,
    timeout: int,
    heartbeat: int,
    local_devices: tuple[int, ...] | None = None,
    credentials: Mapping[str, Any] | None = None,
) -> None:
    """Start the client and, in process 0, the service.

    Args:
        coordinator: Host and port of the service.
        bind: The host and port where the service of process 0 listens.
        processes: The number of processes.
        process_id: The index of this process.
        timeout: The time to wait for the other processes, in seconds.
        heartbeat: The time without a heartbeat after which a process counts as dead, in seconds.
        local_devices: The devices to use; None for all.
        credentials: JAX's arguments for mutual TLS, by name.
    """
    # JAX aborts a process whose program ends five minutes before those of its peers, although they
    # are alive; `jax.distributed.initialize` sets the timeout of its service only.
    make_client = lib_jax.get_distributed_runtime_client
    patient = partial(make_client, shutdown_timeout=SHUTDOWN_TIMEOUT)
    replace_name(lib_jax, "get_distributed_runtime_client", patient)
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process_id,
            local_device_ids=None if local_devices is None else list(local_devices),
            cluster_detection_method="deactivate",
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT,
            coordinator_bind_address=bind,
            **(credentials or {}),
        )
    finally:
        replace_name(lib_jax, "get_distributed_runtime_client", make_client)


def after_shutdown(callback: Callable[[], object]) -> None:
    """Call a function once JAX's client and service have shut down, at exit or before."""
    shutdown = distributed.global_state.shutdown

    def shut_down() -> None:
        try:
            shutdown()
        finally:
            callback()

    distributed.global_state.shutdown = shut_down


def backend_has_started() -> bool:
    """Return True if JAX's backends are initialized, after which processes can't join."""
    return xla_bridge.backends_are_initialized()


def coordinator_address() -> str | None:
    """Return host and port of the coordinator."""
    return distributed.global_state.coordinator_address


def is_recoverable() -> bool:
    """Return True if the other processes continue when one dies (`jax_enable_recoverability`)."""
    return distributed._ENABLE_RECOVERABILITY.value


def set_cpu_collectives_address(address: str) -> None:
    """Make collectives between CPU devices of several processes listen on an address.

    Gloo listens by default on the address of this machine's host name, without authentication. That
    address may be unreachable for the other processes, or reachable for other machines.
    """
    if jax.config.values["jax_cpu_collectives_implementation"] == "gloo":
        xla_bridge.register_backend_factory(
            "cpu", lambda: _make_client(address), priority=0, fail_quietly=False
        )


def _make_client(address: str) -> Any:
    if client() is None:
        return xla_bridge.make_cpu_client()
    collectives = lib_jax.make_gloo_tcp_collectives(distributed_client=client(), hostname=address)
    return xla_bridge.make_cpu_client(collectives)


def client() -> Any:
    """Return the client of the coordination service; None in a program of one process."""
    return distributed.global_state.client


def process_index() -> int:
    """Return the index of this process. Unlike `jax.process_index()` it starts no backend."""
    return distributed.global_state.process_id


def process_count() -> int:
    """Return the number of processes. Unlike `jax.process_count()` it starts no backend."""
    return distributed.global_state.num_processes


def write(key: str, value: bytes, *, overwrite: bool = False) -> bool:
    """Write a value. Return False, and keep the old value, if the key exists."""
    try:
        client().key_value_set_bytes(key, value, overwrite)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" in str(error):
            return False
        raise
    return True


def read(key: str, seconds: float = 0) -> bytes | None:
    """Return the value of a key, waiting up to some seconds for it; None after a timeout."""
    try:
        if seconds <= 0:
            return client().key_value_try_get_bytes(key)
        return client().blocking_key_value_get_bytes(key, int(seconds * 1000) + 1)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
            return None
        raise


def list_values(folder: str) -> dict[str, bytes]:
    """Return the values of all keys below a folder, by their names relative to it."""
    prefix = folder.rstrip("/") + "/"
    try:
        entries = client().key_value_dir_get_bytes(prefix)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return {}
        raise
    return {key.removeprefix(prefix): value for key, value in entries}


def delete(key: str) -> None:
    """Delete a key and all keys below it."""
    client().key_value_delete(key)


def exit_on_uncaught_error() -> None:
    """Make this process of an emulated pod exit at once after an uncaught exception.

    JAX would wait at exit, for minutes, for the other processes, which wait in a collective for
    this one. The launcher ends them as soon as this process has exited.
    """
    hook = sys.excepthook
    codes: list[int] = []

    def note(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        atexit.unregister(api.clean_up)
        codes.append(130 if issubclass(kind, KeyboardInterrupt) else 1)
        hook(kind, error, traceback)

    def leave() -> None:
        if not codes:
            return
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Skip the shutdown of JAX's client, which aborts if the service has ended.
        os._exit(codes[0])

    sys.excepthook = note
    # Registered early and therefore called late, after the program's own exit handlers.
    at_exit(leave)


def _leave_service_to_parent() -> None:
    """Keep a forked child that exits from disconnecting its parent.

    JAX's exit handler and the destructor of the client shut down the connection that the child
    shares with its parent, with threads that the child lacks: the child aborts, and the service
    counts the parent as failed.
    """
    state = distributed.global_state
    if state.client is None:
        return
    atexit.unregister(api.clean_up)
    for shared in (state.client, state.service):
        # Destructors run at the end of Python too, unless a reference is left.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(shared))


os.register_at_fork(after_in_child=_leave_service_to_parent)


def listen_on_loopback() -> None:
    """Make the CPU backend's collectives listen on the loopback address.

    Has no effect after the backend has started.
    """
    if not backend_has_started():
        set_cpu_collectives_address("127.0.0.1")
