"""Tests of `xlashard.core.pjit.shardings`."""
