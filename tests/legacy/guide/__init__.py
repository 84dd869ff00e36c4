"""The guide from the era's arrays to `jax.Array`: old code beside new code.

Each pair is written as programs wrote it, with the names that they imported, and runs both ways.
"""
