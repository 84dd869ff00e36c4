"""TPU topologies that libtpu can compile for on a machine without a TPU."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from typing import Any

import jax
from jax._src import cloud_tpu_init, xla_bridge

from xlashard._jax.shardings import Device
from xlashard._jax.versions import check_libtpu
from xlashard.errors import TopologyError

# Read by libtpu when it is loaded: ask no metadata server where this machine is, let other
# processes have it loaded too (no chip is touched), write no logs.
_COMPILE_ONLY = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_LOG_DIR": "disabled",
}


def libtpu_version() -> str | None:
    """The version of libtpu, or None where it is not installed."""
    try:
        return metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        return None


def compile_only_devices(name: str, options: Mapping[str, Any]) -> list[Device]:
    """The devices of a topology, for which programs can be compiled and not run.

    Args:
        name: As libtpu writes it: `v5p:2x2x4`.
        options: What libtpu takes besides: `num_slices`, `chip_config_name`, `wrap`, ...

    Raises:
        TopologyError: If libtpu is missing or not the one that JAX asks for, or knows no such
            topology.
    """
    if cloud_tpu_init.get_tpu_library_path() is None:
        raise TopologyError(  # no-catalogue: needs an environment without libtpu
            "libtpu, which compiles for TPUs, is not installed: pip install 'xlashard[tpu]'"
        )
    check_libtpu(libtpu_version(), metadata.requires("jax") or ())
    try:
        with _environment(_COMPILE_ONLY):
            topology = xla_bridge.make_pjrt_tpu_topology(name, **options)
    except jax.errors.JaxRuntimeError as error:
        # no-catalogue: names are checked before
        raise TopologyError(f"libtpu knows no topology {name}: {_said(error)}") from error
    return list(topology._make_compile_only_devices())


def _said(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]


def probe_for_tpus_quietly() -> None:
    """Let JAX find no TPU on a machine without chips, with no errors of libtpu on the terminal.

    libtpu is loaded with the first backend, and misses there the type and the hosts of a TPU.
    Variables that the user has set stay as they are.
    """
    registration = xla_bridge._backend_factories.get("tpu")
    if registration is None:
        return
    make_client = registration.factory

    def probe() -> Any:
        needed = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")
        with _environment({n: _COMPILE_ONLY[n] for n in needed if n not in os.environ}):
            return make_client()

    xla_bridge._backend_factories["tpu"] = replace(registration, factory=probe)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """What libtpu is to read when it is loaded; a process that has a TPU keeps what it has."""
    if cloud_tpu_init.running_in_cloud_tpu_vm:
        yield
        return
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
