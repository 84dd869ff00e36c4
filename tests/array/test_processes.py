"""Two real processes."""

import os
from pathlib import Path

import pytest

from tests.processes import run_two

SCRIPT = Path(__file__).with_name("two_processes.py")


@pytest.mark.slow
@pytest.mark.skipif("cpu" not in os.environ["JAX_PLATFORMS"], reason="emulated processes")
def test_arrays_across_two_processes() -> None:
    for output in run_two(SCRIPT):
        assert "both agree" in output, output
