"""`jax` itself, and single names of other modules."""

import math
import unittest
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from xlashard._jax.compat.legacy_api import backend, compilation_cache
from xlashard.legacy.modules.entry import Entry, RemovedApi, members
from xlashard.sharding import Mesh

clear_backends = backend.clear_backends
loops = RemovedApi("jax.experimental.loops")
mask = RemovedApi("jax.mask")
soft_pmap = RemovedApi("jax.soft_pmap")
xla_computation = RemovedApi("jax.xla_computation")


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
    compilation_cache.set_cache_dir(path)


def is_initialized() -> bool:
    """Return whether the persistent compilation cache has a folder and is enabled."""
    if not jax.config.jax_enable_compilation_cache:
        return False
    return bool(jax.config.jax_compilation_cache_dir)


ENTRIES: tuple[Entry, ...] = (
    *members("jax", "0.4.14", "jax.core", {"ShapedArray": "jax.core.ShapedArray"}),
    *members("jax", "0.4.14", __name__, {"curry": "functools.partial"}),
    *members("jax", "0.4.36", __name__, {"clear_backends": "jax.extend.backend.clear_backends()"}),
    *members(
        "jax",
        "0.10.0",
        "xlashard",
        {
            "device_put_replicated": "jax.device_put(x, jax.NamedSharding(mesh, jax.P()))",
            "device_put_sharded": "jax.device_put(stacked, jax.NamedSharding(mesh, jax.P('x')))",
        },
    ),
    Entry(
        "jax.xla_computation",
        "0.4.34",
        "refused",
        f"{__name__}:xla_computation",
        "jax.jit(f).lower(x).compiler_ir('hlo')",
        "only `jit` lowers functions",
    ),
    Entry(
        "jax.soft_pmap",
        "0.3.25",
        "refused",
        f"{__name__}:soft_pmap",
        "jax.vmap",
        "it was removed with xmap",
    ),
    Entry(
        "jax.mask",
        "0.3.16",
        "refused",
        f"{__name__}:mask",
        "jax.numpy.where(valid, x, 0)",
        "JAX has no transformation for padded arrays",
    ),
    *members(
        "jax.experimental",
        "0.9.0",
        __name__,
        {"disable_x64": "jax.enable_x64(False)", "enable_x64": "jax.enable_x64(True)"},
    ),
    Entry(
        "jax.experimental.loops",
        "0.3.16",
        "refused",
        f"{__name__}:loops",
        "jax.lax.fori_loop",
        "JAX's loops are functions of their state",
    ),
    Entry(
        "jax.experimental.optimizers",
        "0.3.16",
        "works",
        "jax.example_libraries.optimizers",
        "import jax.example_libraries.optimizers",
    ),
    Entry(
        "jax.experimental.stax",
        "0.3.16",
        "works",
        "jax.example_libraries.stax",
        "import jax.example_libraries.stax",
    ),
    *members("jax.ad_checkpoint", "0.10.0", "jax", {"checkpoint": "jax.checkpoint"}),
    *members("jax.ad_checkpoint", "0.10.0", "jax", {"remat": "jax.checkpoint"}),
    *members(
        "jax._src.test_util",
        "0.6.0",
        __name__,
        {"create_global_mesh": "jax.make_mesh(shape, names)"},
    ),
    *members("jax.dlpack", "0.7.0", __name__, {"to_dlpack": "x.__dlpack__()"}),
    Entry(
        "jax.Device.live_buffers",
        "0.4.36",
        "differs",
        f"{__name__}:live_buffers",
        "jax.live_arrays()",
        "arrays over several devices are excluded; jax.live_arrays() returns all",
    ),
    Entry(
        "jax.pmap",
        "0.8.0",
        "works",
        "xlashard.legacy.arrays.legacy_pmap:pmap",
        "jax.shard_map(f, mesh=mesh, in_specs=P('batch'), out_specs=P('batch'))",
        "An index of a result is the shard of one device; an index of today's `jax.pmap` result is "
        "replicated.",
    ),
    *members(
        "jax.experimental.compilation_cache.compilation_cache",
        "0.4.26",
        __name__,
        {
            "initialize_cache": "jax.config.update('jax_compilation_cache_dir', path)",
            "is_initialized": "jax.config.jax_compilation_cache_dir is not None",
        },
    ),
)
