"""Tests of `xlashard.pjit.shardings`."""
