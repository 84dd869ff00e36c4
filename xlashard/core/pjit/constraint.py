"""`with_sharding_constraint`: pins the sharding of a value inside a program."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
from jax.experimental.layout import with_layout_constraint
from jax.sharding import AxisType

from xlashard._jax import lowering, originals
from xlashard._jax.runtime.global_state import allow_transfers
from xlashard._jax.runtime.shardings import device_assignment
from xlashard._jax.runtime.topologies import check_can_hold_arrays
from xlashard._jax.trace import tracing
from xlashard._jax.trace.jaxprs import as_function, from_function
from xlashard._jax.trace.primitive_names import CONSTRAINT
from xlashard._jax.trace.primitives import (
    AxisData,
    Primitive,
    device_witness,
    identity_primitive,
    recompute_in_remat,
    spmd_axis_names,
)
from xlashard._jax.tree_definitions import leaf_paths
from xlashard.core.array import device_put
from xlashard.core.array.array_class.handles import wrap_result
from xlashard.core.pjit.arguments import are_arrays, check_alive, check_values
from xlashard.core.pjit.shardings.device_assignment import find_spec_mesh, on_devices
from xlashard.core.pjit.shardings.resolve import to_sharding
from xlashard.core.pjit.shardings.resources import (
    Resource,
    expand,
    misfit,
    read_resources,
)
from xlashard.core.pjit.shardings.unreduced import has_reductions
from xlashard.core.program.annotate import is_open, sharding_text
from xlashard.core.program.plan import Partitioner, open_dims
from xlashard.core.program.uneven_shardings import dividing, report_uneven_value
from xlashard.core.sharding import (
    AbstractMesh,
    GSPMDSharding,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
    XLACompatibleSharding,
    as_tiles,
    partition_spec,
)
from xlashard.core.sharding.replicated import REPLICATED, custom_memory_kind, names_devices
from xlashard.errors import (
    DuplicateAxisError,
    GeometryError,
    MeshError,
    ResourceError,
    ShardingError,
)
from xlashard.geometry import DimAxes, Spec
from xlashard.support.formatting import format_axes
from xlashard.support.tracebacks import short_tracebacks


def with_sharding_constraint[T](x: T, shardings: Any, *, strict: bool | None = None) -> T:
    """Constrain the sharding of a value inside a program, and that of its gradient.

    Outside of a program it reshards concrete arrays, without the axes by which a dimension does
    not divide.

    Args:
        x: A pytree of arrays.
        shardings: A prefix of it: at each leaf a Sharding, or, with a mesh in force, a
            PartitionSpec (the partitioner chooses the sharding of `UNCONSTRAINED` dimensions) or
            None for replicated. A dimension that does not divide evenly is padded inside of a
            program. A memory kind other than the default one moves the value to that memory.
        strict: Raise for a dimension that does not divide, instead of an `UnevenShardingWarning`;
            None for `XLASHARD_STRICT`.

    Returns:
        The same values.

    Raises:
        ResourceError: With the leaf's path, if a sharding does not fit.
        MeshError: For a PartitionSpec without a mesh in force.
        UnevenShardingError: If strict, for a dimension that does not divide.

    Example:
        >>> import jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> sharding = NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        >>> with_sharding_constraint(jax.numpy.ones(4), sharding).shape
        (4,)
    """
    with short_tracebacks:
        leaves, treedef = jax.tree_util.tree_flatten(x)
        paths = ["x"] if len(leaves) == 1 and leaves[0] is x else leaf_paths(x, "x")
        if not are_arrays(leaves):
            check_values(leaves, paths, static=False)
        mesh = find_spec_mesh(tracing.mesh_in_force())
        if mesh is None and tracing.manual_axes():
            # Inside a `shard_map` that was given its mesh, JAX reads specs on that one, too.
            mesh = jax.sharding.get_abstract_mesh()
        resources = expand(read_resources(shardings, "shardings"), treedef, "x")
        return treedef.unflatten(
            [_pin(*each, mesh, strict) for each in zip(leaves, resources, paths, strict=True)]
        )


def _pin(
    leaf: Any, resource: Resource, path: str, mesh: Mesh | AbstractMesh | None, strict: bool | None
) -> Any:
    aval = tracing.abstractify(leaf)
    is_traced = isinstance(leaf, tracing.Tracer)
    if not is_traced:
        check_alive(leaf, path, aval)
    requested = to_sharding(resource, mesh, "the sharding", path)
    if requested is REPLICATED:
        raise MeshError(
            f"the sharding of {path} is None (replicated), but no mesh is in force to "
            "replicate it over: call inside `with jax.set_mesh(mesh):`, or give "
            "NamedSharding(mesh, P())"
        )
    if requested is not None:
        sharding = _fitting(requested, aval, path)
        report_uneven_value(sharding, aval, path, strict, is_eager=not is_traced)
        leaf = constrain(leaf, _on_type(sharding, aval, path) if is_traced else sharding)
        if isinstance(leaf, tracing.Tracer) and custom_memory_kind(sharding) is not None:
            # Inside a program the memory is part of the value's type.
            leaf = tracing.moved_to_memory(leaf, sharding.memory_kind)
    if resource.layout is not None:
        leaf = wrap_result(with_layout_constraint(leaf, resource.layout))
    return leaf


def _fitting(requested: Sharding, aval: Any, path: str) -> XLACompatibleSharding:
    """Return a sharding that XLA takes, for a value of a rank.

    Raises:
        ResourceError: If it has no equal tiles, or not for this rank.
    """
    try:
        sharding = as_tiles(requested, aval.shape)
        sharding.check_compatible_aval(aval.shape)
    except (GeometryError, ShardingError) as error:
        kind = lowering.aval_text(aval)
        raise misfit("the sharding", path, kind, requested, error, also=type(error)) from None
    return sharding


def _on_type(sharding: XLACompatibleSharding, aval: Any, path: str) -> XLACompatibleSharding:
    """Return the sharding with the explicit axes in the type of a traced value.

    Args:
        sharding: The sharding.
        aval: The type.
        path: The path of the value.

    Raises:
        ResourceError: If the two contradict each other.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    typed = tracing.typed_axes(aval)
    if not typed:
        return sharding
    # JAX may leave axes of size one out of types.
    explicit = {axis for axis in sharding.mesh.explicit_axes if sharding.mesh.shape[axis] > 1}
    implied = AxisType.Auto in sharding.mesh.axis_types
    dims: list[tuple[str, ...] | None] = []
    spec = sharding.normal_spec
    if spec.unreduced != aval.sharding.spec.unreduced:
        raise ResourceError(
            f"the sharding of {path} is {sharding.spec}, but the type of {path}, "
            f"{lowering.aval_text(aval)}, is unreduced over "
            f"{sorted(aval.sharding.spec.unreduced) or 'no axis'}: a constraint changes no type; "
            f"write jax.sharding.reshard({path}, {sharding.spec})",
            path=path,
        )
    if tracing.leaves_explicit_mesh(aval, sharding.mesh):
        _check_mesh_in_force(sharding, aval, path)
        return sharding
    requested = spec.for_rank(aval.ndim)
    for dim, (axes, cut) in enumerate(zip(requested, typed, strict=True)):
        named = tuple(axis for axis in axes or () if axis in explicit)
        if named == tuple(axis for axis in cut if axis in explicit) or axes is None:
            dims.append(axes)
        elif not named and implied:
            dims.append((*cut, *axes))
        else:
            raise ResourceError(
                f"the sharding of {path} is {sharding.spec}, but the type of {path}, "
                f"{lowering.aval_text(aval)}, cuts dimension {dim} along {cut or 'no axis'}: "
                "a constraint changes no type, and these axes are explicit; write "
                f"jax.sharding.reshard({path}, {sharding.spec})",
                path=path,
                also=AssertionError,
            )
    return sharding.with_spec(partition_spec(replace(spec, dims=tuple(dims))))


