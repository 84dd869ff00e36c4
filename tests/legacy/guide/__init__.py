"""The guide from the era's arrays to `jax.Array`: what stood before, and what stands after.

Each pair is written as programs wrote it, with the names that they imported, and runs both ways.
"""
