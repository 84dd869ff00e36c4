"""Operators and NumPy-style methods of an `Array`, and `x.at[...]`: programs on its devices."""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Self

import jax.numpy as jnp

from xlashard._jax.runtime.transfer import HandleType
from xlashard.core.array.array_class.base import ArrayBase
from xlashard.core.array.array_class.indexing import is_long, wide_integers, widened
from xlashard.core.array.array_class.wrappers import wrap_jax_function
from xlashard.errors import ArgumentError
from xlashard.support.tracebacks import shortened


class _Method:
    """A method of `jax.Array`, generated at first use, as generating it takes a while.

    It replaces this descriptor in the class. `help()` and `signature()` show JAX's own method.

    Args:
        kind: The class that has the method.
        name: The method.
        operands: Names of the arguments in errors; those of JAX's method if empty.
    """

    def __init__(self, kind: type, name: str, operands: tuple[str, ...] = ()) -> None:
        self._kind = kind
        self._name = name
        self._operands = operands
        self.__doc__ = getattr(HandleType, name).__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        call = getattr(HandleType, self._name)
        wrapper: Any = wrap_jax_function(call, self._name, None, self._operands)
        update_wrapper(wrapper, call)
        # Not JAX's private name: bound methods are pickled by name.
        wrapper.__name__ = wrapper.__qualname__ = self._name
        setattr(self._kind, self._name, wrapper)
        # Not by `getattr`: a subclass that overrides the method calls it by `super()`.
        return wrapper.__get__(instance, owner)


class Operators(ArrayBase):
    """Operators of NumPy arrays; in-place operators fall back to these."""

    __slots__ = ()
    __hash__: None = None  # pyright: ignore[reportIncompatibleMethodOverride]
    __array_priority__ = 100

    def __setitem__(self, index: Any, value: Any) -> None:
        raise ArgumentError(
            "an Array is immutable, so x[index] = y is not possible: write x = x.at[index].set(y)"
        )


_UNARY = "neg pos abs invert round"
_BINARY = (
    "eq ne lt le gt ge add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod "
    "rmod divmod rdivmod pow rpow matmul rmatmul and rand or ror xor rxor lshift rlshift "
    "rshift rrshift contains"
)

for _names, _operands in ((_UNARY, ()), (_BINARY, ("left", "right"))):
    for _name in _names.split():
        setattr(Operators, f"__{_name}__", _Method(Operators, f"__{_name}__", _operands))


class NumpyMethods(ArrayBase):
    """Methods and properties that compute an array from an array."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: object) -> Self:
        return self.copy()

    @property
    def imag(self) -> Self:
        """Imaginary part."""
        return _imag(self)

    @property
    def flat(self) -> Any:
        """Unsupported: an Array cannot be written through an iterator.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("an Array has no flat iterator: write x.ravel()")

    @property
    def at(self) -> "Updates[Self]":
        """Updates of slices: `x.at[index].set(y)` is `x` with `y` at that index."""
        return Updates(self)


_METHODS = (
    "all any argmax argmin argpartition argsort astype byteswap choose clip compress conj "
    "conjugate copy cumprod cumsum diagonal dot flatten max mean min nonzero prod ptp ravel "
    "repeat reshape round searchsorted sort squeeze std sum swapaxes take to_device trace "
    "transpose var view _multi_slice _split"
)
"""Methods of `jax.Array`; JAX's own code calls those with an underscore on any array."""

for _name in _METHODS.split():
    setattr(NumpyMethods, _name, _Method(NumpyMethods, _name))

_PROPERTIES = {
    "T": "Transpose: all dimensions in reverse order.",
    "mT": "Matrix transpose: the last two dimensions swapped.",
    "real": "Real part.",
}

for _name, _text in _PROPERTIES.items():
    _getter = wrap_jax_function(getattr(HandleType, _name).fget, _name, None)
    setattr(NumpyMethods, _name, property(_getter, doc=_text))


def _imaginary(handle: Any) -> Any:
    """Return the imaginary part; JAX puts the zeros of a real array on the default device."""
    if jnp.iscomplexobj(handle) or not handle.committed:
        return handle.imag
    return jnp.zeros_like(handle, device=handle.sharding)


_imag = wrap_jax_function(_imaginary, "imag", None)


class Updates[A: NumpyMethods]:
    """Result of `x.at`; index it to select a slice."""

    __slots__ = ("_array",)

    def __init__(self, array: A) -> None:
        self._array = array

    def __getitem__(self, index: Any) -> "PartUpdates[A]":
        return PartUpdates(self._array, index)

    def __repr__(self) -> str:
        return f"{self._array!r}.at"


def _update(name: str) -> Callable[..., Any]:
    def updated(x: Any, index: Any, *values: Any, **options: Any) -> Any:
        if not is_long(x):
            return getattr(x.at[index], name)(*values, **options)
        with wide_integers(x):
            return getattr(x.at[widened(index)], name)(*values, **options)

    wrapper = wrap_jax_function(updated, f"x.at[index].{name}", None)

    @shortened
    def update(self: "PartUpdates[Any]", *args: Any, **kwargs: Any) -> Any:
        return wrapper(self._array, self._index, *args, **kwargs)

    update.__name__ = name
    update.__doc__ = f"`jax.numpy.ndarray.at[index].{name}`, as an `Array`."
    return update


class PartUpdates[A: NumpyMethods]:
    """Result of `x.at[index]`; each method returns a new array with that slice changed."""

    __slots__ = ("_array", "_index")

    def __init__(self, array: A, index: Any) -> None:
        self._array = array
        self._index = index

    def __repr__(self) -> str:
        return f"{self._array!r}.at[{self._index!r}]"


_UPDATES = "get set apply add subtract multiply mul divide power min max"

for _name in _UPDATES.split():
    setattr(PartUpdates, _name, _update(_name))
