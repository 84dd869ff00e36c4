"""Results of flax as `FrozenDict`s, as before flax 0.7.1."""

import importlib
import os
import sys
from collections.abc import Callable
from types import FrameType, ModuleType

from xlashard.legacy.entries.entry import Entry
from xlashard.legacy.module_shims import Listener

_FLAG = "flax_return_frozendict"
FROZEN_DICTS = Entry(
    f"flax.config.{_FLAG}",
    "0.7.1",
    "works",
    "",
    f"flax.config.update('{_FLAG}', True)",
    "Module.init and Module.apply return FrozenDicts",
    library="flax",
)
"""Entry of the flag, for the report."""


def return_frozen_dicts(configurations: ModuleType, listener: Listener) -> Callable[[], None]:
    """Make flax return `FrozenDict`s, unless the environment has set the flag.

    Args:
        configurations: The module `flax.configurations`.
        listener: Called with `FROZEN_DICTS`, and the frame that imports flax.

    Returns:
        A function that undoes it.
    """
    config = configurations.config
    if _FLAG.upper() in os.environ or getattr(config, _FLAG, True):
        return lambda: None
    config.update(_FLAG, True)
    listener(FROZEN_DICTS, config, find_importing_frame(configurations.__name__.partition(".")[0]))
    return lambda: config.update(_FLAG, False)


def find_importing_frame(package: str) -> FrameType:
    """Return the innermost frame outside of a package, of importlib and of this package."""
    frame = sys._getframe(1)
    within = (package, importlib.__name__, "xlashard")
    while frame.f_back is not None:
        name = (frame.f_globals.get("__name__") or "").partition(".")[0]
        if name not in within and not frame.f_code.co_filename.startswith("<frozen "):
            break
        frame = frame.f_back
    return frame
