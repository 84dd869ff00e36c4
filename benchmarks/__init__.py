"""Benchmarks: each file is a program, `python -m benchmarks.NAME [--json PATH] [--rounds N]`."""
