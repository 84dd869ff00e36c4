"""Operators and NumPy-style methods of an `Array`, and `x.at[...]`: programs on its devices."""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Self

import jax.numpy as jnp

from xlashard._jax.runtime.tracebacks import shorten
from xlashard._jax.runtime.transfer import HandleType
from xlashard.array.core.base import ArrayBase
from xlashard.array.core.fallback import JaxCall, retry_call
from xlashard.array.core.indexing import is_long, wide_integers, widened
from xlashard.array.core.unwrap import unwrap, wrap_results
from xlashard.array.core.wrappers import wrap_jax_function
from xlashard.errors import ArgumentError


def _unary(name: str) -> Callable[..., Any]:
    operator = wrap_jax_function(getattr(HandleType, name), name, None)
    operator.__name__ = name
    return operator


def _binary(name: str) -> Callable[..., Any]:
    call = getattr(HandleType, name)

    def operator(self: ArrayBase, other: Any, /) -> Any:
        kind = type(self)
        try:
            out = call(self._handle, other._handle if type(other) is kind else other)
        except Exception as failed:
            try:
                out = retry_call(failed, JaxCall(name, call, (self, other), {}, ("left", "right")))
            except Exception as error:
                shorten(error)
                raise
        if type(out) is HandleType and out.committed:
            array = kind()
            array._handle = out
            return array
        return wrap_results(kind, out, (self, other))

    operator.__name__ = name
    return operator


class Operators(ArrayBase):
    """Operators of NumPy arrays; in-place operators fall back to these."""

    __slots__ = ()
    __hash__: None = None  # pyright: ignore[reportIncompatibleMethodOverride]
    __array_priority__ = 100

    __neg__: Callable[..., Self] = _unary("__neg__")
    __pos__: Callable[..., Self] = _unary("__pos__")
    __abs__: Callable[..., Self] = _unary("__abs__")
    __invert__: Callable[..., Self] = _unary("__invert__")
    __round__: Callable[..., Self] = _unary("__round__")

    __eq__: Callable[..., Self] = _binary("__eq__")
    __ne__: Callable[..., Self] = _binary("__ne__")
    __lt__: Callable[..., Self] = _binary("__lt__")
    __le__: Callable[..., Self] = _binary("__le__")
    __gt__: Callable[..., Self] = _binary("__gt__")
    __ge__: Callable[..., Self] = _binary("__ge__")

    __add__: Callable[..., Self] = _binary("__add__")
    __radd__: Callable[..., Self] = _binary("__radd__")
    __sub__: Callable[..., Self] = _binary("__sub__")
    __rsub__: Callable[..., Self] = _binary("__rsub__")
    __mul__: Callable[..., Self] = _binary("__mul__")
    __rmul__: Callable[..., Self] = _binary("__rmul__")
    __truediv__: Callable[..., Self] = _binary("__truediv__")
    __rtruediv__: Callable[..., Self] = _binary("__rtruediv__")
    __floordiv__: Callable[..., Self] = _binary("__floordiv__")
    __rfloordiv__: Callable[..., Self] = _binary("__rfloordiv__")
    __mod__: Callable[..., Self] = _binary("__mod__")
    __rmod__: Callable[..., Self] = _binary("__rmod__")
    __divmod__: Callable[..., tuple[Self, Self]] = _binary("__divmod__")
    __rdivmod__: Callable[..., tuple[Self, Self]] = _binary("__rdivmod__")
    __pow__: Callable[..., Self] = _binary("__pow__")
    __rpow__: Callable[..., Self] = _binary("__rpow__")
    __matmul__: Callable[..., Self] = _binary("__matmul__")
    __rmatmul__: Callable[..., Self] = _binary("__rmatmul__")

    __and__: Callable[..., Self] = _binary("__and__")
    __rand__: Callable[..., Self] = _binary("__rand__")
    __or__: Callable[..., Self] = _binary("__or__")
    __ror__: Callable[..., Self] = _binary("__ror__")
    __xor__: Callable[..., Self] = _binary("__xor__")
    __rxor__: Callable[..., Self] = _binary("__rxor__")
    __lshift__: Callable[..., Self] = _binary("__lshift__")
    __rlshift__: Callable[..., Self] = _binary("__rlshift__")
    __rshift__: Callable[..., Self] = _binary("__rshift__")
    __rrshift__: Callable[..., Self] = _binary("__rrshift__")

    __contains__: Callable[..., bool] = _binary("__contains__")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise ArgumentError(
            "an Array is immutable, so x[index] = y is not possible: write x = x.at[index].set(y)"
        )


