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
