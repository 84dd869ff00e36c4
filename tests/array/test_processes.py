"""Two real processes."""

import os
from pathlib import Path

import pytest

from tests.processes import run_two

SCRIPTS = ("two_processes.py", "two_processes_pmap.py", "two_processes_to_host.py")


@pytest.mark.slow
@pytest.mark.skipif("cpu" not in os.environ["JAX_PLATFORMS"], reason="emulated processes")
@pytest.mark.parametrize("script", SCRIPTS)
def test_arrays_across_two_processes(script: str) -> None:
    for output in run_two(Path(__file__).with_name(script)):
        assert "both agree" in output, output
