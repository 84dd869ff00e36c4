"""Array modes across processes: shapes of local and global arrays, on 2 x 4 and 4 x 2 devices."""

import json
from pathlib import Path

import pytest

from tests.core.processes import run_many

SCRIPT = Path(__file__).with_name("pod_array_modes.py")


@pytest.mark.integration
@pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 2)])
def test_array_modes_in_a_pod(processes: int, devices: int) -> None:
    outputs = run_many(SCRIPT, processes, devices)
    for output in outputs:
        assert "worlds_side_by_side" in json.loads(output.splitlines()[-1])
