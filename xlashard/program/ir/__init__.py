"""Module plans and their annotations: from what is asked of a program to StableHLO text."""
