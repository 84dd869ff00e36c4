"""Sharding rules of primitives."""
