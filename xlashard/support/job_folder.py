"""Folder of the sockets at which the jobs of a user answer `xlashard hosts` on this machine."""

import os
from pathlib import Path

REQUEST_BYTES = 64
"""Bytes of a request at most."""


def find_job_folder() -> Path:
    """Return the folder, which may not exist yet: one for each user of the machine."""
    # Not below TMPDIR: batch systems give each job another one, and a shell beside it has none.
    return Path(f"/tmp/xlashard-{os.getuid()}")


def check_job_folder(folder: Path) -> None:
    """Check that only this user can write into the folder.

    Raises:
        OSError: It belongs to another user, or others may open it.
    """
    status = folder.lstat()
    if status.st_uid != os.getuid() or not folder.is_dir() or status.st_mode & 0o077:
        # no-catalogue: needs a folder of another user
        raise PermissionError(
            f"{folder} belongs to another user or is open to others: remove it, or write "
            f"chmod 700 {folder}"
        )
