"""Targets of transfers: resolved shardings, prefixes of trees, transfer guards, memory errors."""
