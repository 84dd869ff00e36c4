"""Tests that need a release of JAX which is newer than the oldest that xlashard works with."""

from importlib import metadata

import pytest

from xlashard._jax import parse_version


def since_jaxlib(release: str, reason: str) -> pytest.MarkDecorator:
    """Return the mark that skips a test with an older jaxlib.

    Args:
        release: The first release with which the test passes.
        reason: What older ones do.
    """
    installed = parse_version(metadata.version("jaxlib"))
    return pytest.mark.skipif(
        installed < parse_version(release), reason=f"before jaxlib {release}: {reason}"
    )
