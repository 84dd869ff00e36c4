"""Host-local arrays in pods of 1, 2 and 4 real processes."""

from pathlib import Path

import pytest

from tests.core.processes import run_many


@pytest.mark.integration
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_host_local_arrays_in_a_pod(processes: int) -> None:
    script = Path(__file__).with_name("pod_host_local.py")
    for output in run_many(script, processes, 8 // processes):
        assert "all agree" in output, output
