"""Modules `distutils.dir_util` and `distutils.file_util`."""

import os
import shutil
from typing import Any


def mkpath(name: str, mode: int = 0o777, verbose: int = 1, dry_run: int = 0) -> list[str]:
    """Create a folder and its missing parents, and return the created ones.

    Args:
        name: The folder.
        mode: The permissions.
        verbose: Has no effect.
        dry_run: True to create none.
    """
    created, folder = [], os.path.abspath(name)
    while not os.path.isdir(folder):
        created.append(folder)
        folder = os.path.dirname(folder)
    if not dry_run:
        os.makedirs(name, mode, exist_ok=True)
    return created[::-1]


def copy_tree(src: str, dst: str, *options: Any, **named: Any) -> list[str]:
    """Copy the contents of a folder into another one, which may exist; return the copied files.

    Args:
        src: The folder.
        dst: The folder to copy to.
        *options: Those of `distutils`; modes, times and symbolic links are kept as by
            `shutil.copytree`.
        **named: Likewise.
    """
    shutil.copytree(src, dst, dirs_exist_ok=True)
    return [
        os.path.join(dst, os.path.relpath(os.path.join(folder, file), src))
        for folder, _, files in os.walk(src)
        for file in files
    ]


def remove_tree(directory: str, verbose: int = 1, dry_run: int = 0) -> None:
    """Remove a folder and its contents.

    Args:
        directory: The folder.
        verbose: Has no effect.
        dry_run: True to remove nothing.
    """
    if not dry_run:
        shutil.rmtree(directory)


def copy_file(src: str, dst: str, *options: Any, **named: Any) -> tuple[str, int]:
    """Copy a file, and return its new path and 1.

    Args:
        src: The file.
        dst: The file or folder to copy to.
        *options: Those of `distutils`, without effect.
        **named: Likewise.
    """
    return shutil.copy2(src, dst), 1
