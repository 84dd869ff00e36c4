"""A trainer of 2022 that saves GlobalDeviceArrays, and resumes on other meshes and in pods."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.legacy.programs import ALONE, POD, run_program

pytestmark = pytest.mark.integration


@functools.cache
def losses_of_six_steps() -> list[float]:
    """Return the losses of the same training on one device, in today's JAX."""
    rng = np.random.RandomState(0)
    params = {
        "wi": rng.normal(0, 0.3, (8, 16)).astype(np.float32),
        "wo": rng.normal(0, 0.3, (16, 4)).astype(np.float32),
        "bias": np.zeros(4, np.float32),
    }

    @jax.jit
    @jax.value_and_grad
    def loss_and_grads(params: Any, x: Any) -> Any:
        out = jnp.tanh(x @ params["wi"]) @ params["wo"] + params["bias"]
        return jnp.mean((out - jnp.sin(x[:, :4])) ** 2)

    momentum, losses = jax.tree.map(np.zeros_like, params), []
    for number in range(6):
        x = np.random.RandomState(100 + number).normal(size=(16, 8)).astype(np.float32)
        loss, grads = jax.device_get(loss_and_grads(params, x))
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
        losses.append(float(loss))
    return losses


def check(report: dict[str, Any], jax_array: str, files: list[str]) -> None:
    expected = losses_of_six_steps()[3:]
    np.testing.assert_allclose(report["losses"], expected, rtol=1e-4)
    np.testing.assert_allclose(report["losses_on_another_mesh"], expected, rtol=1e-4)
    np.testing.assert_allclose(report["sums_on_another_mesh"], report["sums"], rtol=1e-5)
    assert report["restored_is_saved"]
    assert 0 < report["largest_difference_of_half"] < 0.01
    assert report["step"] == 6
    assert report["kinds"] == (["ArrayImpl"] if jax_array == "1" else ["GlobalDeviceArray"])
    assert report["on_second_mesh"]
    assert report["missing_is_reported"]
    assert report["files"] == files


@pytest.mark.parametrize("jax_array", ["1", "0"], ids=["array", "no_array"])
def test_checkpointed_trainer(jax_array: str, tmp_path: Path) -> None:
    alone, pod = tmp_path / "alone", tmp_path / "pod"
    alone.mkdir()
    pod.mkdir()
    (report,) = run_program(
        "checkpointed_trainer", ALONE, f"--workdir={alone}", JAX_ARRAY=jax_array
    )
    check(report, jax_array, ["half_3", "leaves_3", "managed_3"])
    assert report["first_replicas"] == [1, 8, 8, 1, 8, 8, 1]
    # A pod resumes from a checkpoint of one process.
    reports = run_program(
        "checkpointed_trainer",
        POD,
        f"--workdir={pod}",
        f"--restore_from={alone}",
        JAX_ARRAY=jax_array,
    )
    for report in reports:
        check(report, jax_array, ["half_3", "managed_3"])
    replicas = [report["first_replicas"] for report in reports]
    assert replicas == [[1, 4, 4, 1, 4, 4, 1], [0, 4, 4, 0, 4, 4, 0]]
