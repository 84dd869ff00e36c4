"""Errors of a training run; each message contains the remedy."""

from xlashard.errors import XlashardError


class RunError(XlashardError, ValueError):
    """A run cannot start or continue for a reason outside the program."""


class SettingsError(RunError):
    """Invalid setting: unknown key, wrong type, value out of range, or conflict."""


class DataError(RunError):
    """Training text that is missing, unreadable, or too short for the model."""


class Diverged(RunError):
    """The loss is no longer finite."""


class CheckpointError(RunError):
    """A checkpoint is missing, damaged, unwritable, or does not fit the run.

    Attributes:
        step: Step of the checkpoint, if known.
        file: Path of the damaged file within the checkpoint's folder, if any.
    """

    def __init__(self, message: str, *, step: int | None = None, file: str | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.file = file


class PeerError(RunError):
    """Another process of the run failed or exited."""
