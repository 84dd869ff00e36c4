"""The only door to JAX's internals and to jaxlib.

Nothing outside this package imports `jax._src`, `jaxlib`, `jax.interpreters` or `jax.extend`
(a lint rule and `tests/test_layers.py` check it), and no other package tests JAX's version. Each
internal function or class that another package needs has a short function here, so that a new JAX
release requires changes in one place. Importing this package registers nothing with JAX: all
registrations are in `compat.registration.install`.
"""

from xlashard._jax.compat.versions import check_supported

check_supported()
