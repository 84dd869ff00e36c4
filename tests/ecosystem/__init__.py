"""Interoperability with the libraries that are used with JAX."""
