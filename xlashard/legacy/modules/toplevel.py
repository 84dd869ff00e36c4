"""`jax` itself, `jax.tree_util`, `jax.config`, and single names of other modules."""

import math
import unittest
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial, wraps
from inspect import signature
from typing import Any, NamedTuple

import jax
import numpy as np

from xlashard._jax import legacy_api
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.transfer import HandleType
from xlashard.core.array import Array
from xlashard.core.array.array_class.handles import wrap_result
from xlashard.core.sharding import Mesh
from xlashard.legacy.arrays.device_arrays import device_array_class
from xlashard.legacy.entries.entry import raise_removed
from xlashard.legacy.entries.keywords import SIGNATURES
from xlashard.legacy.modes.config_flags import current_array_mode, pmap_no_rank_reduction
from xlashard.legacy.modules.keywords import convert_arguments
from xlashard.legacy.shardings.pmap import PmapSharding
from xlashard.support.tracebacks import shortened

config = jax.config


def curry(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return the curried form of a function."""
    return partial(partial, f)


def live_buffers(device: Any) -> list[jax.Array]:
    """Return the arrays that are on one device only."""
    return [x for x in device.client.live_arrays() if x.devices() == {device}]


def to_dlpack(x: Any, **options: Any) -> Any:
    """Return the DLPack capsule of an array.

    Args:
        x: The array.
        **options: Options of `__dlpack__`; `take_ownership` is ignored.
    """
    options.pop("take_ownership", None)
    return x.__dlpack__(**options)


def enable_x64(new_val: bool = True) -> Any:
    """Return a context manager that enables 64-bit types."""
    return jax.enable_x64(new_val)


def disable_x64() -> Any:
    """Return a context manager that disables 64-bit types."""
    return jax.enable_x64(False)


def create_global_mesh(mesh_shape: Sequence[int], axis_names: Sequence[str]) -> Mesh:
    """Make a mesh of the first devices by their ids, for a test.

    Args:
        mesh_shape: The size of each axis.
        axis_names: The name of each axis.

    Raises:
        unittest.SkipTest: JAX has fewer devices.
    """
    size, devices = math.prod(mesh_shape), sorted(jax.devices(), key=lambda device: device.id)
    if len(devices) < size:
        raise unittest.SkipTest(  # no-catalogue: skips a test
            f"the test requires {size} devices for a mesh of shape {tuple(mesh_shape)}, and JAX "
            f"has {len(devices)}"
        )
    grid = np.array(devices[:size], dtype=object).reshape(tuple(mesh_shape))
    return Mesh(grid, tuple(axis_names))


def initialize_cache(path: str) -> None:
    """Set the folder of the persistent compilation cache.

    Args:
        path: The folder.
    """
    legacy_api.compilation_cache.set_cache_dir(path)


def is_initialized() -> bool:
    """Return whether the persistent compilation cache has a folder and is enabled."""
    if not jax.config.jax_enable_compilation_cache:
        return False
    return bool(jax.config.jax_compilation_cache_dir)


def pmap(fun: Callable[..., Any], axis_name: Any = None, **options: Any) -> Any:
    """Map a function over devices, as `jax.pmap` does.

    Results are Arrays with a `PmapSharding`, or `ShardedDeviceArray`s with `jax_array` off. An
    index of a result, such as `loss[0]`, is the shard of one device and stays there; an index of
    today's `jax.pmap` result is replicated to all devices.

    Args:
        fun: The function of one slice.
        axis_name: The name of the mapped axis, for `jax.lax.psum(x, axis_name)`.
        **options: Those of `jax.pmap`: `in_axes`, `out_axes`, `static_broadcasted_argnums`,
            `devices`, `backend`, `axis_size` and `donate_argnums`.

    Returns:
        A function of the stacked arguments, with `lower`.

    Example:
        >>> import jax.numpy as jnp
        >>> double = pmap(lambda x: x * 2, devices=jax.local_devices()[:1])
        >>> double(jnp.ones((1, 3)))[0].shape
        (3,)
    """
    if SIGNATURES["jax.pmap"].is_used(0, options):
        _, options = convert_arguments("jax.pmap", (), options)
    mapped = legacy_api.pmap(fun, axis_name, **options)

    @wraps(mapped)
    @shortened
    def call(*args: Any, **kwargs: Any) -> Any:
        return _legacy_results(mapped(*args, **kwargs))

    call.lower = mapped.lower  # pyright: ignore[reportAttributeAccessIssue]
    return call


def xla_computation(
    fun: Callable[..., Any],
    static_argnums: int | Sequence[int] = (),
    axis_env: Any = None,
    in_parts: Any = None,
    out_parts: Any = None,
    backend: str | None = None,
    return_shape: bool = False,
    donate_argnums: int | Sequence[int] = (),
    **without_effect: Any,
) -> Callable[..., Any]:
    """Return a function that returns the XLA computation of a call.

    Args:
        fun: The function.
        static_argnums: Positions of static arguments.
        axis_env: Axes of `jax.pmap` around the function; refused.
        in_parts: Partitions of the arguments; refused.
        out_parts: Partitions of the results; refused.
        backend: The platform; None for the default.
        return_shape: True to return the types of the results, too.
        donate_argnums: Positions of donated arguments.
        **without_effect: `tuple_args` and `instantiate_const_outputs`.

    Raises:
        RefusedError: Axes or partitions are given.

    Example:
        >>> computation = xla_computation(lambda x: x + 1)(1.0)
        >>> "add" in computation.as_hlo_text()
        True
    """
    if axis_env or in_parts is not None or out_parts is not None:
        raise_removed("jax.xla_computation")
    compiled = jax.jit(
        fun, static_argnums=static_argnums, donate_argnums=donate_argnums, keep_unused=True
    )
    platforms = None if backend is None else (backend,)

    def make_computation(*args: Any, **kwargs: Any) -> Any:
        traced = compiled.trace(*args, **kwargs)
        computation = traced.lower(lowering_platforms=platforms).compiler_ir("hlo")
        return (computation, traced.out_info) if return_shape else computation

    return make_computation


pmap.__signature__ = signature(legacy_api.pmap)  # pyright: ignore[reportFunctionMemberAccess]


def _legacy_results(results: Any) -> Any:
    leaves, treedef = jax.tree.flatten(results)
    of_today = current_array_mode().jax_array
    unstacked = not pmap_no_rank_reduction.value
    for number, handle in enumerate(leaves):
        # Results are tracers under grad, vmap and jit, and key arrays stay arrays of JAX.
        if type(handle) is HandleType:
            kind = Array if of_today else device_array_class(handle)
            leaves[number] = wrap_result(handle, kind)
            sharding = _pmap_sharding(handle.sharding, handle.shape, unstacked)
            if sharding is not None:
                leaves[number]._own_sharding = sharding
    return treedef.unflatten(leaves)


@lru_cache(maxsize=4096)
def _pmap_sharding(sharding: Any, shape: tuple[int, ...], unstacked: bool) -> PmapSharding | None:
    """Return the `PmapSharding` of a result of `jax.pmap`; None if it has none."""
    if not isinstance(sharding, jax.sharding.NamedSharding) or len(sharding.mesh.axis_names) != 1:
        return None
    dims = [dim for dim, entry in enumerate(sharding.spec.partitions) if entry is not None]
    dim = dims[0] if dims else None
    devices = sharding._device_assignment
    return PmapSharding.default(shape, dim, devices, unstacked=unstacked and dim is not None)


def build_tree(treedef: Any, xs: Any) -> Any:
    """Return the pytree of a structure and a nested sequence of its leaves.

    Args:
        treedef: The structure.
        xs: The leaves, nested like the structure.
    """
    return treedef.from_iterable_tree(xs)


class GetitemKeyPathEntry(NamedTuple):
    """Key path entry of the child `node[key]`.

    Example:
        >>> GetitemKeyPathEntry("w").pprint()
        "['w']"
    """

    key: Any

    def pprint(self) -> str:
        """Return the entry as code."""
        return f"[{self.key!r}]"


class AttributeKeyPathEntry(NamedTuple):
    """Key path entry of the child `node.key`.

    Example:
        >>> AttributeKeyPathEntry("weight").pprint()
        '.weight'
    """

    key: str

    def pprint(self) -> str:
        """Return the entry as code."""
        return f".{self.key}"


KEY_PATHS: dict[type, Callable[[Any], Sequence[Any]]] = {}
"""The registered handlers, by node type."""


def register_keypaths(ty: type, handler: Callable[[Any], Sequence[Any]]) -> None:
    """Register the key path entries of a node type.

    JAX registers key paths together with the type, so its messages keep using child numbers.

    Args:
        ty: The type of the nodes.
        handler: Returns for a node one key path entry per child.
    """
    KEY_PATHS[ty] = handler
