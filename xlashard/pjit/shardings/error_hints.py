"""What errors say of shardings and types, and the code that they advise."""

from dataclasses import replace
from typing import Any

import numpy as np

from xlashard._jax.runtime.shardings import default_memory_kind
from xlashard.errors import DivisibilityError
from xlashard.sharding import (
    GSPMDSharding,
    NamedSharding,
    Sharding,
    SingleDeviceSharding,
)


def described(sharding: Sharding) -> str:
    """A sharding with its numbers: `NamedSharding(x=4, y=2; P('x', None))`."""
    if not isinstance(sharding, NamedSharding):
        return repr(sharding)
    shape = ", ".join(f"{k}={v}" for k, v in sharding.mesh.shape.items())
    return f"NamedSharding({shape}; {sharding.spec}{_memory(sharding)})"


def as_code(sharding: Sharding) -> str:
    """A sharding as one writes it, on the mesh or devices at hand."""
    if isinstance(sharding, NamedSharding):
        return f"NamedSharding(mesh, {sharding.spec}{_memory(sharding)})"
    if isinstance(sharding, SingleDeviceSharding):
        number = sharding.devices[0].id
        return f"SingleDeviceSharding(jax.devices()[{number}]{_memory(sharding)})"
    if isinstance(sharding, GSPMDSharding):
        return f"GSPMDSharding(devices, {sharding.tile_assignment.to_text()!r}{_memory(sharding)})"
    return "sharding"


def _memory(sharding: Sharding) -> str:
    kind = sharding.memory_kind
    if kind is None or not sharding.devices or kind == default_memory_kind(sharding.devices[0]):
        return ""
    return f", memory_kind={kind!r}"


def divisible_hint(sharding: Sharding, error: DivisibilityError) -> str:
    """What to do about a dimension that can't be cut evenly."""
    pad = f"Pad dimension {error.dim} to a multiple of {error.tiles}"
    if not isinstance(sharding, NamedSharding):
        return pad
    spec = sharding.normal_spec
    dims = list(spec.dims)
    dims[error.dim] = ()
    return f"{pad}, or leave it whole: {replace(spec, dims=tuple(dims)).describe()}"


def type_hint(given: Any, wanted: Any, otherwise: str) -> str:
    """What to do about an array of another type than a program takes.

    Args:
        given: The abstract value of the array.
        wanted: That of the program's argument.
        otherwise: What to do where no cast of the array would help.
    """
    if given.shape == wanted.shape and np.can_cast(given.dtype, wanted.dtype, "same_kind"):
        return f"pass x.astype({wanted.dtype.name!r})"
    return otherwise
