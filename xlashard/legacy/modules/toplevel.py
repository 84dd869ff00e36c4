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
from xlashard.core.array.core.handles import wrap_result
from xlashard.core.sharding import Mesh
from xlashard.legacy.arrays.device_arrays import device_array_class
from xlashard.legacy.modes.config_flags import current_array_mode, pmap_no_rank_reduction
from xlashard.legacy.modules.entry import EntryTable, refused, works
from xlashard.legacy.shardings.pmap import PmapSharding
from xlashard.tracebacks import shortened

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
    mapped = legacy_api.pmap(fun, axis_name, **options)

    @wraps(mapped)
    @shortened
    def call(*args: Any, **kwargs: Any) -> Any:
        return _legacy_results(mapped(*args, **kwargs))

    call.lower = mapped.lower  # pyright: ignore[reportAttributeAccessIssue]
    return call


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


def tree_multimap(
    f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Map a function over the leaves of several pytrees.

    Args:
        f: The function.
        tree: The first pytree, which determines the structure.
        *rest: The other pytrees.
        is_leaf: Returns True for nodes of the first pytree to treat as leaves.

    Returns:
        A tree of the results.
    """
    return jax.tree.map(f, tree, *rest, is_leaf=is_leaf)


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


_FLAGS = "xlashard.legacy.modes.config_flags"


ENTRIES: EntryTable = {
    "jax": {
        "tree_flatten": works("0.6.0", "jax.tree.flatten", "jax.tree_util"),
        "tree_leaves": works("0.6.0", "jax.tree.leaves", "jax.tree_util"),
        "tree_map": works("0.6.0", "jax.tree.map", "jax.tree_util"),
        "tree_structure": works("0.6.0", "jax.tree.structure", "jax.tree_util"),
        "tree_transpose": works("0.6.0", "jax.tree.transpose", "jax.tree_util"),
        "tree_unflatten": works("0.6.0", "jax.tree.unflatten", "jax.tree_util"),
        "treedef_is_leaf": works("0.6.0", "jax.tree_util.treedef_is_leaf"),
        "tree_multimap": works("0.3.16", "jax.tree.map"),
        "ShapedArray": works("0.4.14", "jax.core.ShapedArray"),
        "curry": works("0.4.14", "functools.partial"),
        "clear_backends": works("0.4.36", "jax.extend.backend.clear_backends()"),
        "spmd_mode": works("0.7.0", "jax.jit(f)(x)", _FLAGS),
        "device_put_replicated": works(
            "0.10.0", "jax.device_put(x, jax.NamedSharding(mesh, jax.P()))", "xlashard"
        ),
        "device_put_sharded": works(
            "0.10.0", "jax.device_put(stacked, jax.NamedSharding(mesh, jax.P('x')))", "xlashard"
        ),
        "xla_computation": refused("0.4.34", "jax.jit(f).lower(x).compiler_ir('hlo')").because(
            "only `jit` lowers functions"
        ),
        "soft_pmap": refused("0.3.25", "jax.vmap").because("it was removed with xmap"),
        "mask": refused("0.3.16", "jax.numpy.where(valid, x, 0)").because(
            "JAX has no transformation for padded arrays"
        ),
        "pmap": works(
            "0.8.0", "jax.shard_map(f, mesh=mesh, in_specs=P('batch'), out_specs=P('batch'))"
        ).noting(
            "An index of a result is the shard of one device; an index of today's `jax.pmap` "
            "result is replicated."
        ),
    },
    "jax.tree_util": {
        "tree_multimap": works("0.3.16", "jax.tree.map"),
        "build_tree": works("0.7.0", "jax.tree.unflatten"),
        "AttributeKeyPathEntry": works("0.4.26", "jax.tree_util.GetAttrKey"),
        "GetitemKeyPathEntry": works("0.4.26", "jax.tree_util.DictKey"),
        "register_keypaths": works("0.4.26", "jax.tree_util.register_pytree_with_keys").but(
            "JAX's messages use the keys only if they are registered with today's function."
        ),
    },
    "jax.experimental": {
        "disable_x64": works("0.9.0", "jax.enable_x64(False)"),
        "enable_x64": works("0.9.0", "jax.enable_x64(True)"),
        "loops": refused("0.3.16", "jax.lax.fori_loop").because(
            "JAX's loops are functions of their state"
        ),
    },
    **{
        f"jax.experimental.{name}": {"": works("0.3.16", f"import {home}", home)}
        for name in ("optimizers", "stax")
        for home in (f"jax.example_libraries.{name}",)
    },
    "jax.ad_checkpoint": {
        "checkpoint": works("0.10.0", "jax.checkpoint"),
        "remat": works("0.10.0", "jax.checkpoint", "jax"),
    },
    "jax._src.test_util": {"create_global_mesh": works("0.6.0", "jax.make_mesh(shape, names)")},
    "jax.dlpack": {"to_dlpack": works("0.7.0", "x.__dlpack__()")},
    "jax.Device": {
        "live_buffers": works("0.4.36", "jax.live_arrays()").but(
            "arrays over several devices are excluded; jax.live_arrays() returns all"
        )
    },
    "jax.experimental.compilation_cache.compilation_cache": {
        "initialize_cache": works("0.4.26", "jax.config.update('jax_compilation_cache_dir', path)"),
        "is_initialized": works("0.4.26", "jax.config.jax_compilation_cache_dir is not None"),
    },
    "jax.config": {
        "": works("0.4.25", "jax.config"),
        "config": works("0.4.25", "jax.config"),
        "jax_array": works("0.4.7", "isinstance(x, jax.Array)", _FLAGS),
        "jax_parallel_functions_output_gda": works(
            "0.4.7",
            "jax.jit(f, out_shardings=shardings)",
            f"{_FLAGS}:parallel_functions_output_gda",
        ),
        "jax_spmd_mode": works("0.7.0", "jax.jit(f)(x)", f"{_FLAGS}:spmd_mode"),
        "jax_pmap_no_rank_reduction": works(
            "0.8.0", "xlashard.unstacked_shards(x)", f"{_FLAGS}:pmap_no_rank_reduction"
        ).but(
            "With it on, `device_buffers` of arrays with a PmapSharding, which `jax.pmap` returns "
            "while the removed names are installed, keep the mapped dimension of size 1"
        ),
    },
}
