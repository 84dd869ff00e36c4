"""Tests of `xlashard.core.program.consistency`."""
