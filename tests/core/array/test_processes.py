"""Two real processes."""

import re
from pathlib import Path

import jax
import pytest

from tests.core.processes import run_in_one_pod, run_many

HERE = Path(__file__).parent
SCRIPTS = (
    *("two_processes.py", "two_processes_to_host.py"),
    *("across_processes_putting.py", "across_processes_elsewhere.py", "no_local_shards.py"),
)
PARTIAL_RESULTS = "across_processes_unreduced.py"


@pytest.mark.integration
def test_arrays_across_two_processes() -> None:
    # GSPMD refuses programs with unreduced values.
    scripts = [*SCRIPTS, *[PARTIAL_RESULTS] * jax.config.jax_use_shardy_partitioner]
    for outputs in run_in_one_pod([HERE / script for script in scripts], 2, 2):
        for script in scripts:
            assert re.search("^(both|all) agree$", outputs[script], re.M), (script, outputs[script])


@pytest.mark.integration
@pytest.mark.parametrize(("processes", "pairs"), [(2, 60), (4, 25)])
def test_random_reshards_across_processes(processes: int, pairs: int) -> None:
    script = Path(__file__).with_name("across_processes_moving.py")
    for output in run_many(script, processes, 8 // processes, str(pairs)):
        assert "all agree" in output, output
