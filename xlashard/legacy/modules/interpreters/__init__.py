"""The removed names of `jax.interpreters`, one file per module."""
