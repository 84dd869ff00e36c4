"""libtpu must be the version that JAX requires."""

import re
from importlib import metadata

import pytest

from xlashard._jax.runtime.topologies import check_libtpu, libtpu_version
from xlashard.errors import TopologyError

REQUIRED = ("numpy>=2.0", 'libtpu==0.0.50.*; extra == "tpu"', "scipy>=1.14")


@pytest.mark.parametrize("installed", ["0.0.50", "0.0.50.1", None])
def test_required_libtpu_version_is_accepted(installed: str | None) -> None:
    check_libtpu(installed, REQUIRED)


@pytest.mark.parametrize("installed", ["0.0.48.1", "0.0.5", "0.0.501", "0.1"])
def test_other_libtpu_version_is_refused_with_a_pip_command(installed: str) -> None:
    message = (
        f"libtpu 0.0.50.*, but libtpu {installed} is installed: pip install 'libtpu==0.0.50.*'"
    )
    with pytest.raises(TopologyError, match=re.escape(message)):
        check_libtpu(installed, REQUIRED)


def test_exact_libtpu_requirement_refuses_a_longer_version() -> None:
    check_libtpu("0.0.50", ["libtpu == 0.0.50"])
    with pytest.raises(TopologyError, match=re.escape("pip install 'libtpu==0.0.50'")):
        check_libtpu("0.0.50.1", ["libtpu == 0.0.50"])


def test_unknown_libtpu_versions_are_accepted() -> None:
    check_libtpu("0.0.48", ["libtpu>=0.0.10", "numpy"])


def test_installed_libtpu_meets_the_requirement_of_jax() -> None:
    required = metadata.requires("jax") or []
    assert any(each.startswith("libtpu==") for each in required)
    check_libtpu(libtpu_version(), required)
