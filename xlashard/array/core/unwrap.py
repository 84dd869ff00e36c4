"""Unwrap Arrays in the arguments of JAX's functions, and wrap handles in their results."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from xlashard._jax.runtime.global_state import allow_transfers
from xlashard._jax.runtime.transfer import Handle, HandleType
from xlashard.array.core.base import ArrayBase
from xlashard.array.placement.put import put_value
from xlashard.array.placement.target import resolve_sharding
from xlashard.array.reshard.execute import reshard
from xlashard.sharding import GSPMDSharding, from_jax

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(...), type, np.ndarray})
"""Types of values that contain no array on devices."""

_WITHOUT_ARRAYS = PLAIN | {HandleType}


def map_arrays(value: Any, change: Callable[[Any], Any]) -> Any:
    """Map a function over every array and handle in a value, in nested lists, tuples and dicts too.

    A container without changes is returned as it is.
    """
    kind = type(value)
    if kind is HandleType or isinstance(value, ArrayBase):
        return change(value)
    if kind is slice:
        parts = (value.start, value.stop, value.step)
        return _rebuilt(value, parts, map_arrays(parts, change), lambda new: slice(*new))
    if isinstance(value, tuple):
        return _rebuilt(
            value, value, [map_arrays(v, change) for v in value], getattr(kind, "_make", kind)
        )
    if kind is list:
        return _rebuilt(value, value, [map_arrays(v, change) for v in value], list)
    if isinstance(value, dict):
        new = [map_arrays(v, change) for v in value.values()]
        return _rebuilt(value, value.values(), new, lambda new: kind(zip(value, new, strict=True)))
    return value


def _rebuilt(old: Any, parts: Any, new: Any, make: Callable[[Any], Any]) -> Any:
    if all(a is b for a, b in zip(parts, new, strict=True)):
        return old
    return make(new)


def unwrap(value: Any) -> Any:
    """Return the value with handles in place of Arrays; containers are copied."""
    # On the path of every argument of every operation: the commonest kinds first.
    kind = type(value)
    if kind in _WITHOUT_ARRAYS:
        return value
    if kind is list:
        return [unwrap(v) for v in value]
    if kind is tuple:
        return tuple([unwrap(v) for v in value])
    if kind is dict:
        return {key: unwrap(v) for key, v in value.items()}
    if kind is slice and {type(value.start), type(value.stop), type(value.step)} <= _WITHOUT_ARRAYS:
        return value
    if isinstance(value, ArrayBase):
        return value._handle
    return map_arrays(value, unwrap)


def wrap_results(kind: type[ArrayBase], out: Any, operands: tuple[Any, ...]) -> Any:
    """Return the result with an array around every handle in it.

    Args:
        kind: Class of the arrays.
        out: Result of JAX's function.
        operands: Its arguments, with arrays anywhere inside.
    """
    if type(out) is list:
        return [wrap_results(kind, part, operands) for part in out]
    if type(out) is not HandleType:
        # A tracer, a tuple of arrays, NotImplemented, a dtype.
        return map_arrays(out, lambda handle: wrap_results(kind, handle, operands))
    array = kind()
    free = out.committed or _all_uncommitted(kind, operands)
    array._handle = out if free else on_operand_devices(out, operands)
    return array


def _all_uncommitted(kind: type[ArrayBase], operands: tuple[Any, ...]) -> bool:
    """Return True if a quick check finds no committed operand."""
    for x in operands:
        if type(x) is kind:
            if x._buffers.committed:
                return False
        elif type(x) not in PLAIN:
            return False
    return True


def on_operand_devices(out: Handle, operands: Any) -> Handle:
    """Move an uncommitted result to the devices of the first committed operand."""
    arrays = [
        x for x in jax.tree.leaves(operands) if type(x) is HandleType or isinstance(x, ArrayBase)
    ]
    operand = next((x for x in arrays if x.committed), None)
    if operand is None:
        return out
    sharding = from_jax((operand._handle if isinstance(operand, ArrayBase) else operand).sharding)
    if operand.shape != out.shape:
        kind = sharding.memory_kind
        sharding = GSPMDSharding.get_replicated(sharding.devices, memory_kind=kind)
    there = resolve_sharding(out.shape, sharding)
    with allow_transfers():
        if sharding.is_fully_addressable:
            return reshard(out, there)
        # Each process has computed the same constant.
        return put_value(np.asarray(out), there, weak_type=out.weak_type)
