"""Modules of `distutils` that programs use, removed in Python 3.12."""
