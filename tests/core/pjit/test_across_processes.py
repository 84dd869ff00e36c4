"""Programs give equal results whether their eight devices belong to one process or to several."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.core.processes import run_in_one_pod, run_many

HOST_VALUES = Path(__file__).with_name("across_processes_host_values.py")
SCRIPT = Path(__file__).with_name("across_processes_programs.py")

STEPS = {1: 1, 2: 1, 8: 6}
"""Stride of the programs by number of processes, each of which compiles all that it runs.

With `--full-size` eight processes run every program too.
"""

# Partial sums of eight devices may be added in another order over the network than within one
# process, and each of the few intermediate sums then rounds otherwise; currently the order is
# equal. Programs without sums must be bitwise equal.
ROUNDING = 64 * np.finfo(np.float32).eps

type Results = dict[str, tuple[dict[str, np.ndarray], bool]]
"""Results of each program by their paths, and whether it sums over devices."""


def put_together(folder: Path, processes: int) -> Results:
    """Assemble the results of all processes; all replicas of a piece must be bitwise equal."""
    parts = [
        pickle.loads((folder / f"{processes}-{process}.pickle").read_bytes())
        for process in range(processes)
    ]
    out: Results = {}
    for program, (_, reduces) in parts[0].items():
        arrays: dict[str, np.ndarray] = {}
        for part in parts:
            assert part.keys() == parts[0].keys()
            for path, shape, dtype, shards in part[program][0]:
                _fill(arrays, f"{program}: result{path}", shape, dtype, shards)
        out[program] = arrays, reduces
    return out


def _fill(arrays: dict[str, Any], path: str, shape: Any, dtype: str, shards: Any) -> None:
    whole = arrays.setdefault(path, np.ma.masked_all(shape, shards[0][1].dtype))
    assert whole.dtype.name == dtype and whole.shape == shape, path
    for bounds, piece in shards:
        index = tuple(slice(*ends) for ends in bounds)
        there = whole[index]
        known = ~np.ma.getmaskarray(there)
        assert np.asarray(there)[known].tobytes() == piece[known].tobytes(), (
            f"{path}: copies differ"
        )
        whole[index] = piece


@pytest.mark.integration
def test_processes_pass_equal_values_and_no_batches_of_their_own() -> None:
    for outputs in run_in_one_pod([HOST_VALUES], 2, 2):
        assert "both agree" in outputs[HOST_VALUES.name], outputs


@pytest.mark.integration
def test_results_are_equal_in_one_two_and_eight_processes(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    steps = STEPS | ({8: 1} if pytestconfig.getoption("--full-size") else {})
    for processes, step in steps.items():
        run_many(SCRIPT, processes, 8 // processes, str(tmp_path), str(step), timeout=400)
    (alone, *others) = (put_together(tmp_path, processes) for processes in steps)
    assert sum(not reduces for _, reduces in alone.values()) >= 8
    assert len(others[0]) == len(alone) and steps[8] * len(others[1]) >= len(alone)
    for several in others:
        for program, (got, _) in several.items():
            results, reduces = alone[program]
            assert got.keys() == results.keys()
            for path, right in results.items():
                assert not np.ma.getmaskarray(got[path]).any(), f"{path}: a piece is missing"
                _compare(path, np.asarray(got[path]), np.asarray(right), exact=not reduces)


def _compare(path: str, got: np.ndarray, right: np.ndarray, *, exact: bool) -> None:
    if exact or not np.issubdtype(right.dtype, np.inexact):
        assert got.tobytes() == right.tobytes(), f"{path}: not the same to the bit"
        return
    scale = max(1.0, float(np.abs(right[np.isfinite(right)]).max(initial=0)))
    np.testing.assert_allclose(got, right, rtol=0, atol=ROUNDING * scale, err_msg=path)
