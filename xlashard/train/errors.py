"""What a person who starts a run can do wrong, each as an error that says how to go on."""

from xlashard.errors import XlashardError


class RunError(XlashardError, ValueError):
    """A run that cannot start or go on for a reason outside the program."""


class SettingsError(RunError):
    """A setting with an unknown key, a wrong type, a bad value, or one that fits no other."""


class DataError(RunError):
    """A text that is missing, unreadable, or too short for the model."""


class Diverged(RunError):
    """The loss stopped being a finite number."""


class CheckpointError(RunError):
    """A checkpoint that can't be written, is not there, is damaged, or does not fit the run.

    Attributes:
        step: The step it is of, where that is known.
        file: The file that is at fault, by its path in the checkpoint's folder, if one is.
    """

    def __init__(self, message: str, *, step: int | None = None, file: str | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.file = file


class PeerError(RunError):
    """Another process of the run failed or is gone, so this one can't go on either."""
