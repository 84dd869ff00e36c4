"""Tests without JAX: `make test-pure` sets the variable."""

import os

HAS_JAX = not os.environ.get("XLASHARD_TEST_WITHOUT_JAX")
"""False where the tests run as if JAX were not installed."""
