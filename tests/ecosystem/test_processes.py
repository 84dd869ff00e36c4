"""JAX's `multihost_utils` in two real processes."""

from pathlib import Path

import pytest

from tests.core.processes import run_many


@pytest.mark.slow
def test_multihost_utils_in_two_processes() -> None:
    for output in run_many(Path(__file__).with_name("two_processes.py"), 2, 2):
        assert "both agree" in output, output