def _check_mesh_in_force(sharding: NamedSharding, aval: Any, path: str) -> None:
    """Refuse a constraint on another mesh while one of explicit axes is in force.

    Raises:
        ResourceError: With both meshes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not mesh.explicit_axes:
        return
    axes, others = format_axes(sharding.mesh.shape), format_axes(mesh.shape)
    raise ResourceError(
        f"the sharding of {path} is {sharding.spec} on a mesh of {axes}, but {path}, "
        f"{lowering.aval_text(aval)}, is typed on the mesh in force, of {others}: a constraint "
        "changes no type, and these axes are explicit; write "
        f"jax.sharding.reshard({path}, P(...)) over the axes of that mesh",
        path=path,
        also=AssertionError,
    )


def constrain(value: Any, sharding: XLACompatibleSharding) -> Any:
    """Bind a constraint on one value."""
    return constraint_p.bind(value, **constraint_params(sharding))


def constraint_params(sharding: XLACompatibleSharding) -> dict[str, Any]:
    """Return the parameters of an equation that constrains a value."""
    return {"sharding": sharding, "witness": _witness(sharding)}


@lru_cache(maxsize=1024)
def _witness(sharding: XLACompatibleSharding) -> Any:
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return device_witness(sharding.devices if names_devices(sharding) else (), mesh)


def _impl(x: Any, *, sharding: XLACompatibleSharding, **_: Any) -> Any:
    # A computation, which transfer guards do not restrict.
    with allow_transfers():
        return _constrained(x, sharding)


def _constrained(x: Any, sharding: XLACompatibleSharding) -> Any:
    if not names_devices(sharding):
        if not hasattr(x, "sharding"):
            if sharding is REPLICATED:
                return x  # a value of the host
            raise MeshError(
                f"{sharding} stands on an abstract mesh, and the value is on the host: pass an "
                "array that is on the devices of a mesh, or give a NamedSharding on a mesh of "
                "devices"
            )
        sharding = on_devices(sharding, device_assignment(x.sharding))
    check_can_hold_arrays(sharding.devices)
    aval = tracing.abstractify(x)
    sharding = dividing(sharding, aval.shape)
    if not is_open(sharding):
        try:
            sharding.is_compatible_aval(aval.shape)
        except GeometryError:
            pass  # uneven: only the partitioner pads it
        else:
            # JAX moves nothing to devices of other processes, and bare tiles in one order only.
            return device_put(x, sharding)
    if isinstance(x, jax.Array) and x.devices() != sharding.device_set:
        # A program takes arguments of its own devices only.
        x = originals.device_put(
            x, GSPMDSharding.get_replicated(sharding.devices).jax_sharding(aval.shape)
        )
    jaxpr = _identity(sharding, aval.shape, aval.dtype)
    return wrap_result(originals.jit(as_function(jaxpr))(x)[0])


@lru_cache(maxsize=1024)
def _identity(sharding: XLACompatibleSharding, shape: tuple[int, ...], dtype: Any) -> Any:
    aval = tracing.abstractify(jax.ShapeDtypeStruct(shape, dtype))
    return from_function(lambda v: [constrain(v, sharding)], [aval], "with_sharding_constraint")


def _batch(
    primitive: Primitive,
    axis_data: AxisData,
    values: Sequence[Any],
    dims: Sequence[int | None],
    **params: Any,
) -> tuple[Any, int | None]:
    (x,), (dim,) = values, dims
    if dim is not None:
        sharding, ndim = params["sharding"], tracing.abstractify(x).ndim
        # JAX leaves the batch of a constraint open, but not that of an argument or result.
        closed = primitive is boundary_p and names_devices(sharding)
        batched = _with_batch_dim(sharding, dim, ndim, spmd_axis_names(axis_data), closed=closed)
        params |= constraint_params(batched)
    return primitive.bind(x, **params), dim


def _with_batch_dim(
    sharding: XLACompatibleSharding, dim: int, ndim: int, axes: tuple[str, ...], *, closed: bool
) -> XLACompatibleSharding:
    """Return the sharding of the batched value; a batch without axes is unconstrained or whole."""
    if isinstance(sharding, SingleDeviceSharding):
        if axes:
            raise ResourceError(
                f"vmap shards its batch over {axes[0]!r} (spmd_axis_name), but the constraint "
                f"inside puts each value on {sharding.devices[0]}: write NamedSharding(mesh, P())"
            )
        return sharding
    if sharding is REPLICATED:
        return sharding
    if not isinstance(sharding, NamedSharding):
        tiles = sharding.rank_tiling(ndim - 1)
        counts = (*tiles.counts[:dim], 1, *tiles.counts[dim:])
        batched = replace(tiles, counts=counts).to_tile_assignment()
        return GSPMDSharding(sharding.devices, batched, memory_kind=sharding.memory_kind)
    # Only automatic axes may be left to the partitioner.
    free = None if AxisType.Auto in sharding.mesh.axis_types and not closed else ()
    return sharding.with_spec(batched_spec(sharding.normal_spec, dim, axes or free))


def batched_spec(spec: Spec, dim: int, axes: DimAxes) -> PartitionSpec:
    """Return the spec of a batch of values.

    Args:
        spec: The spec of one value.
        dim: The batch dimension.
        axes: The mesh axes over which `vmap(..., spmd_axis_name=...)` shards the batch; `()` for
            none, None to leave it to the partitioner.

    Raises:
        ResourceError: If the spec of one value uses one of the axes.
    """
    clash = [axis for axis in axes or () if axis in spec.axes]
    if clash:
        raise ResourceError(
            f"vmap shards its batch over {clash[0]!r} (spmd_axis_name), but the spec "
            f"{spec.describe()} inside uses that axis already: leave it out of one of them",
            also=DuplicateAxisError,
        )
    return partition_spec(spec.insert(dim, axes))


def _lower(ctx: Any, x: Any, *, sharding: XLACompatibleSharding, **_: Any) -> Any:
    (aval,) = ctx.avals_in
    trailing = tracing.physical_aval(aval).ndim - aval.ndim
    manual = lowering.manual_axes(ctx)
    if 1 in (sharding.num_devices, lowering.device_count(ctx)) or _is_all_manual(sharding, manual):
        return x
    if sharding is REPLICATED and manual:
        return x  # the automatic axes of shard_map have no names here
    if not has_reductions(aval, sharding):
        return x  # the program around this value makes or reduces partial results
    partitioner = Partitioner.SHARDY if lowering.uses_shardy() else Partitioner.GSPMD
    if manual and partitioner is Partitioner.GSPMD:
        text = lowering.manual_text(ctx, sharding.jax_sharding(aval.shape), aval.ndim + trailing)
    else:
        text = sharding_text(sharding, aval.ndim, partitioner, trailing)
    return lowering.constrain(ctx, x, text, open_dims(sharding, aval.ndim))


def _is_all_manual(sharding: XLACompatibleSharding, manual: frozenset[str]) -> bool:
    """Return True if all axes of the mesh are manual axes of a `shard_map`.

    Raises:
        ResourceError: If a constraint inside names a manual axis.
    """
    if not manual or not isinstance(sharding, NamedSharding):
        return False
    clash = [axis for axis in sharding.normal_spec.axes if axis in manual]
    if clash:
        raise ResourceError(  # no-catalogue: needs a jaxpr traced elsewhere
            f"the constraint {sharding.spec} names {clash[0]!r}, a manual axis of the shard_map "
            "around it, where each value is one shard: leave that axis out"
        )
    return manual.issuperset(sharding.mesh.axis_names)


def _type(aval: Any, *, sharding: XLACompatibleSharding, witness: Any) -> Any:
    """Return the type of a constrained value, which names the mesh."""
    if not isinstance(sharding, NamedSharding):
        return aval
    return tracing.with_auto_mesh(aval, sharding.mesh)


def _constraint(name: str, **rules: Any) -> Primitive:
    def batch(*args: Any, **params: Any) -> tuple[Any, int | None]:
        return _batch(primitive, *args, **params)

    primitive = identity_primitive(name, _impl, batch, _lower, **rules)
    return primitive


class BoundaryArgument(NamedTuple):
    """Argument whose sharding a boundary pins.

    Attributes:
        keyword: The keyword by which the sharding was requested.
        path: The path of the argument.
        layout: The layout that was requested for it, or None.
    """

    keyword: str
    path: str
    layout: Any


constraint_p = _constraint(CONSTRAINT, abstract=_type)
"""Pins the sharding of a value. Its parameter `sharding` is of this package; JAX reads the devices
from its parameter `witness`."""

boundary_p = _constraint("boundary_sharding")
"""Pins the sharding of an argument or result of a pjit-ed function, at the ends of its body.

Its parameter `argument` is a `BoundaryArgument`; None for results, and where the call is part of
another function's body.
"""
recompute_in_remat(boundary_p)


def only_places(eqn: Any) -> bool:
    """Return True for an equation of a body's boundary that leaves its value in its memory."""
    return eqn.primitive is boundary_p and custom_memory_kind(eqn.params["sharding"]) is None
