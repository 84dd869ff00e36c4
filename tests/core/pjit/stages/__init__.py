"""Tests of `xlashard.core.pjit.stages`."""
