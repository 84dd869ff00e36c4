"""Code as users write it, for the type checker: `tests/test_types.py` checks and runs it."""
