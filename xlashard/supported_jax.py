"""Versions of JAX that this package works with; read without importing JAX."""

import re

MINIMUM = (0, 11, 2)
BELOW = (0, 13)
_LOW, _HIGH = (".".join(map(str, version)) for version in (MINIMUM, BELOW))
REQUIREMENT = f"jax>={_LOW},<{_HIGH}"


def parse_version(text: str) -> tuple[int, ...]:
    """Parse the leading numbers of a version: `"0.12.0.1"` is `(0, 12, 0, 1)`."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match is not None else ()


def is_supported(version: str) -> bool:
    """Return True for a version of JAX that this package works with."""
    return MINIMUM <= parse_version(version) < BELOW
