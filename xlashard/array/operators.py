"""Python's operators on an `Array`: each runs as one program on the devices of its operands."""

from collections.abc import Callable
from typing import Any, Self

from xlashard._jax.transfer import HandleType, UnnamedResultError
from xlashard.array.holder import Holder, check_alive, rewrapped, type_text
from xlashard.array.order import asked_otherwise
from xlashard.errors import ArgumentError, DeviceMismatchError


def _unary(name: str) -> Callable[..., Any]:
    call = getattr(HandleType, name)

    def operator(self: Holder, *args: Any) -> Any:
        try:
            out = call(self._handle, *args)
        except RuntimeError:
            check_alive(self)
            raise
        except (TypeError, UnnamedResultError) as error:
            out = asked_otherwise(self, error, lambda handle: call(handle, *args))
        return rewrapped(self, out)

    operator.__name__ = name
    return operator


def _binary(name: str) -> Callable[..., Any]:
    call = getattr(HandleType, name)

    def operator(self: Holder, other: Any, /) -> Any:
        kind = type(self)
        try:
            out = call(self._handle, other._handle if type(other) is kind else other)
        except RuntimeError:
            check_alive(self, other)
            raise
        except (TypeError, UnnamedResultError) as error:
            out = asked_otherwise(self, error, lambda handle: call(handle, other))
        except ValueError:
            _check_devices(name, self, other)
            raise
        if type(out) is HandleType:
            array = kind()
            array._handle = out
            return array
        # A tracer, a pair (divmod), or NotImplemented.
        return rewrapped(self, out)

    operator.__name__ = name
    return operator


def _check_devices(name: str, self: Holder, other: Any) -> None:
    if not isinstance(other, Holder | HandleType) or not (self.committed and other.committed):
        return
    mine, its = ([d.id for d in x.sharding._device_assignment] for x in (self._handle, other))
    if mine != its:
        raise DeviceMismatchError(
            f"{name} needs its operands on the same devices in the same order: the left one, "
            f"{type_text(self)}, is on {mine} and the right one, {type_text(other)}, on {its}; "
            "move one of them, for example device_put(right, left.sharding)"
        ) from None


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
