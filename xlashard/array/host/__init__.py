"""Transfers between the memory of the host and devices."""
