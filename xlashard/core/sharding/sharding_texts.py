"""Shardings in messages: as a phrase, as code, and with advice."""

from collections.abc import Collection
from dataclasses import replace

from xlashard.core.sharding.base import Sharding
from xlashard.core.sharding.gspmd import GSPMDSharding
from xlashard.core.sharding.named import NamedSharding, SingleDeviceSharding
from xlashard.core.sharding.replicated import custom_memory_kind
from xlashard.support.formatting import format_axes


def described(sharding: Sharding) -> str:
    """Describe a sharding with the sizes of its mesh: `NamedSharding(x=4, y=2; P('x', None))`."""
    if not isinstance(sharding, NamedSharding):
        return repr(sharding)
    axes = format_axes(sharding.mesh.shape)
    return f"NamedSharding({axes}; {sharding.spec}{_memory(sharding)})"


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


def or_whole(advice: str, sharding: Sharding, dims: Collection[int]) -> str:
    """Return advice for dimensions that don't divide, and the spec that leaves them whole."""
    if not isinstance(sharding, NamedSharding):
        return advice
    spec = sharding.normal_spec
    kept = tuple(() if dim in dims else axes for dim, axes in enumerate(spec.dims))
    return f"{advice}, or leave it whole: {replace(spec, dims=kept).describe()}"


def _memory(sharding: Sharding) -> str:
    kind = custom_memory_kind(sharding)
    return "" if kind is None else f", memory_kind={kind!r}"
