"""What several tests of the migration era use."""

from pathlib import Path
from typing import Any

import jax
import pytest

import xlashard
from tests.pjit.helpers import make_mesh
from xlashard.legacy import serialization as saving


def pytest_configure(config):
    # The era's programs say `with mesh:`; JAX would rather see jax.set_mesh.
    config.addinivalue_line("filterwarnings", "ignore:.with mesh.*:DeprecationWarning")


@pytest.fixture
def mesh() -> xlashard.Mesh:
    """Four by two devices, axes `x` and `y`."""
    return make_mesh((4, 2), ("x", "y"))


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    """Where TensorStore may write an array."""
    return saving.get_tensorstore_spec(f"{tmp_path}/w")


@pytest.fixture(params=["shardy", "gspmd"])
def partitioner(request):
    """Runs the test once under each partitioner."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", request.param == "shardy")
    yield request.param
    jax.config.update("jax_use_shardy_partitioner", before)
