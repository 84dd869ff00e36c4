"""Tests of `xlashard.analysis.recompile`."""
