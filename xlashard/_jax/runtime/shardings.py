"""JAX's sharding classes, layouts and memory kinds, and HLO shardings."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental.layout import Format as Format
from jax.experimental.layout import Layout as Layout

from xlashard._jax.private import (
    core,
    lib_jax,
    missing_name,
    named_sharding,
    read_lazily,
    sharding_impls,
    xc,
)

type Device = Any
"""A device of JAX; jaxlib has no stub of its class."""

JaxSharding = jax.sharding.Sharding
JaxNamedSharding = jax.sharding.NamedSharding
JaxSingleDeviceSharding = jax.sharding.SingleDeviceSharding
Mesh = jax.sharding.Mesh
AbstractMesh = jax.sharding.AbstractMesh

if TYPE_CHECKING:
    JaxGSPMDSharding = sharding_impls.GSPMDSharding
    HloSharding = xc.HloSharding
    OpSharding = xc.OpSharding
    UNSPECIFIED = named_sharding.UNSPECIFIED
    UnspecifiedValue = type(named_sharding.UNSPECIFIED)
else:
    __getattr__ = read_lazily(
        globals(),
        {
            "JaxGSPMDSharding": lambda: sharding_impls.GSPMDSharding,
            "HloSharding": lambda: xc.HloSharding,
            "OpSharding": lambda: xc.OpSharding,
            "UNSPECIFIED": lambda: named_sharding.UNSPECIFIED,
            "UnspecifiedValue": lambda: type(named_sharding.UNSPECIFIED),
        },
    )


def read_reduction(spec: Any) -> str:
    """Read how the unreduced axes of a spec will be reduced: `"sum"`, ...; empty without any."""
    if hasattr(jax.sharding, "UnreducedKind"):
        return "" if spec.unreduced_kind is None else spec.unreduced_kind.name
    return "sum" if spec.unreduced else ""  # JAX 0.10 has sums only, and no name for them.


def reduction_arguments(
    unreduced: Iterable[str], reduced: Iterable[str], reduction: str
) -> dict[str, Any]:
    """Return the arguments of `PartitionSpec` for unreduced and reduced axes.

    Args:
        unreduced: Axes over which each device holds a part.
        reduced: Axes over which a cotangent is unreduced.
        reduction: What `read_reduction` returns.
    """
    axes: dict[str, Any] = {"unreduced": frozenset(unreduced), "reduced": frozenset(reduced)}
    kinds = getattr(jax.sharding, "UnreducedKind", None)
    if kinds is not None:
        return {**axes, "unreduced_kind": kinds[reduction] if reduction else None}
    if reduction in ("", "sum"):
        return axes
    raise missing_name("jax.sharding.UnreducedKind")  # no-catalogue: needs a JAX without it


def with_interface[T](interface: type[T], jax_class: type) -> type[T]:
    """Return a base class that derives from an interface of ours and from a sharding class of JAX.

    The oldest supported jaxlib refuses to create a class with these two bases, but accepts one
    whose bases are assigned afterwards.
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
    """Return a sharding whose tiles are on devices in an order that no mesh of them has.

    Shardy refuses JAX's class for bare tiles in an arbitrary order, but accepts a mesh that lists
    the order.

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
        Mesh(grid, tuple(names)),
        spec,
        memory_kind=memory_kind,
        _logical_device_ids=tuple(order),
    )


def sdy_array(
    axes: Sequence[tuple[str, int]],
    spec: jax.sharding.PartitionSpec,
    order: Sequence[int],
    ndim: int,
) -> Any:
    """Return Shardy's sharding attribute of a value of a rank.

    Args:
        axes: Names and sizes of the axes of a mesh.
        spec: A partition spec on it.
        order: The order of the devices on it, empty for the default order.
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
    """Return the order in which a sharding lists the devices of its mesh; None for the default."""
    return getattr(sharding, "_logical_device_ids", None)


def device_assignment(sharding: JaxSharding) -> tuple[Device, ...]:
    """Return the device assignment of a sharding."""
    return tuple(sharding._device_assignment)


def device_list(devices: Sequence[Device]) -> Any:
    """Return JAX's hashable list of devices, which executables and shardings share."""
    return xc.DeviceList(tuple(devices))


def hlo_from_text(text: str) -> Any:
    """Parse the HLO syntax, `{devices=[2,4]<=[8]}`."""
    return xc.HloSharding.from_string(text)


def is_hlo_sharding(value: object) -> bool:
    """Return True for an `HloSharding` or an `OpSharding` proto."""
    return isinstance(value, (xc.OpSharding, xc.HloSharding))