def on_handle(self: ArrayBase, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the wrapped result of a function of the handle."""
    try:
        if kwargs:
            out = call(self._handle, *map(unwrap, args), **unwrap(kwargs))
        else:
            out = call(self._handle, *map(unwrap, args))
    except Exception as error:
        out = retry_call(error, JaxCall(call.__name__, call, (self, *args), kwargs))
    if type(out) is HandleType and out.committed:
        array = type(self)()
        array._handle = out
        return array
    return wrap_results(type(self), out, (self, args, kwargs))


class _Method:
    """A method of `jax.Array`, generated at first use, as generating it takes a while.

    It replaces this descriptor in the class. `help()` and `signature()` show JAX's own method.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.__doc__ = getattr(HandleType, name).__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        call = getattr(HandleType, self._name)
        # If several threads generate it at once, all get the last one.
        setattr(
            NumpyMethods,
            self._name,
            update_wrapper(wrap_jax_function(call, self._name, None), call),
        )
        return getattr(owner if instance is None else instance, self._name)


def _method(name: str) -> Any:
    return _Method(name)


class NumpyMethods(ArrayBase):
    """Methods and properties that compute an array from an array."""

    __slots__ = ()

    all: Callable[..., Self] = _method("all")
    any: Callable[..., Self] = _method("any")
    argmax: Callable[..., Self] = _method("argmax")
    argmin: Callable[..., Self] = _method("argmin")
    argpartition: Callable[..., Self] = _method("argpartition")
    argsort: Callable[..., Self] = _method("argsort")
    astype: Callable[..., Self] = _method("astype")
    byteswap: Callable[..., Self] = _method("byteswap")
    choose: Callable[..., Self] = _method("choose")
    clip: Callable[..., Self] = _method("clip")
    compress: Callable[..., Self] = _method("compress")
    conj: Callable[..., Self] = _method("conj")
    conjugate: Callable[..., Self] = _method("conjugate")
    copy: Callable[..., Self] = _method("copy")
    cumprod: Callable[..., Self] = _method("cumprod")
    cumsum: Callable[..., Self] = _method("cumsum")
    diagonal: Callable[..., Self] = _method("diagonal")
    dot: Callable[..., Self] = _method("dot")
    flatten: Callable[..., Self] = _method("flatten")
    max: Callable[..., Self] = _method("max")
    mean: Callable[..., Self] = _method("mean")
    min: Callable[..., Self] = _method("min")
    nonzero: Callable[..., tuple[Self, ...]] = _method("nonzero")
    prod: Callable[..., Self] = _method("prod")
    ptp: Callable[..., Self] = _method("ptp")
    ravel: Callable[..., Self] = _method("ravel")
    repeat: Callable[..., Self] = _method("repeat")
    reshape: Callable[..., Self] = _method("reshape")
    round: Callable[..., Self] = _method("round")
    searchsorted: Callable[..., Self] = _method("searchsorted")
    sort: Callable[..., Self] = _method("sort")
    squeeze: Callable[..., Self] = _method("squeeze")
    std: Callable[..., Self] = _method("std")
    sum: Callable[..., Self] = _method("sum")
    swapaxes: Callable[..., Self] = _method("swapaxes")
    take: Callable[..., Self] = _method("take")
    to_device: Callable[..., Self] = _method("to_device")
    trace: Callable[..., Self] = _method("trace")
    transpose: Callable[..., Self] = _method("transpose")
    var: Callable[..., Self] = _method("var")
    view: Callable[..., Self] = _method("view")

    # JAX's own code calls these on any array.
    _multi_slice: Callable[..., list[Self]] = _method("_multi_slice")
    _split: Callable[..., list[Self]] = _method("_split")

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: object) -> Self:
        return self.copy()

    @property
    def T(self) -> Self:
        """Transpose: all dimensions in reverse order."""
        return _transpose(self)

    @property
    def mT(self) -> Self:
        """Matrix transpose: the last two dimensions swapped."""
        return _matrix_transpose(self)

    @property
    def real(self) -> Self:
        """Real part."""
        return _real(self)

    @property
    def imag(self) -> Self:
        """Imaginary part."""
        return on_handle(self, _imaginary)

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


_transpose, _matrix_transpose, _real = (
    wrap_jax_function(getattr(HandleType, name).fget, name, None) for name in ("T", "mT", "real")
)


def _imaginary(handle: Any) -> Any:
    """Return the imaginary part; JAX puts the zeros of a real array on the default device."""
    if jnp.iscomplexobj(handle) or not handle.committed:
        return handle.imag
    return jnp.zeros_like(handle, device=handle.sharding)


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

    updated.__name__ = f"x.at[index].{name}"

    def update(self: "PartUpdates[Any]", *args: Any, **kwargs: Any) -> Any:
        try:
            return on_handle(self._array, updated, self._index, *args, **kwargs)
        except Exception as error:
            shorten(error)
            raise

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

    get: Callable[..., A] = _update("get")
    set: Callable[..., A] = _update("set")
    apply: Callable[..., A] = _update("apply")
    add: Callable[..., A] = _update("add")
    subtract: Callable[..., A] = _update("subtract")
    multiply: Callable[..., A] = _update("multiply")
    mul: Callable[..., A] = _update("mul")
    divide: Callable[..., A] = _update("divide")
    power: Callable[..., A] = _update("power")
    min: Callable[..., A] = _update("min")
    max: Callable[..., A] = _update("max")
