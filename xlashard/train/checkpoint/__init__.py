"""Checkpoints of a run: written while it goes on, whole or not at all, and checked when read."""

from xlashard.train.checkpoint.checkpoints import Checkpoints, Restored
from xlashard.train.checkpoint.manifest import About

__all__ = ["About", "Checkpoints", "Restored"]
