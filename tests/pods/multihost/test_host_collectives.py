"""Gathering, broadcasting and comparing in 2 and 4 real processes."""

from pathlib import Path

import pytest

from tests.core.processes import run_many


@pytest.mark.integration
@pytest.mark.parametrize("processes", [2, 4])
def test_host_collectives_in_a_pod(processes: int) -> None:
    script = Path(__file__).with_name("pod_collectives.py")
    for output in run_many(script, processes, 2):
        assert "all agree" in output, output


@pytest.mark.integration
def test_calls_that_jax_accepts_have_its_results() -> None:
    script = Path(__file__).with_name("pod_like_jax.py")
    for output in run_many(script, 2, 2):
        assert "both agree" in output, output
