"""Modules that are changed as soon as a program imports them, and not loaded before."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def has_module(name: str) -> bool:
    """Whether a module is loaded or could be; nothing is imported to find out.

    Example:
        >>> has_module("json.tool"), has_module("json.no_such")
        (True, False)
    """
    return name in sys.modules or _spec(name) is not None


def _spec(name: str) -> ModuleSpec | None:
    parent, _, _ = name.rpartition(".")
    if not parent:
        return PathFinder.find_spec(name)
    if parent in sys.modules:
        path = getattr(sys.modules[parent], "__path__", None)
    else:
        above = _spec(parent)
        path = above and above.submodule_search_locations
    return PathFinder.find_spec(name, path) if path is not None else None


class ImportHook(MetaPathFinder):
    """Waits for modules to be imported.

    Args:
        then: By the name of each module what to do with it once it has been loaded.
    """

    def __init__(self, then: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a module as Python would, if it is waited for."""
        then = self._then.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if then is not None else None
        if spec is None or spec.loader is None or then is None:
            return None
        spec.loader = _PatchingLoader(spec.loader, then)
        return spec


class _PatchingLoader(Loader):
    """Loads a module as another loader does, and says so."""

    def __init__(self, loader: Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the other loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the other loader, which the module is left to."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)
