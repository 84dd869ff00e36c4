"""`jax.config` as a module, beside the object of that name."""

import jax

config = jax.config
