"""Emulated CPU devices: in one process, before JAX starts, and in the processes of a pod."""

import math
import os
from collections.abc import Mapping
from typing import Any

import jax

from xlashard._jax.runtime.coordination import backend_has_started
from xlashard.config import PodPlace, place_variables, read_flags
from xlashard.errors import ArgumentError, DeviceCountError, counted
from xlashard.support.tracebacks import short_tracebacks

_STARTS = "It starts with the first array, or the first jax.devices()."


LOOPBACK = "127.0.0.1"


DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


# Emulated devices share the CPU cores. On a busy machine one may wait for the others longer than
# the 40 s after which XLA considers a collective stuck and terminates the process.
_COLLECTIVE_TIMEOUT_FLAG = "--xla_cpu_collective_call_terminate_timeout_seconds"


_COLLECTIVE_TIMEOUT = 1200


_PROXIES = {"grpc_proxy", "https_proxy", "http_proxy"}


# The first overrides the device count flag; the second belongs to an unrelated MPI.
_REPLACED = ("JAX_NUM_CPU_DEVICES", "OMPI_VERSION")


def check_whole(name: str, value: object, least: int, example: str) -> None:
    """Check that an argument is an integer.

    Args:
        name: Name of the argument.
        value: Its value.
        least: Smallest valid value.
        example: Valid call, for the error message.

    Raises:
        ArgumentError: The value is not an integer, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(
            f"{name} is {value!r}; it must be a whole number of {least} or more: {example}"
        )


def check_seconds(name: str, value: object, example: str) -> None:
    """Check that an argument is a time in seconds above 0; infinity is no limit.

    Args:
        name: Name of the argument.
        value: Its value.
        example: Valid call, for the error message.

    Raises:
        ArgumentError: The value is not a number, or not above 0.
    """
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
    if not (0 < number < 1e15 or number == math.inf):
        raise ArgumentError(
            f"{name} is {value!r}; it must be a number of seconds above 0: {example}"
        )


class EmulatedDevices:
    """Emulated CPU devices, made by `emulated_devices`; as a context manager it returns them."""

    def __init__(self, count: int) -> None:
        self._count = count

    @property
    def devices(self) -> list[Any]:
        """The devices; JAX is started if needed."""
        with short_tracebacks:
            cpus = jax.devices("cpu")
            if len(cpus) < self._count:
                raise DeviceCountError(
                    _too_few_text(self._count, len(cpus)),
                    asked=self._count,
                    found=len(cpus),
                )
            return cpus[: self._count]

    def __enter__(self) -> list[Any]:
        return self.devices

    def __exit__(self, *_: object) -> None:
        """Do nothing: JAX keeps its devices for the lifetime of the process."""

    def __repr__(self) -> str:
        return f"emulated_devices({self._count})"


def emulated_devices(count: int) -> EmulatedDevices:
    """Make JAX start with emulated CPU devices, for tests of multi-device code.

    Call it at the top of `conftest.py`, before anything uses a device. Other flags in `XLA_FLAGS`
    are kept. Child processes inherit the number. In a process of a pod, the size of the pod has
    precedence and this function changes nothing.

    Args:
        count: Number of devices.

    Returns:
        An object that provides the devices: `with emulated_devices(8) as devices:`, or its
        attribute `devices`. If JAX already runs with more devices, these are the first of them.

    Raises:
        DeviceCountError: JAX already runs with fewer devices.
        ArgumentError: `count` is not a positive integer.

    Example:
        >>> from xlashard.testing import emulated_devices
        >>> with emulated_devices(4) as devices:
        ...     len(devices)
        4
    """
    with short_tracebacks:
        check_whole("count", count, 1, "emulated_devices(8)")
        devices = EmulatedDevices(count)
        if read_flags(os.environ).pod is not None:
            return devices
        if backend_has_started():
            _ = devices.devices  # Raises an error if too few devices exist.
        request_devices(count)
        return devices


def request_devices(count: int) -> None:
    """Let JAX start with emulated CPU devices; nothing changes if it runs already.

    Args:
        count: Number of devices of this process.
    """
    if backend_has_started():
        return
    os.environ["XLA_FLAGS"] = flags_for_devices(os.environ.get("XLA_FLAGS", ""), count)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.pop("JAX_NUM_CPU_DEVICES", None)
    jax.config.update("jax_platforms", "cpu")
    # This option overrides the flag, which XLA may have read already.
    jax.config.update("jax_num_cpu_devices", count)


def _too_few_text(devices: int, count: int) -> str:
    if read_flags(os.environ).pod is not None:
        each = -(-devices // 2)
        return (
            f"emulated_devices({devices}) in a pod that has {counted(count, 'device')} in all; ask "
            f"for more where it is started: @pytest.mark.pod(processes=2, devices={each})"
        )
    late = flagged_devices(os.environ.get("XLA_FLAGS", ""))
    flag = (
        f" XLA_FLAGS requests {late} by now, but was set too late: JAX reads it once, when it "
        "starts."
        if late is not None and late != count
        else ""
    )
    return (
        f"emulated_devices({devices}) comes too late: JAX runs already, with "
        f"{counted(count, 'CPU device')}.{flag} {_STARTS} Ask for devices before that, at the top "
        "of conftest.py or of the program:\n"
        "  from xlashard.testing import emulated_devices\n\n"
        f"  emulated_devices({devices})\n"
        "or before Python starts:\n"
        f"  export XLA_FLAGS={DEVICE_COUNT_FLAG}={devices}"
    )


def late_flags_text() -> str:
    """Return a note about `XLA_FLAGS` that were set after JAX started; "" if they took effect."""
    number = flagged_devices(os.environ.get("XLA_FLAGS", ""))
    if (
        number is None
        or not backend_has_started()
        or jax.config.jax_platforms not in ("cpu", "", None)
    ):
        return ""
    by_option = jax.config.values.get("jax_num_cpu_devices", -1)
    count = len(jax.local_devices(backend="cpu"))
    if count == number or by_option == count:
        return ""
    return (
        f"XLA_FLAGS requests {counted(number, 'emulated device')}, but JAX runs with {count}: the "
        f"variable was set too late. JAX reads it once, when it starts. {_STARTS} Write at the top "
        "of conftest.py, or of the program:\n"
        "  from xlashard.testing import emulated_devices\n\n"
        f"  emulated_devices({number})"
    )


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
    kept = [flag for flag in flags.split() if not _sets(flag, DEVICE_COUNT_FLAG)]
    if not any(_sets(flag, _COLLECTIVE_TIMEOUT_FLAG) for flag in kept):
        kept.append(f"{_COLLECTIVE_TIMEOUT_FLAG}={_COLLECTIVE_TIMEOUT}")
    return " ".join([*kept, f"{DEVICE_COUNT_FLAG}={devices}"])


def flagged_devices(flags: str) -> int | None:
    """Return the number of devices that `XLA_FLAGS` emulates; None if it does not specify it."""
    counts = [flag.partition("=")[2] for flag in flags.split() if _sets(flag, DEVICE_COUNT_FLAG)]
    return int(counts[-1]) if counts and counts[-1].isdecimal() else None


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
        # By default the coordinator listens on all addresses of the machine.
        "JAX_COORDINATOR_ADDRESS": place.coordinator,
        "JAX_COORDINATOR_BIND_ADDRESS": place.coordinator,
        # JAX reads the number of processes and the process id only from variables of launchers that
        # it supports; Open MPI's come first.
        "OMPI_MCA_orte_hnp_uri": "",
        "OMPI_COMM_WORLD_SIZE": str(place.processes),
        "OMPI_COMM_WORLD_RANK": str(place.process_id),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(place.process_id),
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": flags_for_devices(base.get("XLA_FLAGS", ""), place.devices),
        # Unbuffered output; SIGABRT prints the stacks of all threads.
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        # gRPC would use a configured proxy to reach this machine itself.
        **({"no_grpc_proxy": LOOPBACK} if _PROXIES & {name.lower() for name in base} else {}),
    }