def hlo_text(sharding: Any) -> str:
    """Return an `HloSharding` or an `OpSharding` proto in the HLO syntax."""
    if isinstance(sharding, xc.OpSharding):
        sharding = xc.HloSharding.from_proto(sharding)
    if elements := sharding.tuple_elements():
        return f"{{{', '.join(map(hlo_text, elements))}}}"
    # The partitioner may return the mesh form (V3), which has an equivalent tile form.
    return str(xc.HloSharding.v3_to_v2_sharding(sharding))


def op_sharding_text(data: bytes) -> str:
    """Return a serialized `OpSharding` in the HLO syntax, as HLO text has it."""
    proto = xc.OpSharding()
    proto.ParseFromString(data)
    return str(xc.HloSharding.from_proto(proto))


def tile_texts(text: str) -> list[str]:
    """Convert a sharding in any HLO syntax to tiles; a tuple element by element.

    Args:
        text: The value of `sharding=` in HLO text.

    Example:
        >>> tile_texts("{{mesh['a'=2,'b'=2], [{}, {'a'}]}, {replicated}}")
        ['{devices=[1,2,2]<=[4] last_tile_dim_replicate}', '{replicated}']
    """
    sharding = xc.HloSharding.from_string(text)
    return [hlo_text(element) for element in sharding.tuple_elements() or [sharding]]


def op_sharding(hlo: Any) -> Any:
    """Convert an `HloSharding` to an `OpSharding` proto that lists its devices."""
    proto = hlo.to_proto()
    if proto.iota_reshape_dims:
        proto.tile_assignment_devices = hlo.tile_assignment_devices()
        proto.iota_reshape_dims, proto.iota_transpose_perm = [], []
    return proto


def jax_hlo_sharding(sharding: JaxSharding, ndim: int) -> Any:
    """Return the HLO sharding of any sharding of JAX."""
    return sharding._to_xla_hlo_sharding(ndim)


def is_auto_layout(layout: object) -> bool:
    """Return True for the marker that leaves a layout to the compiler."""
    return isinstance(layout, type(Layout.AUTO))


def is_same_layout(layout: Any, own: Any) -> bool:
    """Return True if an array has a requested layout, in any tiles if that names none."""
    if is_auto_layout(layout) or is_auto_layout(own) or layout.tiling:
        return layout == own
    return layout.major_to_minor == own.major_to_minor


def layout_problem(layout: Any, ndim: int) -> str:
    """Return why a layout can't be that of a value, and what to write; empty if it can."""
    if layout is None or is_auto_layout(layout):
        return ""
    order, dims = layout.major_to_minor, tuple(range(ndim))
    if tuple(sorted(order)) == dims:
        return ""
    return f"its layout {order} is no order of the dimensions {dims}: write Layout({dims})"


def layout_code(layout: Any) -> str:
    """Return a layout as code."""
    if is_auto_layout(layout):
        return "Layout.AUTO"
    return repr(layout) if layout.tiling else f"Layout({layout.major_to_minor})"


def layout_text(layout: Any, dtype: Any) -> str | None:
    """Return a layout in the syntax of modules; None for the default one."""
    if layout is None:
        return None
    if is_auto_layout(layout):
        return "auto"
    return str(layout._to_xla_layout(dtype))


def is_compile_only(device: Device) -> bool:
    """Return True if a device is a compile-only device of a topology."""
    # Devices that programs of 2022 made by hand have no client.
    return isinstance(getattr(device, "client", None), lib_jax.CompileOnlyPyClient)


def slice_of(device: Device) -> int:
    """Return the number of a device's slice, of slices that are joined by a network; 0 for others.

    Slices are those of TPUs. Devices of a single slice lack the attribute, or have None there.
    """
    return getattr(device, "slice_index", None) or 0


def if_reported[T](query: Callable[[], T]) -> T | None:
    """Return the result of a query of a PJRT plugin; None if the plugin does not answer it."""
    try:
        return query()
    except Exception:  # plugins raise errors of many classes
        return None


def memory_kinds(device: Device) -> tuple[str, ...]:
    """Return the memory kinds of a device; an empty tuple if its plugin reports none."""
    return if_reported(lambda: tuple(m.kind for m in device.addressable_memories())) or ()


def is_symbolic_size(size: Any) -> bool:
    """Return True if a size of a shape is an expression of `jax.export`."""
    return core.is_symbolic_dim(size)


@lru_cache(maxsize=4096)
def default_memory_kind(device: Device) -> str | None:
    """Return the default memory kind of a device; None if its plugin reports none."""
    return if_reported(lambda: device.default_memory().kind)
