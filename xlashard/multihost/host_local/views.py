"""Conversion of concrete values to global arrays and to local parts that share their shards."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from xlashard._jax.runtime.global_state import cleared_with_jax
from xlashard._jax.runtime.transfer import Handle, HandleType, assemble, split
from xlashard.array import Array
from xlashard.array.core.array import wrap
from xlashard.array.core.base import check_alive, type_text
from xlashard.array.host.put import as_host_value, host_value, put_value
from xlashard.array.host.read import read_value
from xlashard.array.keys import is_key_array, key_handle, keys_over
from xlashard.array.placement.target import ResolvedSharding, resolve_sharding
from xlashard.array.placement.transfer_guard import (
    Transfer,
    active_guards,
    allow_transfers,
    check_transfer,
    guarded,
)
from xlashard.array.reshard.execute import reshard
from xlashard.array.reshard.plan import same_shards
from xlashard.multihost.host_local.host_mesh import HostMesh
from xlashard.sharding import PartitionSpec, from_jax

# Enough for the distinct shapes of a few batches and states.
_KEPT = 1024


def as_global(x: Any, host: HostMesh, spec: PartitionSpec) -> Any:
    """Return the global array of which a concrete value is this process's part."""
    return _converted(x, _global_boundary, host, spec)


def as_host_local(x: Any, host: HostMesh, spec: PartitionSpec) -> Any:
    """Return this process's part of a concrete global value."""
    return _converted(x, _local_boundary, host, spec)


type _Boundary = Callable[
    [HostMesh, PartitionSpec, tuple[int, ...]], tuple[ResolvedSharding, ResolvedSharding]
]
"""Computes the required placement of a value, and the placement of its converted view."""


@cleared_with_jax
@lru_cache(maxsize=_KEPT)
def _global_boundary(
    host: HostMesh, spec: PartitionSpec, shape: tuple[int, ...]
) -> tuple[ResolvedSharding, ResolvedSharding]:
    there = host.global_shape(spec, shape)
    return resolve_sharding(shape, host.local_sharding(spec)), resolve_sharding(
        there, host.global_sharding(spec)
    )


@cleared_with_jax
@lru_cache(maxsize=_KEPT)
def _local_boundary(
    host: HostMesh, spec: PartitionSpec, shape: tuple[int, ...]
) -> tuple[ResolvedSharding, ResolvedSharding]:
    here = host.local_shape(spec, shape)
    return resolve_sharding(shape, host.global_sharding(spec)), resolve_sharding(
        here, host.local_sharding(spec)
    )


def _converted(x: Any, ends: _Boundary, host: HostMesh, spec: PartitionSpec) -> Any:
    if is_key_array(x):
        ends(host, spec, x.shape)  # The rank of the keys matters, not the rank of the key data.
        return keys_over(_converted(key_handle(x), ends, host, spec).to_jax(), x)
    source, target = ends(host, spec, _shape_of(x))
    if isinstance(x, np.ndarray) and x.dtype == jax.dtypes.float0:
        return np.zeros(target.shape, x.dtype)
    return _viewed(_put(x, source), target)


def _shape_of(x: Any) -> tuple[int, ...]:
    if isinstance(x, jax.Array) or getattr(x, "dtype", None) == jax.dtypes.float0:
        return x.shape
    return as_host_value(x, lambda: "it").value.shape


def _put(x: Any, target: ResolvedSharding) -> Handle:
    """Transfer a concrete value to its placement; a value already there keeps its buffers."""
    guards = active_guards()
    if isinstance(x, Array | HandleType):
        check_alive(x)
        array = x if isinstance(x, Array) else Array.from_jax(x)
        if array.is_fully_addressable == target.sharding.is_fully_addressable:
            handle = array.to_jax()
            if guards is not None and not same_shards(
                resolve_sharding(handle.shape, from_jax(handle.sharding)), target
            ):
                check_transfer(guards, Transfer.DEVICE_TO_DEVICE, f"the array {type_text(array)}")
            with allow_transfers():
                return reshard(handle, target)
        # Each process has the whole value and transfers its own part.
        return put_value(read_value(array), target, weak_type=array.weak_type)
    value, weak_type = host_value(x, lambda: "it")
    if guards is None:
        return put_value(value, target, weak_type=weak_type)
    with guarded(guards, Transfer.HOST_TO_DEVICE, f"the {type(x).__name__}"):
        return put_value(value, target, weak_type=weak_type)


def _viewed(handle: Handle, there: ResolvedSharding) -> Array:
    """Return an array with the same shards under another shape and sharding."""
    if handle.shape == there.shape and handle.sharding == there.jax_sharding and handle.committed:
        return wrap(handle, there.sharding)
    aval = there.aval(handle.dtype, handle.weak_type)
    return wrap(assemble(aval, there.jax_sharding, split(handle)), there.sharding)
