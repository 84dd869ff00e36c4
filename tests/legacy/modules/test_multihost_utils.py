"""The era's `multihost_utils` in one process; `test_serialization.py` runs it in two."""

import sys

import jax
import numpy as np
from jax.experimental import multihost_utils as of_jax

import xlashard
from tests.legacy.modules.multihost_checks import check_multihost_utils
from tests.legacy.removed import multihost_utils
from xlashard import legacy
from xlashard.legacy.modules import entries


def test_multihost_utils_in_one_process() -> None:
    check_multihost_utils()


def test_fully_addressable_arrays_are_returned_as_the_same_objects(mesh) -> None:
    sharding = xlashard.NamedSharding(mesh, xlashard.P("x"))
    arrays = {
        "ours": xlashard.device_put(np.ones((8, 2)), sharding),
        "of jax": jax.device_put(np.ones((8, 2)), sharding),
    }
    for jax_array in (True, False):
        with legacy.jax_array(jax_array):
            out = multihost_utils.global_array_to_host_local_array(arrays, mesh, xlashard.P("x"))
        assert out["ours"] is arrays["ours"] and out["of jax"] is arrays["of jax"]


def test_functions_are_importable_by_their_legacy_names() -> None:
    with legacy.installed():
        from jax.experimental import multihost_utils as installed
        from jax.experimental.multihost_utils import process_allgather

        assert process_allgather is multihost_utils.process_allgather
        assert all(
            getattr(installed, name) is getattr(multihost_utils, name)
            for parent, _, name in (entry.rpartition(".") for entry in entries())
            if parent == multihost_utils.name
        )
        # Functions that legacy JAX did not change are those of current JAX.
        assert installed.reached_preemption_sync_point is of_jax.reached_preemption_sync_point
        assert jax.experimental.multihost_utils.live_devices is of_jax.live_devices
    assert sys.modules["jax.experimental.multihost_utils"] is of_jax
    assert jax.experimental.multihost_utils is of_jax
