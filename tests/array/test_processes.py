"""Two real processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("two_processes.py")
ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.slow
@pytest.mark.skipif("cpu" not in os.environ["JAX_PLATFORMS"], reason="emulated processes")
def test_arrays_across_two_processes() -> None:
    port = str(free_port())
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(ROOT),
    }
    running = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), port, str(number)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, output in zip(running, outputs, strict=True):
        assert process.returncode == 0, output
        assert "both agree" in output
