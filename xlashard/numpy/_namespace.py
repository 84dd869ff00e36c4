"""A module with the names of one of JAX's, each made when it is first asked for."""

import difflib
from types import ModuleType
from typing import Any

import jax.numpy as jnp

from xlashard.numpy._function import function_over
from xlashard.numpy._ufunc import ufunc


class Namespace:
    """The module's `__getattr__` and `__dir__`.

    Args:
        theirs: JAX's module.
        name: The full name of ours.
        members: What ours has already; what is made is kept there, so that it is made once.
    """

    def __init__(self, theirs: ModuleType, name: str, members: dict[str, Any]) -> None:
        self._theirs = theirs
        self._name = name
        self._members = members

    def listing(self) -> list[str]:
        """The public names of JAX's module."""
        return [name for name in dir(self._theirs) if not name.startswith("_")]

    def get(self, name: str) -> Any:
        """The member of a name, which the module has not yet.

        Raises:
            AttributeError: JAX's module has none, either.
        """
        if name == "__all__":
            return self.listing()
        theirs = None if name.startswith("_") else getattr(self._theirs, name, None)
        if theirs is None and name not in self.listing():
            close = difflib.get_close_matches(name, self.listing(), n=1)
            hint = f": did you mean {close[0]}?" if close else ""
            raise AttributeError(
                f"{self._name} has no {name!r}, nor has {self._theirs.__name__}{hint}",
                name=name,
            )
        # Of several threads that make one at once, all get the same.
        return self._members.setdefault(name, self._made(name, theirs))

    def _made(self, name: str, theirs: Any) -> Any:
        if isinstance(theirs, jnp.ufunc):
            return ufunc.over(theirs, self._name)
        if isinstance(theirs, type) or not callable(theirs):
            return theirs
        return function_over(theirs, name, self._name)
