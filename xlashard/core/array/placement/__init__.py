"""Targets of arrays, transfer guards, and transfers between host memory and devices."""
