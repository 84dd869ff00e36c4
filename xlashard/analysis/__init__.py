"""Reports on programs: what they send and hold, why they were compiled, how arrays lie."""
