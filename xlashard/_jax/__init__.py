"""The only door to JAX's internals and to jaxlib.

Nothing outside this package imports `jax._src`, `jaxlib`, `jax.interpreters` or `jax.extend`
(a lint rule and `tests/test_layers.py` hold to that), and no test of JAX's version stands outside
it. What another room needs of the internals gets a name and a short function here, so that a new
JAX release is met in one place. Nothing is registered with JAX by importing this package: every
registration stands in `compat.registration.install`.
"""

from xlashard._jax.compat.versions import check_supported

check_supported()
