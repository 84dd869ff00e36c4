"""Import hook that patches a module right after its first import."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def has_module(name: str) -> bool:
    """Return True if a module is imported or can be found, without importing it.

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
    """Finder that runs a function on selected modules after their import.

    Args:
        then: The function for each module name.
    """

    def __init__(self, then: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a selected module, with a loader that runs its function."""
        then = self._then.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if then is not None else None
        if spec is None or spec.loader is None or then is None:
            return None
        spec.loader = _PatchingLoader(spec.loader, then)
        return spec


class _PatchingLoader(Loader):
    """Loader that delegates to another one and then runs a function on the module."""

    def __init__(self, loader: Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module with the other loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with the other loader, and run the function on it."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)
