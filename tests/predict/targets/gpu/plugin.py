"""Mark tests that compile for GPUs."""

from importlib import metadata

import pytest

HAS_PLUGIN = any(d.name == "jax-cuda13-plugin" for d in metadata.distributions())
needs_plugin = pytest.mark.skipif(
    not HAS_PLUGIN, reason="compiles for GPUs: pip install 'xlashard[gpu-target]'"
)


def marks_of(source: str) -> list[pytest.MarkDecorator]:
    """Return the mark of a program, if it names GPUs."""
    return [needs_plugin] if "xlashard.gpu" in source else []
