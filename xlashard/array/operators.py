"""Python's operators on an `Array`: each runs as one program on the devices of its operands."""

from collections.abc import Callable
from typing import Any, Self

from xlashard._jax.tracebacks import shorten
from xlashard._jax.transfer import HandleType
from xlashard.array.attempts import Call, tried_again
from xlashard.array.forwarding import forwarding
from xlashard.array.holder import Holder
from xlashard.array.results import as_arrays
from xlashard.errors import ArgumentError


def _unary(name: str) -> Callable[..., Any]:
    operator = forwarding(getattr(HandleType, name), name, None)
    operator.__name__ = name
    return operator


def _binary(name: str) -> Callable[..., Any]:
    call = getattr(HandleType, name)

    def operator(self: Holder, other: Any, /) -> Any:
        kind = type(self)
        try:
            out = call(self._handle, other._handle if type(other) is kind else other)
        except Exception as failed:
            try:
                out = tried_again(failed, Call(name, call, (self, other), {}, ("left", "right")))
            except Exception as error:
                shorten(error)
                raise
        if type(out) is HandleType and out.committed:
            array = kind()
            array._handle = out
            return array
        return as_arrays(kind, out, (self, other))

    operator.__name__ = name
    return operator


class Operators(Holder):
    """The operators of NumPy arrays; in-place forms fall back to these."""

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
            "an Array never changes, so x[index] = y is not possible: write x = x.at[index].set(y)"
        )
