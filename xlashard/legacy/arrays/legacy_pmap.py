"""`pmap` of 2022: JAX's own, with results sharded as they were then."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from xlashard import Array, PmapSharding
from xlashard._jax.compat import legacy_api as jax_pmap
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.tracebacks import shortened
from xlashard.array.core.handles import is_handle, wrap_result
from xlashard.legacy.arrays.device_arrays import device_array_class
from xlashard.legacy.modes.array_mode import current_array_mode
from xlashard.legacy.modes.config_flags import pmap_no_rank_reduction


def pmap(
    fun: Callable[..., Any],
    axis_name: Any = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    devices: Sequence[Device] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Iterable[int] = (),
) -> Any:
    """Map a function over devices, as `jax.pmap` does.

    Results are Arrays with a `PmapSharding`, or `ShardedDeviceArray`s with `jax_array` off. An
    index of a result, such as `loss[0]`, is the shard of one device and stays there; an index of
    today's `jax.pmap` result is replicated to all devices.

    Args:
        fun: The function of one slice.
        axis_name: The name of the mapped axis, for `jax.lax.psum(x, axis_name)`.
        in_axes: The mapped dimension of each argument; None replicates the argument.
        out_axes: The mapped dimension of each result.
        static_broadcasted_argnums: Positions of static arguments.
        devices: The devices; by default those of this process, or of all with `axis_size`.
        backend: The platform.
        axis_size: The size of the mapped axis over all processes.
        donate_argnums: Positions of donated arguments.

    Returns:
        A function of the stacked arguments, with `lower`.

    Example:
        >>> import jax.numpy as jnp
        >>> double = pmap(lambda x: x * 2, devices=jax.local_devices()[:1])
        >>> double(jnp.ones((1, 3)))[0].shape
        (3,)
    """
    mapped = jax_pmap.pmap(
        fun,
        axis_name,
        in_axes=in_axes,
        out_axes=out_axes,
        static_broadcasted_argnums=static_broadcasted_argnums,
        devices=devices,
        backend=backend,
        axis_size=axis_size,
        donate_argnums=donate_argnums,
    )

    @functools.wraps(mapped)
    @shortened
    def call(*args: Any, **kwargs: Any) -> Any:
        return _legacy_results(mapped(*args, **kwargs))

    call.lower = mapped.lower  # pyright: ignore[reportAttributeAccessIssue]
    return call


def _legacy_results(results: Any) -> Any:
    leaves, treedef = jax.tree.flatten(results)
    of_today = current_array_mode().jax_array
    unstacked = not pmap_no_rank_reduction.value
    for number, handle in enumerate(leaves):
        # Results are tracers under grad, vmap and jit, and key arrays stay arrays of JAX.
        if is_handle(handle):
            kind = Array if of_today else device_array_class(handle)
            leaves[number] = wrap_result(handle, kind)
            sharding = _pmap_sharding(handle.sharding, handle.shape, unstacked)
            if sharding is not None:
                leaves[number]._own_sharding = sharding
    return treedef.unflatten(leaves)


@functools.lru_cache(maxsize=4096)
def _pmap_sharding(sharding: Any, shape: tuple[int, ...], unstacked: bool) -> PmapSharding | None:
    """Return the `PmapSharding` of a result of `jax.pmap`; None if it has none."""
    if not isinstance(sharding, jax.sharding.NamedSharding) or len(sharding.mesh.axis_names) != 1:
        return None
    dims = [dim for dim, entry in enumerate(sharding.spec.partitions) if entry is not None]
    dim = dims[0] if dims else None
    devices = sharding._device_assignment
    return PmapSharding.default(shape, dim, devices, unstacked=unstacked and dim is not None)
