"""Checkpoints of a run: written while it goes on, whole or not at all, and checked when read."""

from xlashard.train.checkpoint.about import About
from xlashard.train.checkpoint.checkpoints import Checkpoints, Restored

__all__ = ["About", "Checkpoints", "Restored"]
