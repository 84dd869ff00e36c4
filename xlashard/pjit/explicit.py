"""`reshard` and `shard_map` of JAX, whose results outside of a program are `Array`s."""

import functools
import inspect
from typing import Any

import jax

from xlashard.array.core.handles import wrap_result


def reshard[T](xs: T, out_shardings: Any) -> T:
    """Reshard arrays as `jax.sharding.reshard` does, with `Array`s as results.

    Inside a program it changes the sharding in the type of a value, for explicit mesh axes;
    outside of one it moves the data.

    Args:
        xs: A pytree of arrays.
        out_shardings: A prefix of it: a Sharding, or a PartitionSpec on the mesh in force.

    Returns:
        The same values with these shardings.

    Raises:
        ValueError: For a PartitionSpec without a mesh in force, or a dimension that does not
            divide.

    Example:
        >>> import jax, numpy as np
        >>> import xlashard as xs
        >>> mesh = xs.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        >>> with xs.set_mesh(mesh):
        ...     x = xs.reshard(np.arange(4.0), xs.P("data"))
        >>> x.sharding.spec
        P('data',)
    """
    return jax.tree.map(wrap_result, jax.sharding.reshard(xs, out_shardings))


def shard_map(f: Any = None, /, **options: Any) -> Any:
    """Map a function over shards as `jax.shard_map` does, with `Array`s as results.

    Args:
        f: A function of shards. Without it comes a decorator with these options.
        **options: Those of `jax.shard_map`: `in_specs`, `out_specs`, `mesh` (the mesh in force if
            left out), `axis_names` (the manual axes; all if left out), `check_vma`.

    Returns:
        A function of whole arrays.

    Raises:
        ValueError: At the call, if a spec does not fit its argument or result.

    Example:
        >>> import jax, numpy as np
        >>> import xlashard as xs
        >>> mesh = xs.Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> @xs.shard_map(mesh=mesh, in_specs=xs.P("data"), out_specs=xs.P())
        ... def total(x):
        ...     return jax.lax.psum(x.sum(), "data")
        >>> total(np.arange(4.0, dtype=np.float32))
        Array(6., dtype=float32)
    """
    if f is None:
        return functools.partial(shard_map, **options)
    mapped = jax.shard_map(f, **options)

    @functools.wraps(f)
    def over_shards(*args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(wrap_result, mapped(*args, **kwargs))

    return over_shards


shard_map.__signature__ = inspect.signature(jax.shard_map)
