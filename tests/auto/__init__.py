"""Tests of `xlashard.auto`."""
