"""Meshes over the eight emulated devices, and a counter of compilations."""

import os

import jax
import pytest

import xlashard
from tests.core.pjit.helpers import Compilations, make_mesh
from tests.grouped_cases import sweep
from xlashard import NamedSharding, P, SingleDeviceSharding, device_put
from xlashard.core.program import compile as compile_room
from xlashard.core.program.executables import EXECUTABLES


def pytest_configure(config):
    # Half of these tests use `with mesh:`; JAX prefers jax.set_mesh.
    config.addinivalue_line("filterwarnings", "ignore:.with mesh.*:DeprecationWarning")


@pytest.fixture
def mesh() -> xlashard.Mesh:
    """Four by two devices, axes `x` and `y`."""
    return make_mesh((4, 2), ("x", "y"))


IN_FORCE = os.environ.get("XLASHARD_PARTITIONER") or "shardy"


@pytest.fixture(params=sweep(["shardy", "gspmd"], quick=[IN_FORCE]))
def partitioner(request):
    """Run the test once under each partitioner; in `make check` under the current one."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", request.param == "shardy")
    yield request.param
    jax.config.update("jax_use_shardy_partitioner", before)


@pytest.fixture
def compilations(monkeypatch) -> Compilations:
    """Counter of the programs that are compiled while a test runs."""
    EXECUTABLES.cache_clear()
    counted = Compilations(compile_room.compiler.compile_module)
    monkeypatch.setattr(compile_room.compiler, "compile_module", counted)
    return counted


@pytest.fixture(params=["one device", "eight devices"])
def place(request, mesh):
    """Return a function that puts a value on one device or shards it over all."""
    if request.param == "one device":
        return lambda x: device_put(x, SingleDeviceSharding(jax.devices()[0]))
    return lambda x: device_put(x, NamedSharding(mesh, P("x")))
