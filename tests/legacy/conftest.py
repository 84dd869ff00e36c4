"""Fixtures of tests of the migration era."""

from pathlib import Path
from typing import Any

import pytest

import xlashard
from tests.without_jax import HAS_JAX

if HAS_JAX:
    import jax

    from tests.core.pjit.helpers import make_mesh
    from xlashard.legacy import serialization as saving


def pytest_configure(config):
    # The era's programs use `with mesh:`; JAX prefers jax.set_mesh.
    config.addinivalue_line("filterwarnings", "ignore:.with mesh.*:DeprecationWarning")


@pytest.fixture
def mesh() -> "xlashard.Mesh":
    """Four by two devices, axes `x` and `y`."""
    return make_mesh((4, 2), ("x", "y"))


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    """Return a TensorStore spec of a file."""
    return saving.get_tensorstore_spec(f"{tmp_path}/w")


@pytest.fixture(params=["shardy", "gspmd"])
def partitioner(request):
    """Run the test once under each partitioner."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", request.param == "shardy")
    yield request.param
    jax.config.update("jax_use_shardy_partitioner", before)
