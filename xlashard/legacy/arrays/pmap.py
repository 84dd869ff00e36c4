"""The era's `pmap`: JAX's own, whose results lie on their devices as they did then."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from xlashard import Array, PmapSharding
from xlashard._jax import pmap as jax_pmap
from xlashard._jax.shardings import Device
from xlashard._jax.tracebacks import shortened
from xlashard.array.handles import is_handle, wrap_result
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
    """Runs a function on several devices at once, one piece of its arguments on each.

    It is `jax.pmap`, and takes what that takes. Its results are Arrays with a `PmapSharding`, or
    where `jax_array` is off `ShardedDeviceArray`s: one index of them, `loss[0]`, is the piece of
    one device, which stays there. JAX's own result would be copied to all devices for it.

    Args:
        fun: The function of a piece.
        axis_name: By which it may say `jax.lax.psum(x, axis_name)`.
        in_axes: Which dimension of each argument is dealt to the devices; None gives all of it to
            each.
        out_axes: The same of the result.
        static_broadcasted_argnums: Positions of arguments that are part of the program.
        devices: On which to run; otherwise on those of this process, or of all for `axis_size`.
        backend: On which platform.
        axis_size: How many pieces there are in all processes.
        donate_argnums: Positions of arguments whose buffers the results may take over.

    Returns:
        A function of the whole arguments, with `lower`.

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
        # Under grad, vmap and jit they are tracers; keys are arrays of JAX.
        if is_handle(handle):
            kind = Array if of_today else device_array_class(handle)
            leaves[number] = wrap_result(handle, kind)
            sharding = _pmap_sharding(handle.sharding, handle.shape, unstacked)
            if sharding is not None:
                leaves[number]._own_sharding = sharding
    return treedef.unflatten(leaves)


@functools.lru_cache(maxsize=4096)
def _pmap_sharding(sharding: Any, shape: tuple[int, ...], unstacked: bool) -> PmapSharding | None:
    """Where a result of `jax.pmap` is, as the era said it; None where it could not."""
    if not isinstance(sharding, jax.sharding.NamedSharding) or len(sharding.mesh.axis_names) != 1:
        return None
    dims = [dim for dim, entry in enumerate(sharding.spec.partitions) if entry is not None]
    dim = dims[0] if dims else None
    devices = sharding._device_assignment
    return PmapSharding.default(shape, dim, devices, unstacked=unstacked and dim is not None)
