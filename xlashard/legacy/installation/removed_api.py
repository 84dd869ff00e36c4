"""Removed names that can be imported, and raise `RefusedError` with advice when they are used."""

from typing import Any, NoReturn

from xlashard._jax.runtime.tracebacks import shortened
from xlashard.errors import RefusedError
from xlashard.legacy.modules import entries


def raise_removed(name: str) -> NoReturn:
    """Raise the error for a removed name that has no equivalent.

    Args:
        name: The name of its entry, which has the reason and the advice.

    Raises:
        RefusedError: Always.
    """
    entry = entries()[name]
    reason = entry.note.rstrip(".")
    raise RefusedError(f"{name} was removed from JAX: {reason}. Write: {entry.today}", name=name)


class RemovedApi:
    """Placeholder for a function or class that cannot be provided.

    Importing it, comparing it and `isinstance` (always False) work. Calling it, deriving from it
    and reading its attributes raise `RefusedError` with the advice of its entry.

    Args:
        name: The name of its entry.

    Example:
        >>> xmap = RemovedApi("jax.core.new_main")
        >>> isinstance(1, xmap)
        False
        >>> xmap(None)
        Traceback (most recent call last):
            ...
        xlashard.errors.RefusedError: jax.core.new_main was removed from JAX: ...
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.__name__ = self.__qualname__ = name.rpartition(".")[2]

    def __repr__(self) -> str:
        return f"<removed API {self._name}>"

    @shortened
    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `RefusedError` with the advice of the entry."""
        raise_removed(self._name)

    @shortened
    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            # Python itself looks up special attributes.
            raise AttributeError(name)  # no-catalogue: Python's own message for a missing attribute
        raise_removed(self._name)

    @shortened
    def __getitem__(self, key: Any) -> NoReturn:
        raise_removed(self._name)

    @shortened
    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise_removed(self._name)

    @shortened
    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        raise_removed(self._name)

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __subclasscheck__(self, subclass: type) -> bool:
        return False
