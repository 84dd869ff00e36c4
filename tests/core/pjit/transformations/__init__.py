"""Tests of `xlashard.pjit` under transformations of JAX, and of programs inside of others."""
