"""A training run: its steps, run folder, console output and stop."""
