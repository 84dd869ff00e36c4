"""Whole programs of 2022 and 2023, unchanged: they get the results of today's JAX on one device.

The weights that the 8-device layouts add up differ in the last bits, hence the tolerances.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.legacy.programs import ALONE, POD, references, run_by_command, run_program
from xlashard.pods.testing.launcher import PodSize

pytestmark = pytest.mark.integration

SIZES = pytest.mark.parametrize("size", [ALONE, POD], ids=["1x8", "2x4"])
ON_AND_OFF = pytest.mark.parametrize("jax_array", ["1", "0"], ids=["array", "no_array"])


def assert_close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=1e-5)


def halves(reports: list[dict[str, Any]], values: list[float]) -> list[list[float]]:
    """Return each process's part of the values."""
    return [part.tolist() for part in np.split(np.asarray(values), len(reports))]


# By the arguments that select it.
WORLDS = {
    "array": ("--jax_array=1",),
    "gda": ("--jax_array=0", "--jax_parallel_functions_output_gda=1"),
    "hostlocal": ("--nojax_array",),
}


@SIZES
@pytest.mark.parametrize("mode", WORLDS)
def test_partitioned_trainer(size: PodSize, mode: str) -> None:
    reports = run_program("partitioned_trainer", size, *WORLDS[mode])
    expected = references.partitioned_trainer(4)
    for number, report in enumerate(reports):
        assert_close(report["losses"], expected["losses"])
        assert_close(report["norm"], expected["norm"])
        parts = [sum(both) for both in expected["halves"]]
        if len(reports) > 1:
            parts = [both[number] for both in expected["halves"]]
        assert_close(report["local_evals"], parts)
        assert report["num_gda"] == (report["num_leaves"] if mode == "gda" else 0)
        assert report["num_leaves"] > 3 * 4
        assert report["same_shapes"]
        assert report["layout"] == [16, number, len(reports), True]


@SIZES
@ON_AND_OFF
def test_gda_pipeline(size: PodSize, jax_array: str) -> None:
    reports = run_program("gda_pipeline", size, JAX_ARRAY=jax_array)
    expected = references.gda_pipeline(6)
    share = len(reports)
    for number, report in enumerate(reports):
        assert_close(report["losses"], expected["losses"])
        assert_close(report["eval"], expected["eval"])
        assert_close(report["predicted"], expected["predicted"])
        # Rows of 4 on two devices each: in a pod, a process has 4 devices, so two of these pieces.
        starts = [start for start in range(0, 16, 4) if start // (16 // share) == number]
        each = [[start, start + 4] for start in starts for _ in range(2)]
        assert report["calls"][0] == report["calls"][3] == [*each, 8 // share]
        assert report["calls"][1] == report["calls"][4] == [[2] * len(starts)]
        assert report["calls"][2] == []
        assert report["num_remote_shards"] == 8 - 8 // share
        assert report["first_shape"] == [4, 8]
        assert report["local_bytes"] == 16 * (8 + 4) * 4 // share
        assert report["mesh_axes_are_spec"]
        assert report["kinds"] == (["ArrayImpl"] if jax_array == "1" else ["GlobalDeviceArray"])
        assert report["deleted"]
        assert report["names_deletion"]


@SIZES
@ON_AND_OFF
def test_hostlocal_trainer(size: PodSize, jax_array: str) -> None:
    reports = run_program("hostlocal_trainer", size, JAX_ARRAY=jax_array)
    expected = references.hostlocal_trainer(5)
    rows = 24 // len(reports)
    for report, out in zip(reports, halves(reports, expected["out"]), strict=True):
        assert_close(report["losses"], expected["losses"])
        assert_close(report["local_out"], out)
        assert report["local_shape"] == [rows, 5]
        # With arrays that know their sharding, fed arrays have the global shape.
        assert report["fed"] == [[24 if jax_array == "1" else rows, 12], [12, 16]]
        assert report["correct"] == expected["correct"]
        assert report["agreed"] == report["losses"][-1]
        assert report["sharded_device_array"]
        assert report["device_array"]


@SIZES
@ON_AND_OFF
def test_pmap_trainer(size: PodSize, jax_array: str, tmp_path: Path) -> None:
    reports = run_program("pmap_trainer", size, f"--workdir={tmp_path}", JAX_ARRAY=jax_array)
    expected = references.pmap_trainer(5)
    for report, outputs in zip(reports, halves(reports, expected["outputs"]), strict=True):
        assert_close(report["losses"], expected["losses"])
        assert_close(report["outputs"], outputs)
        assert report["restored"] == report["outputs"]
        assert report["spread"] == 0
        assert report["all_sharded_device_arrays"]
        assert report["first_is_device_array"]
        assert not report["first_is_sharded"]
        assert report["buffers_are_local"]
        assert report["slice"] == [2, 4]


@SIZES
@ON_AND_OFF
def test_model_parallel_inference(size: PodSize, jax_array: str) -> None:
    reports = run_program("model_parallel_inference", size, JAX_ARRAY=jax_array)
    greedy, sampled = references.tokens(0), references.tokens(0.7)
    for report in reports:
        assert report["greedy"] == greedy
        assert report["one_by_one"] == greedy
        assert report["sampled"] == sampled
        whole = jax_array == "1" or len(reports) == 1
        assert report["cache_shape"] == [4 if whole else 2, 12, 4, 4]
        layer = 4 * (16 + 4 * 16 * 16 + 8 * 16 * 16)
        weights = {"wte": 4 * 32 * 16, "wpe": 4 * 12 * 16, "layer_0": layer, "layer_1": layer}
        assert report["weights"] == weights
        assert report["bias"] is None
        # Arrays that span processes are what GlobalDeviceArrays were.
        assert report["device_arrays"] == (jax_array == "0" or len(reports) == 1)


def test_gda_pipeline_by_the_pod_command() -> None:
    """The pod's own command around the runner gives equal results."""
    reports = run_by_command("gda_pipeline", POD, JAX_ARRAY="0")
    expected = references.gda_pipeline(6)
    for report in reports:
        assert_close(report["losses"], expected["losses"])
        assert report["kinds"] == ["GlobalDeviceArray"]
