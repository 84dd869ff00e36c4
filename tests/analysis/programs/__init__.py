"""Tests of `xlashard.analysis.programs`."""
