"""Hide private names of JAX from this package, as a release of JAX without them would.

JAX itself uses most of these names and has to go on working, so they are hidden where xlashard
reads them: in the modules behind the stand-ins of `xlashard._jax.private`. This file imports
nothing of xlashard, which must find the names hidden when it is imported.
"""

import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import jax

PRIVATE = "xlashard._jax.private"


class _LackingModule:
    """A module of JAX without some of its names.

    Args:
        module: The module.
        hidden: The names.
    """

    def __init__(self, module: ModuleType, hidden: frozenset[str]) -> None:
        self.__dict__.update(_module=module, _hidden=hidden)

    def __getattr__(self, name: str) -> Any:
        if name in self._hidden:
            raise AttributeError(name)
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


class _AfterImport(MetaPathFinder):
    """Finder that changes `private.py` right after Python has run it.

    Args:
        names: Full names of the hidden names and modules.
        reads: Receives the full name of each name that is read; None to keep JAX's speed.
    """

    def __init__(self, names: Iterable[str], reads: set[str] | None) -> None:
        self._names = frozenset(names)
        self._reads = reads

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != PRIVATE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_hide(module: Any) -> None:
            run(module)
            self._hide(module)
            if self._reads is not None:
                _record(module, self._reads)

        loader.exec_module = run_and_hide
        return spec

    def _hide(self, private: Any) -> None:
        import_module = private._import_module

        def import_what_is_left(name: str) -> Any:
            if name in self._names:
                raise private.missing_name(name)
            members = frozenset(
                full.rpartition(".")[2] for full in self._names if full.rpartition(".")[0] == name
            )
            module = import_module(name)
            return _LackingModule(module, members) if members else module

        private._import_module = import_what_is_left


def _record(private: Any, reads: set[str]) -> None:
    """Record every read of a name, also the second one."""
    read = private._Reader.__call__

    def read_and_record(reader: Any, name: str) -> Any:
        reads.update((f"{reader._name}.{name}", reader._name))
        value = read(reader, name)
        reader._members.pop(name, None)
        return value

    private._Reader.__call__ = read_and_record


def hide_names(
    names: Iterable[str], version: str | None = None, reads: set[str] | None = None
) -> None:
    """Hide names from xlashard, which is imported after this call.

    Args:
        names: Full names of private names and modules.
        version: Version that JAX claims; None for its own.
        reads: Receives the names that are read; None for a process that records none.
    """
    assert "xlashard" not in sys.modules
    sys.meta_path.insert(0, _AfterImport(names, reads))
    if version is not None:
        jax.__version__ = version
