"""Module `imp` of Python, removed in 3.12."""

import importlib.util
import sys
from importlib import reload
from types import ModuleType

__all__ = ["load_source", "new_module", "reload"]


def new_module(name: str) -> ModuleType:
    """Return an empty module.

    Args:
        name: Its name.
    """
    return ModuleType(name)


def load_source(name: str, pathname: str) -> ModuleType:
    """Run a file as a module, which stays in `sys.modules`.

    Args:
        name: The module's name; a module of this name is run again, with the new file.
        pathname: The file.

    Raises:
        ImportError: The file has no suffix of Python's.
    """
    spec = importlib.util.spec_from_file_location(name, pathname)
    if spec is None or spec.loader is None:
        raise ImportError(  # no-catalogue: the class that Python raised
            f"load_source: pathname {pathname!r} is no Python file: write the path of a .py file",
            name=name,
            path=pathname,
        )
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    module.__spec__, module.__file__ = spec, pathname
    spec.loader.exec_module(module)
    return module
