"""Checkpoints of a run: written in the background, committed atomically, verified when read."""

from xlashard.train.checkpoint.checkpoints import Checkpoints, Restored
from xlashard.train.checkpoint.manifest import RunMetadata

__all__ = ["Checkpoints", "Restored", "RunMetadata"]
