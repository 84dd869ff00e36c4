"""Conversions between host-local and global arrays as linear primitives, each other's transpose."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import jax

from xlashard._jax.trace import tracing
from xlashard._jax.trace.primitives import LinearRules, spmd_axis_names, transposed_pair
from xlashard.errors import (
    CompileError,
    ResourceError,
)
from xlashard.multihost.host_local.host_mesh import HostMesh, host_mesh
from xlashard.multihost.host_local.views import as_global, as_host_local
from xlashard.pjit.constraint import constrain
from xlashard.sharding import Mesh, PartitionSpec, partition_spec, spec_of

TO_GLOBAL = "host_local_array_to_global_array"
TO_LOCAL = "global_array_to_host_local_array"


def bind_traced(primitive: Any, x: Any, host: HostMesh, spec: PartitionSpec) -> Any:
    """Bind a primitive to a traced value, and constrain the result's sharding inside a program."""
    out = primitive.bind(x, global_mesh=host.whole, pspec=spec)
    if out.shape != x.shape or not tracing.is_staging():
        return out
    there = host.global_sharding(spec)
    explicit = set(host.whole.explicit_axes)
    if explicit:
        # Explicit axes are part of the type, which a constraint cannot change.
        whole = spec_of(spec)
        dims = (axes and tuple(a for a in axes if a in explicit) for axes in whole.dims)
        typed = partition_spec(replace(whole, dims=tuple(dims)))
        out = jax.sharding.reshard(out, there.with_spec(typed).jax_sharding())
    return out if explicit.issuperset(host.whole.axis_names) else constrain(out, there)


def _lift(x: Any, *, global_mesh: Mesh, pspec: PartitionSpec) -> Any:
    return as_global(x, host_mesh(global_mesh), pspec)


def _lower(x: Any, *, global_mesh: Mesh, pspec: PartitionSpec) -> Any:
    return as_host_local(x, host_mesh(global_mesh), pspec)


def _lifted_shape(
    shape: Sequence[int], *, global_mesh: Mesh, pspec: PartitionSpec
) -> tuple[int, ...]:
    return host_mesh(global_mesh).global_shape(pspec, shape)


def _lowered_shape(
    shape: Sequence[int], *, global_mesh: Mesh, pspec: PartitionSpec
) -> tuple[int, ...]:
    return host_mesh(global_mesh).local_shape(pspec, shape)


def _with_batch(
    axis_data: Any, dim: int, *, global_mesh: Mesh, pspec: PartitionSpec
) -> dict[str, Any]:
    """Return the parameters for a batch dimension, sharded over `spmd_axis_name` if given."""
    axes, spec = spmd_axis_names(axis_data), spec_of(pspec)
    clash = [axis for axis in axes if axis in spec.axes]
    if clash:
        raise ResourceError(
            f"vmap shards its batch over {clash[0]!r} (spmd_axis_name), but the inner spec "
            f"{spec.describe()} already uses that axis: remove it from one of them"
        )
    return {"global_mesh": global_mesh, "pspec": partition_spec(spec.insert(dim, axes))}


def _in_program(
    name: str,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    x: Any,
    *,
    global_mesh: Mesh,
    pspec: PartitionSpec,
) -> Any:
    """Return the value unchanged; inside a program the conversion must keep the shape."""
    if shapes[0] == shapes[1]:
        return x
    _refuse_in_program(name, shapes, pspec)


def _refuse_in_program(
    name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]], pspec: PartitionSpec
) -> NoReturn:
    raise CompileError(  # no-catalogue: needs several processes
        f"{name} changes the shape {shapes[0]} to {shapes[1]} inside a compiled program, in which "
        f"every value is global: convert before and after the program, x = {TO_GLOBAL}(x, "
        f"global_mesh, {spec_of(pspec).describe()}); y = pjit(f)(x); y = {TO_LOCAL}(y, "
        "global_mesh, pspec)"
    )


to_global_p, to_local_p = transposed_pair(
    LinearRules(TO_GLOBAL, _lift, _lifted_shape, _with_batch, partial(_in_program, TO_GLOBAL)),
    LinearRules(TO_LOCAL, _lower, _lowered_shape, _with_batch, partial(_in_program, TO_LOCAL)),
)
"""Host-local to global, and back; parameters `global_mesh` and `pspec`."""
