"""Programs: annotated StableHLO modules, compiled, that map buffer handles to buffer handles."""
