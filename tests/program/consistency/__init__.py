"""Tests of `xlashard.program.consistency`."""
