"""Text of an `Array`: repr, str, format and HTML."""

from typing import Any

import numpy as np

from xlashard.array.core.base import ArrayBase, type_text
from xlashard.array.host.read import distinct_here, has_value, is_unreduced, may_read, read_value
from xlashard.errors import counted
from xlashard.sharding import GSPMDSharding, NamedSharding, Sharding, from_jax

# Bytes above which a value is not read for its repr.
_PRINTED_BYTES = 1 << 20


def _printable(array: ArrayBase) -> bool:
    return array.nbytes <= _PRINTED_BYTES and has_value(array) and may_read(array)


def array_repr(array: ArrayBase) -> str:
    """Return `Array([1, 2], dtype=int32)`; without the value if large or in other processes."""
    handle = array._handle
    if handle.is_deleted():
        return f"{type(array).__name__}({type_text(handle)}, deleted)"
    suffix = f"dtype={handle.dtype.name}"
    if handle.weak_type:
        suffix += ", weak_type=True"
    prefix = f"{type(array).__name__}("
    if is_unreduced(handle):
        where = sharding_text(from_jax(handle.sharding))
        return f"{prefix}shape={handle.shape}, {suffix}, sharding={where})"
    if not has_value(array):
        tiling, distinct = distinct_here(handle)
        here = f"{len(distinct.buffers)} of {tiling.num_tiles} pieces here"
        where = sharding_text(from_jax(handle.sharding))
        return f"{prefix}shape={handle.shape}, {suffix}, sharding={where}, {here})"
    if not _printable(array):
        return f"{prefix}shape={handle.shape}, {suffix})"
    if array.size == 0:
        return f"{prefix}[], shape={handle.shape}, {suffix})"
    width = np.get_printoptions()["linewidth"]
    body = np.array2string(
        read_value(array), prefix=prefix, suffix=",", separator=", ", max_line_width=width
    )
    last_line = len(prefix) + len(body) - (body.rfind("\n") + 1)
    gap = " " if last_line + len(suffix) + len(", )") <= width else "\n" + " " * len(prefix)
    return f"{prefix}{body},{gap}{suffix})"


def sharding_text(sharding: Sharding) -> str:
    """Return a one-line description of a sharding: `P('data') on 8 devices (data=8)`."""
    count = len(sharding.devices)
    devices = counted(count, "device")
    if isinstance(sharding, NamedSharding):
        axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        return f"{sharding.normal_spec.describe()} on {devices} ({axes})"
    if isinstance(sharding, GSPMDSharding):
        return f"{sharding.tile_assignment.to_text()} on {devices}"
    if count == 1:
        return f"device {sharding.devices[0].id}"
    return f"{type(sharding).__name__} on {devices}"


def array_str(array: ArrayBase) -> str:
    """Return the value as NumPy prints it."""
    if array._handle.is_deleted() or not _printable(array):
        return array_repr(array)
    return str(read_value(array))


def array_html(array: ArrayBase) -> str | None:
    """Return the picture that a notebook shows of an array in several tiles, or None.

    For None the notebook shows the text. It requests the text first, which caches the value of a
    small array; the cached value stands above the picture, and nothing is read for it.
    """
    if array._handle.is_deleted():
        return None
    from xlashard.pictures import html_of  # slow to import and rarely needed

    value = "" if array._value_cache is None else array_repr(array)
    try:
        return html_of(array, value)
    except Exception:  # the text remains
        return None


def array_format(array: ArrayBase, spec: str) -> str:
    """Return the value as NumPy formats it: arrays only by an empty spec."""
    if array._handle.is_deleted() or not has_value(array):
        return array_repr(array)
    if not array.ndim:
        return format(read_value(array)[()], spec)
    return format(read_value(array), spec) if spec else array_str(array)


def _cut_text(cut: slice | int) -> str:
    if isinstance(cut, int):
        return str(cut)
    whole = cut.start is None and cut.stop is None
    return ":" if whole else f"{cut.start or 0}:{cut.stop}"


def index_text(index: Any) -> str:
    """Return an index as source code: `[0:2, :]`."""
    parts = [_cut_text(entry) for entry in index]
    return f"[{', '.join(parts)}]" if parts else "[()]"
