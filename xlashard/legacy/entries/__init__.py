"""Entries of the removed names, by the modules of `modules` that implement them; without JAX."""
