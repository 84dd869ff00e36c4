"""Jaxprs: trace, read, transform, and define primitives."""
