"""The only door to JAX's internals and to jaxlib.

Nothing outside this package imports `jax._src`, `jaxlib`, `jax.interpreters` or `jax.extend`
(a lint rule and `tests/test_layers.py` check it), and no other module acts on JAX's version. Each
internal function or class that another package needs has a short function here, so that a new JAX
release requires changes in one place. Importing this package registers nothing with JAX: all
registrations are in `registration.install`.
"""

import jax

from xlashard.supported_jax import REQUIREMENT, is_supported


def check_supported(version: str = jax.__version__) -> None:
    """Refuse a JAX outside of the supported versions.

    Raises:
        ImportError: If `version` is older or newer.
    """
    if not is_supported(version):
        raise ImportError(  # no-catalogue: raised at import
            f"xlashard works with {REQUIREMENT}, but jax {version} is installed: "
            f"pip install '{REQUIREMENT}'"
        )


check_supported()
