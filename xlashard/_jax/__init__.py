"""The only door to JAX's internals and to jaxlib.

Nothing outside this package imports `jax._src`, `jaxlib`, `jax.interpreters` or `jax.extend`
(a lint rule and `tests/test_layers.py` check it), and no other package tests JAX's version. Each
internal function or class that another package needs has a short function here, so that a new JAX
release requires changes in one place. Importing this package registers nothing with JAX: all
registrations are in `registration.install`.
"""

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


check_supported()
