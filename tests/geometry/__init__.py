"""Tests of the placement maths."""
