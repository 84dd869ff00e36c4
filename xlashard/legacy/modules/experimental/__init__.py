"""The removed names of `jax.experimental`, one file per module."""
