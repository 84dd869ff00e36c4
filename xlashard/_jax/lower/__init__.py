"""StableHLO modules: lower, read and annotate."""
