"""Code as users write it, for the type checker: `tests/test_types.py` hands it over and runs it."""
