"""Two real processes."""

from pathlib import Path

import pytest

from tests.processes import run_many

SCRIPTS = ("two_processes.py", "two_processes_pmap.py", "two_processes_to_host.py")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_arrays_across_two_processes(script: str) -> None:
    for output in run_many(Path(__file__).with_name(script), 2, 2):
        assert "both agree" in output, output


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "pairs"), [(2, 60), (4, 25)])
def test_from_any_devices_to_any_others(processes: int, pairs: int) -> None:
    script = Path(__file__).with_name("across_processes_moving.py")
    for output in run_many(script, processes, 8 // processes, str(pairs)):
        assert "all agree" in output, output


@pytest.mark.slow
@pytest.mark.parametrize("subject", ["putting", "elsewhere"])
def test_arrays_across_a_pod(subject: str) -> None:
    for output in run_many(Path(__file__).with_name(f"across_processes_{subject}.py"), 2, 2):
        assert "all agree" in output, output
