"""Run tests under each partitioner."""

import jax
import pytest

from xlashard.core.program.plan import Partitioner


@pytest.fixture(params=list(Partitioner), ids=lambda p: p.value)
def partitioner(request):
    """Each partitioner; a program's plan names it, independent of JAX's setting."""
    return request.param


@pytest.fixture
def jax_partitioner(partitioner):
    """Each partitioner, which JAX's own rules use as well."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", partitioner is Partitioner.SHARDY)
    yield partitioner
    jax.config.update("jax_use_shardy_partitioner", before)
