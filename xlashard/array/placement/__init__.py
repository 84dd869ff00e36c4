"""Targets of transfers: shardings, prefixes of trees, transfer guards, memory."""
