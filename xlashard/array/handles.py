"""Telling buffer handles from other values, and wrapping the results of programs."""

from typing import Any

from xlashard._jax.shardings import HANDLE_TYPE
from xlashard.array.array import wrap


def is_handle(value: object) -> bool:
    """True for JAX's own concrete array object, which is what a handle is."""
    return type(value) is HANDLE_TYPE


def wrap_result(value: Any) -> Any:
    """An `Array` over a handle; keys, tokens and tracers stay what they are."""
    return wrap(value) if type(value) is HANDLE_TYPE else value
