"""Two real processes."""

import re
from pathlib import Path

import pytest

from tests.processes import run_in_one_pod, run_many

HERE = Path(__file__).parent
SCRIPTS = (
    *("two_processes.py", "two_processes_pmap.py", "two_processes_to_host.py"),
    *("across_processes_putting.py", "across_processes_elsewhere.py"),
    "across_processes_unreduced.py",
)


@pytest.mark.slow
def test_arrays_across_two_processes() -> None:
    for told in run_in_one_pod([HERE / script for script in SCRIPTS], 2, 2):
        for script in SCRIPTS:
            assert re.search("^(both|all) agree$", told[script], re.M), (script, told[script])


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "pairs"), [(2, 60), (4, 25)])
def test_from_any_devices_to_any_others(processes: int, pairs: int) -> None:
    script = Path(__file__).with_name("across_processes_moving.py")
    for output in run_many(script, processes, 8 // processes, str(pairs)):
        assert "all agree" in output, output
