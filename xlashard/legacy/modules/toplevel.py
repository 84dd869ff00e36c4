"""What `jax` and `jax.experimental` had besides today's names."""

import math
import unittest
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from xlashard._jax.era import backend
from xlashard.legacy.installation.removed_api import RemovedApi
from xlashard.legacy.modules.entry import Entry, members
from xlashard.sharding import Mesh

clear_backends = backend.clear_backends
loops = RemovedApi("jax.experimental.loops")
mask = RemovedApi("jax.mask")
soft_pmap = RemovedApi("jax.soft_pmap")
xla_computation = RemovedApi("jax.xla_computation")


def curry(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes the first arguments, and gives one that takes the others."""
    return partial(partial, f)


def live_buffers(device: Any) -> list[jax.Array]:
    """The arrays that lie on one device alone."""
    return [x for x in device.client.live_arrays() if x.devices() == {device}]


def to_dlpack(x: Any, **options: Any) -> Any:
    """An array's memory as a capsule of DLPack, which other libraries take.

    Args:
        x: The array.
        **options: Those of today's `__dlpack__`; `take_ownership` is not looked at.
    """
    options.pop("take_ownership", None)
    return x.__dlpack__(**options)


def enable_x64(new_val: bool = True) -> Any:
    """A context in which numbers have 64 bits."""
    return jax.enable_x64(new_val)


def disable_x64() -> Any:
    """A context in which numbers have 32 bits."""
    return jax.enable_x64(False)


def create_global_mesh(mesh_shape: Sequence[int], axis_names: Sequence[str]) -> Mesh:
    """Make a mesh of the first devices by their ids, for a test.

    Args:
        mesh_shape: The size of each axis.
        axis_names: The name of each axis.

    Raises:
        unittest.SkipTest: There are fewer devices, so the test can't run.
    """
    size, devices = math.prod(mesh_shape), sorted(jax.devices(), key=lambda device: device.id)
    if len(devices) < size:
        raise unittest.SkipTest(  # no-catalogue: skips a test
            f"the test needs {size} devices for a mesh of shape {tuple(mesh_shape)}, and there are "
            f"{len(devices)}"
        )
    grid = np.array(devices[:size], dtype=object).reshape(tuple(mesh_shape))
    return Mesh(grid, tuple(axis_names))


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
        "functions are lowered by `jit` alone",
    ),
    Entry(
        "jax.soft_pmap",
        "0.3.25",
        "refused",
        f"{__name__}:soft_pmap",
        "jax.vmap",
        "it went with xmap",
    ),
    Entry(
        "jax.mask",
        "0.3.16",
        "refused",
        f"{__name__}:mask",
        "jax.numpy.where(valid, x, 0)",
        "no function is rewritten for padded arrays any more",
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
        "loops are functions of their state",
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
        "arrays over several devices are not among them; jax.live_arrays() has all",
    ),
    Entry(
        "jax.pmap",
        "0.8.0",
        "works",
        "xlashard.legacy.arrays.pmap:pmap",
        "jax.shard_map(f, mesh=mesh, in_specs=P('batch'), out_specs=P('batch'))",
        "One index of a result is the piece of one device again; of today's `jax.pmap` it is a "
        "copy on every device.",
    ),
)
