"""Module `distutils.spawn`."""

import shutil


def find_executable(executable: str, path: str | None = None) -> str | None:
    """Return the path of a program; None if no folder of the path has it.

    Args:
        executable: Its name.
        path: The folders, as in `PATH`, which is the default.
    """
    return shutil.which(executable, path=path)
