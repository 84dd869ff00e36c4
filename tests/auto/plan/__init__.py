"""Tests of `xlashard.auto.plan`."""
