"""A module with the names of one of JAX's, each made when it is first asked for."""

import difflib
from collections.abc import Callable
from functools import cached_property
from types import ModuleType
from typing import Any

import jax.numpy as jnp

from xlashard._jax.runtime.tracebacks import shorten
from xlashard._jax.runtime.transfer import HandleType
from xlashard.array import Array
from xlashard.array.core.fallback import JaxCall, retry_call
from xlashard.array.core.unwrap import unwrap, wrap_results
from xlashard.numpy._function import as_named, function_over


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


_NAMES = ("x", "y", "z")


class ufunc:
    """An element-wise function of Arrays; `frompyfunc` makes one of a Python function.

    Its arguments are those of `jax.numpy.ufunc`.
    """

    __name__: str

    def __init__(self, func: Callable[..., Any], /, nin: int, nout: int, **options: Any) -> None:
        self._take(jnp.ufunc(func, nin, nout, **options), "")

    @classmethod
    def over(cls, theirs: Any, module: str = "") -> "ufunc":
        """The one for one of JAX's.

        Args:
            theirs: A `jax.numpy.ufunc`.
            module: The module in which it is found by its name; empty if it is in none.
        """
        self = cls.__new__(cls)
        self._take(theirs, module)
        return self

    def _take(self, theirs: Any, module: str) -> None:
        self._theirs = theirs
        self._call = theirs.__call__
        self._module = module
        as_named(self, theirs, theirs.__name__, module or __name__)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = self._call
        try:
            if len(args) == 2 and not kwargs:
                # Nearly all calls; a list of them to unpack again costs a tenth of the cheapest.
                x, y = args
                x = x._handle if type(x) is Array else unwrap(x)
                out = call(x, y._handle if type(y) is Array else unwrap(y))
            else:
                out = call(*map(unwrap, args), **unwrap(kwargs))
        except Exception as failed:
            try:
                out = retry_call(failed, JaxCall(self.__name__, call, args, kwargs, _NAMES))
            except Exception as error:
                shorten(error)
                raise
        if type(out) is HandleType and out.committed:
            array = Array()
            array._handle = out
            return array
        return wrap_results(Array, out, (args, kwargs))

    def _method(self, name: str) -> Callable[..., Any]:
        return function_over(getattr(self._theirs, name), f"{self.__name__}.{name}", self._module)

    @cached_property
    def reduce(self) -> Callable[..., Any]:
        """Brings all elements along an axis together in one."""
        return self._method("reduce")

    @cached_property
    def accumulate(self) -> Callable[..., Any]:
        """Brings each element together with all before it."""
        return self._method("accumulate")

    @cached_property
    def at(self) -> Callable[..., Any]:
        """Gives the first argument with the function applied to the elements at indices."""
        return self._method("at")

    @cached_property
    def outer(self) -> Callable[..., Any]:
        """Brings every element of one argument together with every one of the other."""
        return self._method("outer")

    @cached_property
    def reduceat(self) -> Callable[..., Any]:
        """Brings the elements of each of several slices together in one."""
        return self._method("reduceat")

    @property
    def nin(self) -> int:
        """The number of arrays it takes."""
        return self._theirs.nin

    @property
    def nout(self) -> int:
        """The number of arrays it returns."""
        return self._theirs.nout

    @property
    def nargs(self) -> int:
        """The number of arrays it takes, by JAX's count."""
        return self._theirs.nargs

    @property
    def identity(self) -> Any:
        """The identity element of the operation."""
        return self._theirs.identity

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ufunc) and self._theirs == other._theirs

    def __hash__(self) -> int:
        return hash(self._theirs)

    def __repr__(self) -> str:
        return f"<xlashard.numpy.ufunc {self.__name__!r}>"

    def __reduce__(self) -> Any:
        return self.__name__ if self._module else (ufunc.over, (self._theirs,))


def frompyfunc(func: Callable[..., Any], /, nin: int, nout: int, *, identity: Any = None) -> ufunc:
    """A `ufunc` of a Python function of scalars, as `jax.numpy.frompyfunc` makes one.

    Args:
        func: The function; it is traced by JAX.
        nin: How many scalars it takes.
        nout: How many it gives.
        identity: What a reduction over nothing gives.
    """
    return ufunc.over(jnp.frompyfunc(func, nin, nout, identity=identity))


def vectorize(pyfunc: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    """A function of arrays made of one of single elements, as `jax.numpy.vectorize` makes one.

    Args:
        pyfunc: The function; it is traced by JAX.
        args: As for `jax.numpy.vectorize`.
        options: `excluded` and `signature`, as for `jax.numpy.vectorize`.
    """
    theirs = jnp.vectorize(pyfunc, *args, **options)
    ours = function_over(theirs, theirs.__name__, theirs.__module__)
    ours.__qualname__ = theirs.__qualname__
    return ours


class Indexed:
    """An object of `jax.numpy` of which `[...]` gives arrays, as Arrays."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self.__doc__ = theirs.__doc__

    def __getitem__(self, key: Any) -> Any:
        return wrap_results(Array, self._theirs[unwrap(key)], (key,))

    def __repr__(self) -> str:
        return repr(self._theirs)
