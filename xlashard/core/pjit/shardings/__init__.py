"""Shardings of arguments and results: read, expanded, and resolved on one list of devices."""
