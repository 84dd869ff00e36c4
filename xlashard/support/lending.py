"""Packages of this environment, lent to a program that runs in the Python of another one.

    PYTHON lending.py FOLDERS xlashard WORDS ...
    PYTHON lending.py FOLDERS SCRIPT ARGS ...

`xlashard explain -- PYTHON train.py` needs this package where `train.py` runs, and installs nothing
there. PYTHON therefore starts with this file, which appends a finder to `sys.meta_path`. The finder
finds the packages of `LENT` in FOLDERS, those of the launcher's environment, and no other package.

- The finder is asked last: a package that the environment has, such as its own rich, is found
  there. Folders in `PYTHONPATH` would come first.
- The launcher's `site-packages` on the path would lend compiled packages, too, built for another
  version of Python. JAX and what it requires, such as NumPy, are never lent.
- A temporary folder of links would remain after a process that is killed.
- A process that a lent one starts is lent nothing, unless its command has `repeat_words`: those of
  workers that compile, and of emulated pods.
"""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # Before further imports: modules beside this file have names of other packages, such as numpy.
    # Python started a console script with this folder.
    sys.path[0] = os.path.dirname(sys.executable)

import pkgutil
import runpy
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec

LENT = ("xlashard", "absl", "jinja2", "markdown_it", "markupsafe", "mdurl", "pygments", "rich")
"""This package and those that it requires, without JAX and what JAX requires. MarkupSafe does
without its compiled module."""


class LentPackages:
    """Finder of the packages of `LENT`, for the end of `sys.meta_path`.

    Attributes:
        lent_folders: Folders that contain the packages.
    """

    def __init__(self, folders: Iterable[str]) -> None:
        self.lent_folders = list(folders)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find a package; its modules are found by Python, through the package's path."""
        return PathFinder.find_spec(name, self.lent_folders) if name in LENT else None


def list_folders() -> list[str]:
    """Return the folders of this environment that contain the packages to lend."""
    specs = [find_spec(name) for name in LENT]
    return list(
        dict.fromkeys(os.path.dirname(os.path.dirname(s.origin)) for s in specs if s and s.origin)
    )


def start_words(folders: Iterable[str]) -> list[str]:
    """Return the words between an interpreter and a script by which the process is lent packages.

    Args:
        folders: Folders that contain the packages.
    """
    return [__file__, os.pathsep.join(folders)]


def repeat_words() -> list[str]:
    """Return `start_words` with the folders that are lent to this process; empty without any."""
    for finder in sys.meta_path:
        # By attribute: in the process that it started, this file is `__main__`, too.
        if folders := getattr(finder, "lent_folders", ()):
            return start_words(folders)
    return []


def install_command(extra: str, packages: str) -> str:
    """Return the command that installs what an extra of this package adds.

    Args:
        extra: Name of the extra, for an environment that has this package.
        packages: The same packages, for an environment that this package is lent to.
    """
    if repeat_words():
        return f"{sys.executable} -m pip install {packages}"
    return f"pip install 'xlashard[{extra}]'"


def _run(folders: str, words: Sequence[str]) -> None:
    """Run the command line of this package, or a script, with lent packages."""
    sys.meta_path.append(LentPackages(folders.split(os.pathsep)))
    sys.argv[:] = words
    if words[0] == LENT[0]:
        # That of the environment, if it has one.
        sys.exit(pkgutil.resolve_name("xlashard.cli.main:main")())
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _run(sys.argv[1], sys.argv[2:])
