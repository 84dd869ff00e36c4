"""The era's names in processes that `multiprocessing` starts for a program under the runner.

Such a process imports the program's main module anew, before it does anything else: the names have
to be there by then. What it is told at its beginning is pickled; with it goes something that
installs them when it is unpickled.
"""

from collections.abc import Callable, Mapping
from multiprocessing import spawn
from typing import Any

from xlashard.legacy.flags import config
from xlashard.legacy.installing import install


class _Beginning:
    """Where it is unpickled, the flags are set and the names are there."""

    def __init__(self, flags: Mapping[str, Any]) -> None:
        self._flags = dict(flags)

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Mapping[str, Any]]]:
        return _begin, (self._flags,)


def _begin(flags: Mapping[str, Any]) -> None:
    for name, value in flags.items():
        config.update(name, value)
    install()


def serve_children(flags: Mapping[str, Any]) -> Callable[[], None]:
    """Gives the names to all processes that `multiprocessing` starts from now on.

    Those that it forks have them anyway; this is for `spawn` and `forkserver`.

    Args:
        flags: What the runner was told to set, by name.

    Returns:
        What ends that.
    """
    told = spawn.get_preparation_data

    def told_more(name: str) -> dict[str, Any]:
        return {**told(name), "xlashard.legacy": _Beginning(flags)}

    spawn.get_preparation_data = told_more

    def end() -> None:
        spawn.get_preparation_data = told

    return end
