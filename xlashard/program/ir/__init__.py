"""Plans of programs, and the annotations that they add to a StableHLO module."""
