"""Preflight of every mesh of given topologies, ranked by estimated step time."""
