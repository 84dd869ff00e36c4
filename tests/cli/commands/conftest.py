"""Tests of commands read standard error whole."""

import pytest

from tests.without_jax import HAS_JAX

if HAS_JAX:
    from xlashard.cli.commands import common


@pytest.fixture(autouse=True)
def no_progress_lines(monkeypatch):
    """On a busy machine a compilation may take as long as the interval of progress lines."""
    if HAS_JAX:
        monkeypatch.setattr(common, "_LINE_INTERVAL", 3600.0)
