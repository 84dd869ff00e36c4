"""The era's `with_sharding_constraint`."""

from typing import Any

import xlashard
from xlashard._jax import tracing
from xlashard._jax.tracebacks import short_tracebacks
from xlashard.errors import RefusedError, ResourceError
from xlashard.legacy.parsed import prepare_axis_resources
from xlashard.legacy.worlds import of_one_class, world_in_force
from xlashard.pjit.resources import UNSPECIFIED
from xlashard.sharding.parse import ParsedPartitionSpec


def with_sharding_constraint(
    x: Any, axis_resources: Any = UNSPECIFIED, shardings: Any = UNSPECIFIED
) -> Any:
    """Tells the partitioner how a value inside a program is dealt out.

    With `jax_array` it is `xlashard.with_sharding_constraint`, and moves concrete arrays outside of
    any program. Without, it needs a program around it, and a mesh in force for named axes.

    Args:
        x: A pytree of arrays.
        axis_resources: A prefix of it: at each leaf None for replicated, a PartitionSpec on the
            mesh in force (`UNCONSTRAINED` dimensions stay with the partitioner), or a Sharding.
        shardings: A later name of `axis_resources`.

    Returns:
        The same values.

    Raises:
        ResourceError: With the leaf's path, if a resource does not fit; both names or none given;
            without `jax_array`, for a named axis and no mesh in force.
        MeshError: With `jax_array`, for a PartitionSpec without a mesh in force.
        RefusedError: Without `jax_array`, outside of any program.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import legacy
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> def pinned(x):
        ...     return legacy.with_sharding_constraint(x, jax.sharding.PartitionSpec("data"))
        >>> with mesh, legacy.jax_array(False):
        ...     print(legacy.pjit(pinned, None, None)(np.arange(4)))
        [0 1 2 3]
    """
    with short_tracebacks:
        resources = shardings if axis_resources is UNSPECIFIED else axis_resources
        both = axis_resources is not UNSPECIFIED and shardings is not UNSPECIFIED
        if both or resources is UNSPECIFIED:
            raise ResourceError(
                "with_sharding_constraint takes axis_resources, or shardings, which means the "
                "same: write with_sharding_constraint(x, P('data'))"
            )
        if not world_in_force().jax_array and not _is_to_do(resources):
            return x
        return of_one_class(xlashard.with_sharding_constraint(x, resources))


def _is_to_do(resources: Any) -> bool:
    """Return whether resources constrain anything while `jax_array` is off.

    Raises:
        RefusedError: There is no program around the call.
        ResourceError: A spec names an axis, and no mesh is in force.
    """
    if tracing.is_top_level():
        raise RefusedError(
            "with_sharding_constraint constrains values inside a program while jax_array is off, "
            "and was called outside of any: place arrays with pjit(lambda x: x, None, P('data'))(x)"
            ", or write jax.config.update('jax_array', True)",
            name="jax.experimental.pjit.with_sharding_constraint",
        )
    if tracing.mesh_in_force() is not None:
        return True
    leaves = prepare_axis_resources(resources, "axis_resources", allow_unconstrained_dims=True)[1]
    for leaf in leaves:
        axes = [a for axes in leaf for a in axes or ()] if _is_spec(leaf) else []
        if axes:
            raise ResourceError(
                f"axis_resources of with_sharding_constraint has {leaf.get_partition_spec()}, and "
                f"no mesh is in force that has the axis {axes[0]!r}: call the function around it "
                "inside `with mesh:`"
            )
    return not all(map(_is_spec, leaves))


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, ParsedPartitionSpec)
