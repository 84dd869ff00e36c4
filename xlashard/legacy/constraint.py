"""The era's `with_sharding_constraint`."""

from typing import Any

import xlashard
from xlashard._jax import tracing
from xlashard._jax.tracebacks import short_tracebacks
from xlashard.errors import ArgumentError, MeshError, ResourceError
from xlashard.legacy.worlds import world_in_force
from xlashard.pjit.resources import UNSPECIFIED


def with_sharding_constraint(
    x: Any, axis_resources: Any = UNSPECIFIED, shardings: Any = UNSPECIFIED
) -> Any:
    """Tells the partitioner how a value inside a program is dealt out.

    With `jax_array` it is `xlashard.with_sharding_constraint`, and moves concrete arrays outside of
    any program. Without, it needs a mesh in force, and a program around it.

    Args:
        x: A pytree of arrays.
        axis_resources: A prefix of it: at each leaf None for replicated, a PartitionSpec on the
            mesh in force (`UNCONSTRAINED` dimensions stay with the partitioner), or a Sharding.
        shardings: A later name of `axis_resources`.

    Returns:
        The same values.

    Raises:
        ResourceError: With the leaf's path, if a resource does not fit; both names or none given.
        MeshError: For a PartitionSpec without a mesh in force; without `jax_array`, for anything.
        ArgumentError: Without `jax_array`, outside of any program.

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
        said = shardings if axis_resources is UNSPECIFIED else axis_resources
        both = axis_resources is not UNSPECIFIED and shardings is not UNSPECIFIED
        if both or said is UNSPECIFIED:
            raise ResourceError(
                "with_sharding_constraint takes axis_resources, or shardings, which means the "
                "same: write with_sharding_constraint(x, P('data'))"
            )
        if not world_in_force().jax_array:
            _admit()
        return xlashard.with_sharding_constraint(x, said)


def _admit() -> None:
    if tracing.mesh_in_force() is None:
        raise MeshError(
            "with_sharding_constraint was called with no mesh in force, which it needs while "
            "jax_array is off: call the function around it inside `with mesh:`"
        )
    if tracing.is_top_level():
        raise ArgumentError(
            "with_sharding_constraint speaks of values inside a program while jax_array is off, "
            "and there is none around it: place arrays with pjit(lambda x: x, None, P('data'))(x), "
            "or write jax.config.update('jax_array', True)"
        )
