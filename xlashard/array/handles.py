"""Telling buffer handles from other values, and wrapping the results of programs."""

from collections.abc import Callable, Sequence
from typing import Any

from xlashard._jax.transfer import HandleType
from xlashard.array.array import Array

type KindOf = Callable[[Any], type[Array]]
"""Says for the handle of a result which class of arrays it is to be."""


def is_handle(value: object) -> bool:
    """True for JAX's own concrete array object, which is what a handle is."""
    return type(value) is HandleType


def wrap_first(_: None, handles: Sequence[Any]) -> Array:
    """An `Array` over the only one of the handles, as jaxlib's dispatcher asks for it."""
    out = Array()
    out._buffers, out._exclusive = handles[0], True
    return out


def unwrapped(handle: Any) -> Any:
    """Return the class of a result that is to stay JAX's own array.

    Args:
        handle: The result's buffers.
    """
    return HandleType


def wrap_result(value: Any, kind: type[Array] = Array) -> Any:
    """An array of a class over a handle; keys, tokens and tracers stay what they are."""
    if type(value) is not HandleType or kind is HandleType:
        return value
    out = kind()
    out._handle = value
    return out


def as_kind[A: Array](array: Array, kind: type[A]) -> A:
    """An Array as one of another class, over the same buffers and with the same sharding."""
    out = kind()
    out._handle, out._own_sharding = array._handle, array._own_sharding
    return out
