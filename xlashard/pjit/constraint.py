"""`with_sharding_constraint`: pins the sharding of a value inside a program."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax

from xlashard._jax import lowering, tracing
from xlashard._jax.jaxprs import as_function, from_function
from xlashard._jax.primitives import AxisData, identity_primitive, spmd_axis_names
from xlashard.array.handles import wrap_result
from xlashard.errors import GeometryError, ResourceError
from xlashard.pjit.resources import REPLICATED, expand, read_resources, to_sharding
from xlashard.program import Partitioner, is_open, open_dims, sharding_text
from xlashard.sharding import (
    GSPMDSharding,
    NamedSharding,
    Sharding,
    XLACompatibleSharding,
    partition_spec,
)


def with_sharding_constraint(x: Any, shardings: Any) -> Any:
    """Tells the partitioner how a value inside a program is dealt out.

    Its gradient is dealt out alike. Outside of any program it moves concrete arrays.

    Args:
        x: A pytree of arrays.
        shardings: A prefix of it: at each leaf a Sharding, or, with a mesh in force, a
            PartitionSpec (`UNCONSTRAINED` dimensions stay with the partitioner) or None for
            replicated. Dimensions need not divide evenly.

    Returns:
        The same values.

    Raises:
        ResourceError: With the leaf's path, if a sharding does not fit.
        MeshError: For a PartitionSpec without a mesh in force.

    Example:
        >>> import jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> sharding = NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        >>> with_sharding_constraint(jax.numpy.ones(4), sharding).shape
        (4,)
    """
    leaves, treedef = jax.tree_util.tree_flatten(x)
    resources = read_resources(shardings, "shardings")
    mesh = tracing.mesh_in_force()
    flat = expand(resources, treedef, lambda path: "x" + jax.tree_util.keystr(tuple(path)))
    paths = ["x" + jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(x)[0]]
    out = []
    for leaf, resource, path in zip(leaves, flat, paths, strict=True):
        sharding = to_sharding(resource, mesh, f"the sharding of {path}")
        if sharding is None or sharding is REPLICATED:
            out.append(leaf)
            continue
        out.append(_constrain(leaf, sharding, path))
    return treedef.unflatten(out)


def _constrain(leaf: Any, sharding: Sharding, path: str) -> Any:
    aval = tracing.abstractify(leaf)
    if not isinstance(sharding, XLACompatibleSharding):
        tiles = sharding.tiling(aval.shape).to_tile_assignment()
        sharding = GSPMDSharding(sharding.devices, tiles, memory_kind=sharding.memory_kind)
    try:
        sharding.rank_tiling(aval.ndim)
    except GeometryError as error:
        raise ResourceError(
            f"the sharding of {path} (shape {tuple(aval.shape)}) is {sharding}: {error}", path=path
        ) from None
    return constraint_p.bind(leaf, sharding=sharding)


def _impl(x: Any, *, sharding: XLACompatibleSharding) -> Any:
    aval = tracing.abstractify(x)
    if not is_open(sharding):
        try:
            sharding.is_compatible_aval(aval.shape)
        except GeometryError:
            pass  # uneven: only the partitioner can do it
        else:
            return wrap_result(jax.device_put(x, sharding.twin(aval.shape)))
    jaxpr = _identity(sharding, aval.shape, str(aval.dtype))
    return wrap_result(jax.jit(as_function(jaxpr))(x)[0])


@lru_cache(maxsize=1024)
def _identity(sharding: XLACompatibleSharding, shape: tuple[int, ...], dtype: str) -> Any:
    aval = tracing.abstractify(jax.ShapeDtypeStruct(shape, dtype))
    return from_function(
        lambda v: [constraint_p.bind(v, sharding=sharding)], [aval], "with_sharding_constraint"
    )


def _batch(
    axis_data: AxisData,
    values: Sequence[Any],
    dims: Sequence[int | None],
    *,
    sharding: XLACompatibleSharding,
) -> tuple[Any, int | None]:
    (x,), (dim,) = values, dims
    if dim is None:
        return constraint_p.bind(x, sharding=sharding), None
    ndim = tracing.abstractify(x).ndim
    batched = _with_batch_dim(sharding, dim, ndim, spmd_axis_names(axis_data))
    return constraint_p.bind(x, sharding=batched), dim


def _with_batch_dim(
    sharding: XLACompatibleSharding, dim: int, ndim: int, axes: tuple[str, ...]
) -> XLACompatibleSharding:
    """The sharding of the batched value; without axes of its own the batch is left open."""
    if not isinstance(sharding, NamedSharding):
        tiles = sharding.rank_tiling(ndim - 1)
        counts = (*tiles.counts[:dim], 1, *tiles.counts[dim:])
        batched = replace(tiles, counts=counts).to_tile_assignment()
        return GSPMDSharding(sharding.devices, batched, memory_kind=sharding.memory_kind)
    spec = sharding.normal_spec
    clash = [a for a in axes if a in spec.axes]
    if clash:
        raise ResourceError(
            f"vmap deals its batch out along {clash[0]!r} (spmd_axis_name), but the constraint "
            f"{sharding.spec} inside uses that axis already: leave it out of one of them"
        )
    return sharding.with_spec(partition_spec(spec.insert(dim, axes or None)))


def _lower(ctx: Any, x: Any, *, sharding: XLACompatibleSharding) -> Any:
    (aval,) = ctx.avals_in
    trailing = tracing.physical_aval(aval).ndim - aval.ndim
    if sharding.num_devices == 1:
        return x
    shardy = lowering.uses_shardy()
    partitioner = Partitioner.SHARDY if shardy else Partitioner.GSPMD
    text = sharding_text(sharding, aval.ndim, partitioner, trailing)
    return lowering.constrain(ctx, x, text, open_dims(sharding, aval.ndim))


constraint_p = identity_primitive("sharding_constraint", _impl, _batch, _lower)
"""Pins the sharding of a value; its parameter is `sharding`, of this package."""


def constraints_in(jaxpr: Any) -> list[XLACompatibleSharding]:
    """The shardings of all constraints of ours inside a jaxpr, each once."""
    found: dict[XLACompatibleSharding, None] = {}
    for eqn in tracing.equations(jaxpr):
        if eqn.primitive is constraint_p:
            found[eqn.params["sharding"]] = None
    return list(found)
