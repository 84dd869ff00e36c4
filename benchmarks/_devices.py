"""Emulated CPU devices, processes of their own and repeat calls of several benchmarks.

It imports no JAX, which must start after a benchmark has chosen its devices.
"""

import multiprocessing
import os
import resource
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

_COUNT = "--xla_force_host_platform_device_count"


def emulated(count: int) -> dict[str, str]:
    """Return environment variables by which JAX starts with emulated CPU devices.

    A platform or a number of devices that the environment has already wins.

    Args:
        count: Number of devices.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _COUNT not in flags:
        flags = f"{flags} {_COUNT}={count}".strip()
    return {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"), "XLA_FLAGS": flags}


def run_apart[T](variables: Mapping[str, str], function: Callable[..., T], *args: Any) -> T:
    """Run a function in a new Python process and return its result.

    Args:
        variables: Environment variables of the process, beside this one's.
        function: Function of a module; the process imports the module.
        args: Its arguments.
    """
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *args).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


def cpu_of_children() -> float:
    """Return the CPU seconds of all processes that this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def add_one(leaves: list[Any]) -> list[Any]:
    """Add one to each leaf: the function of benchmarks of repeat calls."""
    return [leaf + 1 for leaf in leaves]


class Loop:
    """Call a function on its own last results."""

    def __init__(self, call: Callable[[Any], Any], state: Any) -> None:
        self.call = call
        self.state = state

    def __call__(self) -> None:
        """Make one call."""
        self.state = self.call(self.state)
