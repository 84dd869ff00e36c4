"""Collectives of hosts, batches of data loaders, and callbacks, in 2 and 4 real processes."""

from pathlib import Path

import pytest

from tests.core.processes import run_in_one_pod, run_many


@pytest.mark.integration
@pytest.mark.parametrize("processes", [2, 4])
def test_host_collectives_batches_and_callbacks_in_a_pod(processes: int) -> None:
    names = ("pod_collectives.py", "pod_batches.py", "pod_callbacks.py")
    scripts = [Path(__file__).with_name(name) for name in names]
    for outputs in run_in_one_pod(scripts, processes, 2):
        assert all("all agree" in outputs[name] for name in names), outputs


@pytest.mark.integration
def test_calls_that_jax_accepts_have_its_results() -> None:
    script = Path(__file__).with_name("pod_like_jax.py")
    for output in run_many(script, 2, 2):
        assert "both agree" in output, output
