"""What a function of JAX gave for arrays, as Arrays that stay on the devices of those.

Of a result that depends on no element of any argument (an empty one, the imaginary part of real
numbers) JAX makes a constant on the default device, which other devices may be far from.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from xlashard._jax.transfer import Handle, HandleType
from xlashard.array.guards import free_transfers
from xlashard.array.holder import Holder
from xlashard.array.host_put import put_value
from xlashard.array.nested import PLAIN, mapped
from xlashard.array.placement import places
from xlashard.array.reshard import reshard
from xlashard.sharding import GSPMDSharding, from_jax


def as_arrays(kind: type[Holder], out: Any, operands: tuple[Any, ...]) -> Any:
    """The result with an array around every handle in it.

    Args:
        kind: The class of the arrays.
        out: What JAX gave.
        operands: What JAX was given, with arrays anywhere in it.
    """
    if type(out) is list:
        return [as_arrays(kind, part, operands) for part in out]
    if type(out) is not HandleType:
        # A tracer, a tuple of arrays, NotImplemented, a dtype.
        return mapped(out, lambda handle: as_arrays(kind, handle, operands))
    array = kind()
    free = out.committed or _all_free(kind, operands)
    array._handle = out if free else beside(out, operands)
    return array


def _all_free(kind: type[Holder], operands: tuple[Any, ...]) -> bool:
    """Whether no operand is bound to devices, as far as a quick look can tell."""
    for x in operands:
        if type(x) is kind:
            if x._buffers.committed:
                return False
        elif type(x) not in PLAIN:
            return False
    return True


def beside(out: Handle, operands: Any) -> Handle:
    """An uncommitted result, on the devices of the first operand that is bound to some."""
    operand = next((x for x in _arrays_in(operands) if x.committed), None)
    if operand is None:
        return out
    sharding = from_jax((operand._handle if isinstance(operand, Holder) else operand).sharding)
    if operand.shape != out.shape:
        kind = sharding.memory_kind
        sharding = GSPMDSharding.get_replicated(sharding.devices, memory_kind=kind)
    there = places(out.shape, sharding)
    with free_transfers():
        if sharding.is_fully_addressable:
            return reshard(out, there)
        # Each process has made the same constant.
        return put_value(np.asarray(out), there, weak_type=out.weak_type)


def _arrays_in(value: Any) -> Iterator[Any]:
    if type(value) is HandleType or isinstance(value, Holder):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _arrays_in(part)
    elif isinstance(value, dict):
        yield from _arrays_in(tuple(value.values()))
