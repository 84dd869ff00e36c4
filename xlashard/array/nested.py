"""Arrays anywhere inside what a function of JAX is given or gives."""

from collections.abc import Callable
from typing import Any

import numpy as np

from xlashard._jax.transfer import HandleType
from xlashard.array.holder import Holder

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(...), type, np.ndarray})
"""Types of values in which there is no array on devices."""

_BARE = PLAIN | {HandleType}


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with every array or handle in it changed, in nested lists, tuples and dicts too.

    A container in which nothing changed is given back as it is.
    """
    kind = type(value)
    if kind is HandleType or isinstance(value, Holder):
        return change(value)
    if kind is slice:
        parts = (value.start, value.stop, value.step)
        return _rebuilt(value, parts, mapped(parts, change), lambda new: slice(*new))
    if isinstance(value, tuple):
        return _rebuilt(value, value, [mapped(v, change) for v in value], _maker(kind))
    if kind is list:
        return _rebuilt(value, value, [mapped(v, change) for v in value], list)
    if isinstance(value, dict):
        new = [mapped(v, change) for v in value.values()]
        return _rebuilt(value, value.values(), new, lambda new: kind(zip(value, new, strict=True)))
    return value


def _rebuilt(old: Any, parts: Any, new: Any, make: Callable[[Any], Any]) -> Any:
    if all(a is b for a, b in zip(parts, new, strict=True)):
        return old
    return make(new)


def _maker(kind: type) -> Callable[[Any], Any]:
    """What makes a tuple of a kind of its members: those with named fields take them one by one."""
    return getattr(kind, "_make", kind)


def bare(value: Any) -> Any:
    """The value with the handle of every Array in its place; containers are made anew."""
    # Every argument of every operation comes here: the commonest kinds first.
    kind = type(value)
    if kind in _BARE:
        return value
    if kind is list:
        return [bare(v) for v in value]
    if kind is tuple:
        return tuple([bare(v) for v in value])
    if kind is dict:
        return {key: bare(v) for key, v in value.items()}
    if kind is slice and {type(value.start), type(value.stop), type(value.step)} <= _BARE:
        return value
    if isinstance(value, Holder):
        return value._handle
    return mapped(value, bare)
