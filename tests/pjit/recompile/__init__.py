"""Tests of `xlashard.pjit.recompile`."""
