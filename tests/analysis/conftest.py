"""Fixtures of the tests of `pjit`, whose programs are explained."""

from tests.without_jax import HAS_JAX

if HAS_JAX:
    from tests.core.pjit.conftest import compilations as compilations
    from tests.core.pjit.conftest import mesh as mesh
    from tests.core.pjit.conftest import partitioner as partitioner
    from tests.core.pjit.conftest import place as place
    from tests.core.pjit.conftest import pytest_configure as pytest_configure
