"""Every pair of the guide runs both ways, with equal values, shardings and types."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import xlashard
from tests.core.processes import run_pod
from tests.legacy.guide import kinds, pairs
from xlashard import legacy
from xlashard.legacy import installer as installing
from xlashard.pods.testing.launcher import PodSize
from xlashard.pods.testing.supervision import EndingRules


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    installing.install()
    yield
    installing.uninstall()


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


LIBRARIES = pytest.mark.parametrize("lib", [pairs.JAX, pairs.XLASHARD], ids=lambda lib: lib.name)


@pytest.mark.slow
@LIBRARIES
@pytest.mark.parametrize(
    "pair", [*pairs.PAIRS, *pairs.PAIRS_OF_ONE_PROCESS], ids=lambda pair: pair.name
)
def test_each_pair_has_equal_results_in_legacy_and_current_code(
    pair: pairs.Pair, lib: pairs.Library, mesh: Mesh
) -> None:
    pairs.run_both_ways(pair, mesh, lib)


def test_array_classes_differ_by_mode(mesh: Mesh) -> None:
    kinds.check_kinds(mesh)


@pytest.mark.slow
def test_isinstance_of_device_array(mesh: Mesh) -> None:
    with legacy.jax_array(False):
        values = [jnp.ones(3), jax.pmap(lambda x: x)(jnp.ones(8)), np.ones(3), 1.0, [jnp.ones(3)]]
        before = [kinds.isinstance_before(x) for x in values]
    after = [isinstance(x, jax.Array) for x in values]
    assert before == [[one] * 4 for one in after]
    assert after == [True, True, False, False, False]


def test_host_local_size_error_of_the_guide(mesh: Mesh) -> None:
    kinds.check_host_local_error(mesh)


def test_array_modes_can_be_switched(mesh: Mesh) -> None:
    kinds.check_switching(mesh)


def test_config_update_switches_the_array_mode(mesh: Mesh) -> None:
    from jax.experimental.global_device_array import GlobalDeviceArray
    from jax.experimental.pjit import PartitionSpec as P
    from jax.experimental.pjit import pjit

    f = pjit(lambda: jnp.arange(8), None, P("x"))
    with mesh:
        after = f()
        jax.config.update("jax_array", False)
        jax.config.update("jax_parallel_functions_output_gda", True)
        try:
            before = f()
        finally:
            jax.config.update("jax_array", True)
            jax.config.update("jax_parallel_functions_output_gda", False)
    assert isinstance(before, GlobalDeviceArray)
    assert not isinstance(after, GlobalDeviceArray)
    pairs.check_same(before, after)


def test_live_buffers_and_live_arrays() -> None:
    device = jax.devices()[3]
    gc.collect()
    x = xlashard.device_put(np.ones((5, 7)), device)
    before = [b for b in device.live_buffers() if b.shape == (5, 7)]
    after = [a for a in jax.live_arrays() if a.shape == (5, 7)]
    ours = [a for a in xlashard.live_arrays() if a.shape == (5, 7)]
    assert len(before) == len(after) == len(ours) == 1
    for other in (before[0], after[0], ours[0]):
        assert other.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()


@pytest.mark.slow
def test_each_pair_has_equal_results_in_a_pod() -> None:
    script = Path(__file__).with_name("on_a_pod.py")
    done = run_pod([os.fspath(script)], PodSize(2, 4), EndingRules(240), JAX_ARRAY="0")
    assert done.verdict.well, done.report()
    assert all("all pairs are the same" in output for output in done.outputs)
