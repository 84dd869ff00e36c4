"""Tests of `xlashard.pjit`."""
