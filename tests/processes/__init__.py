"""Several real processes that work on one program."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from xlashard.testing.launcher import Launch, LaunchPlan, PodSize
from xlashard.testing.supervision import Rules, run_to_end

ROOT = Path(__file__).resolve().parents[2]


def run_two(script: Path, *args: str) -> list[str]:
    """Runs a script in two processes, of two emulated devices each.

    Args:
        script: It is given a free port, the number of its process, and the arguments.
        args: The arguments.

    Returns:
        What each printed, if both ended well.
    """
    port = str(_free_port())
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(ROOT),
    }
    running = [
        subprocess.Popen(
            [sys.executable, str(script), port, str(number), *args],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, output in zip(running, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def run_many(
    script: Path, processes: int, devices: int, *args: str, timeout: float = 240
) -> list[str]:
    """Runs a script in the processes of an emulated pod.

    In it, `jax.distributed.initialize()` without arguments makes JAX one of them.

    Args:
        script: It is given the arguments; where it is, its environment says.
        processes: How many.
        devices: How many each has.
        args: The arguments.
        timeout: Seconds after which all processes show their stacks and are ended.

    Returns:
        What each printed, if all ended well.
    """
    plan = LaunchPlan(
        [sys.executable, str(script), *args],
        PodSize(processes, devices),
        environment={**os.environ, "PYTHONPATH": str(ROOT)},
        one_stream=True,
    )
    done = run_to_end(Launch(plan), Rules(timeout))
    assert done.verdict.well, done.report()
    return list(done.outputs)


def join_the_other() -> None:
    """Makes JAX of a script that `run_two` runs one of two, before it is asked for devices."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))


def expect[E: Exception](kind: type[E], text: str, use: Callable[[], Any]) -> E:
    """The error that a call must raise, with a text in it; `pytest.raises` for scripts."""
    try:
        use()
    except kind as error:
        assert re.search(text, str(error), re.S), error
        return error
    raise AssertionError(f"no {kind.__name__}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
