"""Descriptions of shardings for errors, and the code that errors suggest."""

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
    """Describe a sharding with the sizes of its mesh: `NamedSharding(x=4, y=2; P('x', None))`."""
    if not isinstance(sharding, NamedSharding):
        return repr(sharding)
    shape = ", ".join(f"{k}={v}" for k, v in sharding.mesh.shape.items())
    return f"NamedSharding({shape}; {sharding.spec}{_memory(sharding)})"


def as_code(sharding: Sharding) -> str:
    """Return a sharding as code, on the mesh or devices at hand."""
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
    """Return advice for a dimension that can't be cut evenly."""
    pad = f"Pad dimension {error.dim} to a multiple of {error.tiles}"
    if not isinstance(sharding, NamedSharding):
        return pad
    spec = sharding.normal_spec
    dims = list(spec.dims)
    dims[error.dim] = ()
    return f"{pad}, or leave it whole: {replace(spec, dims=tuple(dims)).describe()}"


def type_hint(actual: Any, expected: Any, otherwise: str) -> str:
    """Return advice for an array of another type than a program takes.

    Args:
        actual: The abstract value of the array.
        expected: The abstract value of the program's argument.
        otherwise: The advice if no cast of the array helps.
    """
    if actual.shape == expected.shape and np.can_cast(actual.dtype, expected.dtype, "same_kind"):
        return f"pass x.astype({expected.dtype.name!r})"
    return otherwise
