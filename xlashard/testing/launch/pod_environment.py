"""The environment in which each process of an emulated pod runs."""

from collections.abc import Mapping

from xlashard.config import PodPlace, place_variables

LOOPBACK = "127.0.0.1"
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"

# Emulated devices share the processor's cores. On a busy machine one may wait for the others longer
# than the 40 s after which XLA takes a collective for stuck, and ends the process.
_PATIENCE_FLAG = "--xla_cpu_collective_call_terminate_timeout_seconds"
_PATIENCE = 1200


def flags_for_devices(flags: str, devices: int) -> str:
    """`XLA_FLAGS` that emulate devices.

    Args:
        flags: What `XLA_FLAGS` is now. What it says of other things stays.
        devices: How many.

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
    """`XLA_FLAGS` with which emulated devices wait long enough for each other.

    Args:
        flags: What `XLA_FLAGS` is now. If it says how long, so it stays.
    """
    if any(_sets(flag, _PATIENCE_FLAG) for flag in flags.split()):
        return flags
    return f"{flags} {_PATIENCE_FLAG}={_PATIENCE}".strip()


def flagged_devices(flags: str) -> int | None:
    """How many devices `XLA_FLAGS` emulates; None if it doesn't say."""
    found = [flag.partition("=")[2] for flag in flags.split() if _sets(flag, DEVICE_COUNT_FLAG)]
    return int(found[-1]) if found and found[-1].isdecimal() else None


def _sets(flag: str, name: str) -> bool:
    return flag.partition("=")[0] == name


def pod_environment(base: Mapping[str, str], place: PodPlace) -> dict[str, str]:
    """The environment of one process.

    Args:
        base: That of the launcher.
        place: Which process of which pod.
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
        # Lines come out when they are printed, and SIGABRT shows the stacks of all threads.
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        # gRPC would ask a proxy, if there is one, for the way to this machine itself.
        **({"no_grpc_proxy": LOOPBACK} if _PROXIES & {name.lower() for name in base} else {}),
    }


_PROXIES = {"grpc_proxy", "https_proxy", "http_proxy"}
# It wins over the flag that emulates devices; and the version of an MPI that is none of ours.
_REPLACED = ("JAX_NUM_CPU_DEVICES", "OMPI_VERSION")


def _for_jax(place: PodPlace) -> dict[str, str]:
    # Unless it is told, the coordinator listens on all addresses of the machine.
    return {
        "JAX_COORDINATOR_ADDRESS": place.coordinator,
        "JAX_COORDINATOR_BIND_ADDRESS": place.coordinator,
    }


def _for_its_detection(place: PodPlace) -> dict[str, str]:
    """What makes `jax.distributed.initialize()` without arguments find its place.

    JAX reads the number of processes and the own one from no variables of its own, only from those
    of launchers that it knows. It asks for Open MPI's first.
    """
    return {
        "OMPI_MCA_orte_hnp_uri": "",
        "OMPI_COMM_WORLD_SIZE": str(place.processes),
        "OMPI_COMM_WORLD_RANK": str(place.process_id),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(place.process_id),
    }
