"""Objects that make arrays when they are indexed: `r_[...]`, `mgrid[...]`."""

from typing import Any

from xlashard.array import Array
from xlashard.array.core.unwrap import unwrap, wrap_results


class Indexed:
    """An object of `jax.numpy` of which `[...]` gives arrays, as Arrays."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self.__doc__ = theirs.__doc__

    def __getitem__(self, key: Any) -> Any:
        return wrap_results(Array, self._theirs[unwrap(key)], (key,))

    def __repr__(self) -> str:
        return repr(self._theirs)
