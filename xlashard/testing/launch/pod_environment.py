"""Environment variables of the processes of an emulated pod."""

from collections.abc import Mapping

from xlashard.config import PodPlace, place_variables

LOOPBACK = "127.0.0.1"
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"

# Emulated devices share the CPU cores. On a busy machine one may wait for the others longer than
# the 40 s after which XLA considers a collective stuck and terminates the process.
_COLLECTIVE_TIMEOUT_FLAG = "--xla_cpu_collective_call_terminate_timeout_seconds"
_COLLECTIVE_TIMEOUT = 1200


def flags_for_devices(flags: str, devices: int) -> str:
    """Return `XLA_FLAGS` that emulate a number of devices.

    Args:
        flags: Current value of `XLA_FLAGS`; other flags in it are kept.
        devices: Number of devices.

    Example:
        >>> flags_for_devices("--xla_a=1 --xla_cpu_collective_call_terminate_timeout_seconds=9", 4)
        '--xla_a=1 --xla_cpu_collective_call_terminate_timeout_seconds=9
        --xla_force_host_platform_device_count=4'
    """
    kept = [
        flag for flag in flags_with_timeout(flags).split() if not _sets(flag, DEVICE_COUNT_FLAG)
    ]
    return " ".join([*kept, f"{DEVICE_COUNT_FLAG}={devices}"])


def flags_with_timeout(flags: str) -> str:
    """Return `XLA_FLAGS` with a long timeout for collectives between emulated devices.

    Args:
        flags: Current value of `XLA_FLAGS`; a timeout in it is kept.
    """
    if any(_sets(flag, _COLLECTIVE_TIMEOUT_FLAG) for flag in flags.split()):
        return flags
    return f"{flags} {_COLLECTIVE_TIMEOUT_FLAG}={_COLLECTIVE_TIMEOUT}".strip()


def flagged_devices(flags: str) -> int | None:
    """Return the number of devices that `XLA_FLAGS` emulates; None if it does not specify it."""
    found = [flag.partition("=")[2] for flag in flags.split() if _sets(flag, DEVICE_COUNT_FLAG)]
    return int(found[-1]) if found and found[-1].isdecimal() else None


def _sets(flag: str, name: str) -> bool:
    return flag.partition("=")[0] == name


def pod_environment(base: Mapping[str, str], place: PodPlace) -> dict[str, str]:
    """Return the environment of one process.

    Args:
        base: Environment of the launcher.
        place: The pod, and the index of the process.
    """
    kept = {name: value for name, value in base.items() if name not in _REPLACED}
    return {
        **kept,
        **place_variables(place),
        **_for_jax(place),
        **_for_its_detection(place),
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": flags_for_devices(base.get("XLA_FLAGS", ""), place.devices),
        # Unbuffered output; SIGABRT prints the stacks of all threads.
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        # gRPC would use a configured proxy to reach this machine itself.
        **({"no_grpc_proxy": LOOPBACK} if _PROXIES & {name.lower() for name in base} else {}),
    }


_PROXIES = {"grpc_proxy", "https_proxy", "http_proxy"}
# The first overrides the device count flag; the second belongs to an unrelated MPI.
_REPLACED = ("JAX_NUM_CPU_DEVICES", "OMPI_VERSION")


def _for_jax(place: PodPlace) -> dict[str, str]:
    # By default the coordinator listens on all addresses of the machine.
    return {
        "JAX_COORDINATOR_ADDRESS": place.coordinator,
        "JAX_COORDINATOR_BIND_ADDRESS": place.coordinator,
    }


def _for_its_detection(place: PodPlace) -> dict[str, str]:
    """Return the variables by which `jax.distributed.initialize()` detects its process.

    JAX reads the number of processes and the process id only from variables of launchers that it
    supports; Open MPI's come first.
    """
    return {
        "OMPI_MCA_orte_hnp_uri": "",
        "OMPI_COMM_WORLD_SIZE": str(place.processes),
        "OMPI_COMM_WORLD_RANK": str(place.process_id),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(place.process_id),
    }
