"""JAX's distributed runtime: which process this is, and the key-value store that all share.

The store is a service of one process, the coordinator. A key's first writer has it, unless a writer
asks to overwrite; readers may wait for a key to come.
"""

import atexit
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import partial
from types import TracebackType
from typing import Any

import jax
from jax._src import api, cloud_tpu_init, clusters, config, distributed, xla_bridge
from jax._src.clusters import cloud_tpu_cluster
from jax._src.lib import _jax

from xlashard.lazily import dataclass

SHUTDOWN_TIMEOUT = 24 * 24 * 3600
"""Seconds that a process waits at its end for the programs of its peers, in milliseconds 31 bits.

Peers that are killed, or no longer send heartbeats, end it at once.
"""


@dataclass(frozen=True)
class Cluster:
    """An environment of several processes that JAX knows, and this one's place in it.

    Attributes:
        name: What JAX calls it.
        processes: How many there are.
        process_id: Which one this is.
        local_devices: The devices that are this process's own; None if all of its machine are.
    """

    name: str
    processes: int
    process_id: int
    local_devices: tuple[int, ...] | None


@dataclass(frozen=True)
class InitializeOptions:
    """How this process joins the others.

    Attributes:
        coordinator: Host and port of the service.
        bind: The host and port where process 0's service listens.
        processes: How many there are.
        process_id: Which one this is.
        local_devices: The devices to use; None for all.
        timeout: How long to wait for the others, in seconds.
        heartbeat: After how many seconds without a heartbeat a process counts as dead.
        credentials: What JAX takes for mutual TLS, by its own names.
    """

    coordinator: str
    bind: str
    processes: int
    process_id: int
    local_devices: tuple[int, ...] | None
    timeout: int
    heartbeat: int
    credentials: Mapping[str, Any] = field(default_factory=dict)


def find_cluster() -> Cluster | None:
    """The environment that JAX detects, if there is one."""
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
    """Host and port of the coordinator in the environment that JAX detects.

    Args:
        seconds: How long to wait for its name to be known, where JAX asks for that.
    """
    port = os.environ.get("JAX_COORDINATOR_PORT")
    return _detected().get_coordinator_address(timeout_secs=seconds, override_coordinator_port=port)


def tpu_attribute(name: str) -> str | None:
    """What a TPU VM knows of itself, such as `NODE_ID`; None if it doesn't."""
    try:
        return cloud_tpu_cluster.get_tpu_env_value(name)
    except Exception:
        # Only for a message, and whatever the metadata server did can't be mended here.
        return None


def _detected() -> Any:
    """The class of the first environment that is there, in the order in which JAX asks."""
    for kind in clusters.ClusterEnv._cluster_types:
        if not kind.opt_in_only_method and kind.is_env_present():
            return kind
    return None


def join(joining: InitializeOptions) -> None:
    """Starts the service, in process 0, and the client. All processes must be there already."""
    local = joining.local_devices
    # JAX aborts a process whose program ends five minutes before those of its peers, although they
    # are alive; `jax.distributed.initialize` sets the timeout of its service only.
    make_client = _jax.get_distributed_runtime_client
    patient = partial(make_client, shutdown_timeout=SHUTDOWN_TIMEOUT)
    _jax.get_distributed_runtime_client = patient  # pyright: ignore[reportPrivateImportUsage]
    try:
        jax.distributed.initialize(
            joining.coordinator,
            joining.processes,
            joining.process_id,
            local_device_ids=None if local is None else list(local),
            cluster_detection_method="deactivate",
            initialization_timeout=joining.timeout,
            heartbeat_timeout_seconds=joining.heartbeat,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT,
            coordinator_bind_address=joining.bind,
            **joining.credentials,
        )
    finally:
        _jax.get_distributed_runtime_client = make_client


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
    """Whether JAX has devices already, which it then has for this process alone."""
    return xla_bridge.backends_are_initialized()


def coordinator_address() -> str | None:
    """Host and port of the coordinator."""
    return distributed.global_state.coordinator_address


def is_recoverable() -> bool:
    """Whether JAX is told to let the others go on when a process dies."""
    return distributed._ENABLE_RECOVERABILITY.value


def set_cpu_collectives_address(address: str) -> None:
    """Makes collectives between CPU devices of several processes listen at one address.

    Gloo would listen at the address of this machine's name, which may be one that more than the
    other processes reach, or none that they do; and it doesn't check what it listens for.
    """
    if config.cpu_collectives_implementation.value == "gloo":
        xla_bridge.register_backend_factory(
            "cpu", lambda: _make_client(address), priority=0, fail_quietly=False
        )


def _make_client(address: str) -> Any:
    if client() is None:
        return xla_bridge.make_cpu_client()
    collectives = _jax.make_gloo_tcp_collectives(distributed_client=client(), hostname=address)
    return xla_bridge.make_cpu_client(collectives)


def client() -> Any:
    """The client of the coordination service; None in a program of one process."""
    return distributed.global_state.client


def process_index() -> int:
    """The number of this process. Unlike `jax.process_index()` it starts no backend."""
    return distributed.global_state.process_id


def process_count() -> int:
    """How many processes there are. Unlike `jax.process_count()` it starts no backend."""
    return distributed.global_state.num_processes


def write(key: str, value: bytes, *, overwrite: bool = False) -> bool:
    """Writes a value; False if there is one already, which then stays."""
    try:
        client().key_value_set_bytes(key, value, overwrite)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" in str(error):
            return False
        raise
    return True


def read(key: str, seconds: float = 0) -> bytes | None:
    """The value of a key, waited for up to some seconds; None if there is none by then."""
    try:
        if seconds <= 0:
            return client().key_value_try_get_bytes(key)
        return client().blocking_key_value_get_bytes(key, int(seconds * 1000) + 1)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
            return None
        raise


def list_values(folder: str) -> dict[str, bytes]:
    """The values of all keys below a folder, by the part of their names past it."""
    prefix = folder.rstrip("/") + "/"
    try:
        found = client().key_value_dir_get_bytes(prefix)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return {}
        raise
    return {key.removeprefix(prefix): value for key, value in found}


def delete(key: str) -> None:
    """Removes a key and all keys below it."""
    client().key_value_delete(key)


_LOOPBACK = "127.0.0.1"


def exit_on_uncaught_error() -> None:
    """Makes this process end when an exception ends its program.

    JAX would wait then, for minutes, until all the others come to their end too; and they wait in a
    collective for this one. Whoever started the pod must see the end, to end the others.
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
        # What comes after this is the end of JAX's own client, which misses its service then, and
        # calls that a fatal error.
        os._exit(codes[0])

    sys.excepthook = note
    # Registered early, so called late: after what the program has to do at its end.
    atexit.register(leave)


def listen_on_loopback() -> None:
    """Makes the CPU backend's collectives listen on the loopback address.

    Gloo listens on the address of this machine's name, if it isn't told another. That is often one
    that other machines reach, and what it listens for it doesn't check. After the backend has
    started it is too late, and nothing happens.
    """
    if not backend_has_started():
        set_cpu_collectives_address(_LOOPBACK)
