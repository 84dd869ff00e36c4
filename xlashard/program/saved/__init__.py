"""Serialization of compiled programs."""
