"""The era's `multihost_utils` in one process; `test_serialization.py` runs it in two."""

import sys

import jax
from jax.experimental import multihost_utils as of_jax

from tests.legacy.multihost_checks import check_multihost_utils
from xlashard import legacy
from xlashard.legacy.era import multihost_utils


def test_multihost_utils_in_one_process() -> None:
    check_multihost_utils()


def test_they_stand_where_programs_import_them_from() -> None:
    with legacy.installed():
        from jax.experimental import multihost_utils as installed
        from jax.experimental.multihost_utils import process_allgather

        assert process_allgather is multihost_utils.process_allgather
        assert all(
            getattr(installed, name) is getattr(multihost_utils, name)
            for name in multihost_utils.__all__
        )
        # What the era did not change is what JAX has today.
        assert installed.reached_preemption_sync_point is of_jax.reached_preemption_sync_point
        assert jax.experimental.multihost_utils.live_devices is of_jax.live_devices
    assert sys.modules["jax.experimental.multihost_utils"] is of_jax
    assert jax.experimental.multihost_utils is of_jax
