"""JAX's sharding classes and the HLO shardings behind them."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.layout import AutoLayout, Format, Layout
from jax._src.lib import xla_client as xc
from jax._src.mesh import AbstractMesh, Mesh
from jax._src.named_sharding import UNSPECIFIED, UnspecifiedValue
from jax._src.sharding_impls import GSPMDSharding

type Device = Any
"""A device of JAX; its class is jaxlib's own and has no stub."""

JaxSharding = jax.sharding.Sharding
JaxNamedSharding = jax.sharding.NamedSharding
JaxSingleDeviceSharding = jax.sharding.SingleDeviceSharding
JaxGSPMDSharding = GSPMDSharding
HloSharding = xc.HloSharding
OpSharding = xc.OpSharding
__all__ = [
    "UNSPECIFIED",
    "AbstractMesh",
    "AutoLayout",
    "Device",
    "Format",
    "HloSharding",
    "JaxGSPMDSharding",
    "JaxNamedSharding",
    "JaxSharding",
    "JaxSingleDeviceSharding",
    "Layout",
    "Mesh",
    "OpSharding",
    "UnspecifiedValue",
    "default_memory_kind",
    "device_assignment",
    "device_list",
    "hlo_from_text",
    "hlo_text",
    "is_auto_layout",
    "is_symbolic_size",
    "jax_hlo_sharding",
    "layout_text",
    "listed_device_ids",
    "listed_sharding",
    "memory_kinds",
    "op_sharding",
    "sdy_array",
    "with_interface",
]


def with_interface[T](interface: type[T], jax_class: type) -> type[T]:
    """A base class that is both: our interface first, then one of JAX's sharding classes.

    The oldest supported jaxlib refuses to create such a class with two bases at once, though it
    has nothing against one that gets its first base afterwards.
    """
    joined: Any = type(jax_class)(
        jax_class.__name__, (jax_class,), {"__module__": interface.__module__}
    )
    joined.__bases__ = (interface, jax_class)
    return joined


def listed_sharding(
    devices: Sequence[Device],
    counts: Sequence[int],
    order: Sequence[int],
    memory_kind: str | None = None,
) -> JaxSharding:
    """Tiles dealt to devices in an order that no mesh of theirs has.

    Shardy refuses JAX's class for bare tiles with such an order, but takes a mesh that lists it.

    Args:
        devices: The device assignment.
        counts: Tiles per dimension.
        order: Positions in `devices`: the holders of the first tile, then of the second, ...
        memory_kind: The memory that holds the data.
    """
    copies = len(devices) // math.prod(counts)
    names = [f"_axis_{i}" for i in range(len(counts) + 1)]
    grid = np.array(devices, dtype=object).reshape(*counts, copies)
    spec = jax.sharding.PartitionSpec(*names[:-1])
    return JaxNamedSharding(
        Mesh(grid, tuple(names)), spec, memory_kind=memory_kind, _logical_device_ids=tuple(order)
    )


def sdy_array(
    axes: Sequence[tuple[str, int]],
    spec: jax.sharding.PartitionSpec,
    order: Sequence[int],
    ndim: int,
) -> Any:
    """What JAX's lowering rules tell Shardy of a value of a rank.

    Args:
        axes: Names and sizes of the axes of a mesh.
        spec: A partition spec on it.
        order: The order of the devices on it, empty for the natural one.
        ndim: The rank.
    """
    mesh = AbstractMesh(
        tuple(size for _, size in axes),
        tuple(name for name, _ in axes),
        (jax.sharding.AxisType.Explicit,) * len(axes),
    )
    sharding = JaxNamedSharding(mesh, spec, _logical_device_ids=tuple(order) or None)
    return sharding._to_sdy_sharding(ndim)


def listed_device_ids(sharding: JaxSharding) -> tuple[int, ...] | None:
    """The order in which a sharding lists the devices of its mesh; None where it does not."""
    return getattr(sharding, "_logical_device_ids", None)


def device_assignment(sharding: JaxSharding) -> tuple[Device, ...]:
    """The devices of a sharding in the order in which tiles are dealt to them."""
    return tuple(sharding._device_assignment)


def device_list(devices: Sequence[Device]) -> Any:
    """JAX's hashable list of devices, shared between executables and shardings."""
    return xc.DeviceList(tuple(devices))


def hlo_from_text(text: str) -> Any:
    """Reads the HLO syntax, `{devices=[2,4]<=[8]}`."""
    return HloSharding.from_string(text)


def hlo_text(sharding: Any) -> str:
    """Writes an `HloSharding` or an `OpSharding` proto in the HLO syntax."""
    if isinstance(sharding, OpSharding):
        sharding = HloSharding.from_proto(sharding)
    if elements := sharding.tuple_elements():
        return f"{{{', '.join(map(hlo_text, elements))}}}"
    # The partitioner may answer in the mesh form (V3); the tile form says the same.
    return HloSharding.v3_to_v2_sharding(sharding).to_string()


def tile_texts(text: str) -> list[str]:
    """A sharding in any of HLO's notations as tiles; of a tuple each element.

    Args:
        text: What follows `sharding=` in HLO text.

    Example:
        >>> tile_texts("{{mesh['a'=2,'b'=2], [{}, {'a'}]}, {replicated}}")
        ['{devices=[1,2,2]<=[4] last_tile_dim_replicate}', '{replicated}']
    """
    sharding = HloSharding.from_string(text)
    return [hlo_text(element) for element in sharding.tuple_elements() or [sharding]]


def op_sharding(hlo: Any) -> Any:
    """An `HloSharding` as an `OpSharding` proto that lists its devices, which once all did."""
    proto = hlo.to_proto()
    if proto.iota_reshape_dims:
        proto.tile_assignment_devices = hlo.tile_assignment_devices()
        proto.iota_reshape_dims, proto.iota_transpose_perm = [], []
    return proto


def jax_hlo_sharding(sharding: JaxSharding, ndim: int) -> Any:
    """The HLO sharding of a sharding class that only JAX knows."""
    return sharding._to_xla_hlo_sharding(ndim)


def is_auto_layout(layout: object) -> bool:
    """True for the marker that leaves a layout to the compiler."""
    return isinstance(layout, type(AutoLayout))


def layout_text(layout: Any, dtype: Any) -> str | None:
    """A layout as a module writes it; None for the default one."""
    if layout is None:
        return None
    if is_auto_layout(layout):
        return "auto"
    return str(layout._to_xla_layout(dtype))


def memory_kinds(device: Device) -> tuple[str, ...]:
    """The kinds of memory that a device has, none where its plugin does not say."""
    try:
        return tuple(memory.kind for memory in device.addressable_memories())
    except Exception:  # not every PJRT plugin has memories
        return ()


def is_symbolic_size(size: object) -> bool:
    """Return whether a size of a shape is an expression of `jax.export`."""
    return core.is_symbolic_dim(size)


def default_memory_kind(device: Device) -> str | None:
    """The memory that a device's arrays live in unless somebody asks for another."""
    try:
        return device.default_memory().kind
    except Exception:  # not every PJRT plugin has memories
        return None
