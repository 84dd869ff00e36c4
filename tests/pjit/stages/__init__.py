"""Tests of `xlashard.pjit.stages`."""
