"""Functions that run once a module has been imported."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@contextmanager
def when_imported(name: str, action: Callable[[], None]) -> Iterator[None]:
    """Call a function once a module has been imported, or at once if it is.

    Args:
        name: The module's name.
        action: The function; a module that is imported after the block does not call it.
    """
    if name in sys.modules:
        action()
        yield
        return

    def act(_: ModuleType) -> None:
        # Once: a module can be imported again.
        remove()
        action()

    def remove() -> None:
        if hook in sys.meta_path:
            sys.meta_path.remove(hook)

    hook = ImportHook({name: act})
    sys.meta_path.insert(0, hook)
    try:
        yield
    finally:
        remove()


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
        if then is None:
            return None
        # Only those after this one: another hook before it would find this one again.
        # A tool may have wrapped this one, and it isn't in the list then.
        at = sys.meta_path.index(self) + 1 if self in sys.meta_path else 0
        for finder in sys.meta_path[at:]:
            # Libraries of 2022 have finders without the method, which Python passes over, too.
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec and find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _FollowedLoader(spec.loader, then)
                return spec
        return None


class _FollowedLoader(Loader):
    """Loader that delegates to another one and then runs a function on the module."""

    def __init__(self, loader: Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

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
