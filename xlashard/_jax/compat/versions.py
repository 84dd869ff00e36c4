"""Supported releases of JAX, checked before any internal module is imported."""

import re

import jax

MINIMUM = (0, 11, 2)
BELOW = (0, 13)


def parse_version(text: str) -> tuple[int, ...]:
    """Parse the leading numbers of a version: `"0.12.0.1"` is `(0, 12, 0, 1)`."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match is not None else ()


def check_supported(version: str = jax.__version__) -> None:
    """Refuse a JAX outside of the supported versions.

    Raises:
        ImportError: If `version` is older or newer.
    """
    installed = parse_version(version)
    if MINIMUM <= installed < BELOW:
        return
    low, high = ".".join(map(str, MINIMUM)), ".".join(map(str, BELOW))
    raise ImportError(  # no-catalogue: raised at import
        f"xlashard works with jax>={low},<{high}, but jax {version} is installed: "
        f"pip install 'jax>={low},<{high}'"
    )
