"""Supported JAX releases, registration with JAX, and the interfaces of older releases."""
