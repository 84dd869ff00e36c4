"""Names of the era that can be imported and passed around, and say what to write when used."""

from typing import Any, NoReturn

from xlashard._jax.tracebacks import shortened
from xlashard.errors import RefusedError
from xlashard.legacy.modules import entries


def raise_removed(name: str) -> NoReturn:
    """Says that a name of the era can't do today what it did, and what to write.

    Args:
        name: Its name in the table, which has the reason and the advice.

    Raises:
        RefusedError: Always.
    """
    entry = entries()[name]
    raise RefusedError(f"{name} is gone: {entry.note.rstrip('.')}. Write: {entry.today}", name=name)


class RemovedApi:
    """Stands for a function or a class that can't be brought back.

    It can be imported, compared, and asked for in `isinstance`, which nothing is; called, derived
    from or asked for attributes it raises an error with the advice of the table.

    Args:
        name: Its name in the table.

    Example:
        >>> xmap = RemovedApi("jax.core.new_main")
        >>> isinstance(1, xmap)
        False
        >>> xmap(None)
        Traceback (most recent call last):
            ...
        xlashard.errors.RefusedError: jax.core.new_main is gone: ...
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.__name__ = self.__qualname__ = name.rpartition(".")[2]

    def __repr__(self) -> str:
        return f"<{self._name}, which is gone>"

    @shortened
    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises `RefusedError` with the advice."""
        raise_removed(self._name)

    @shortened
    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            # Python asks for those of its own accord.
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
