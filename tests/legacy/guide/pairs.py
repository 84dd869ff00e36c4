"""Pairs of code that programs wrote before `jax.Array`, and that they write with it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xlashard
from xlashard import legacy

X = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)


@dataclasses.dataclass(frozen=True)
class Library:
    """Package that provides the guide's replacements.

    Attributes:
        name: Name of the package.
        from_callback: `make_array_from_callback`.
        from_single_device_arrays: `make_array_from_single_device_arrays`.
        named_sharding: `NamedSharding`.
    """

    name: str
    from_callback: Callable[..., Any]
    from_single_device_arrays: Callable[..., Any]
    named_sharding: Callable[..., Any]


JAX = Library(
    "jax",
    jax.make_array_from_callback,
    jax.make_array_from_single_device_arrays,
    jax.sharding.NamedSharding,
)
XLASHARD = Library(
    "xlashard",
    xlashard.make_array_from_callback,
    xlashard.make_array_from_single_device_arrays,
    xlashard.NamedSharding,
)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Old code with its replacement.

    Attributes:
        name: Name in the test id.
        before: Returns arrays, given the mesh; runs with `jax_array` off.
        after: Returns as many, given the mesh and a library; runs with `jax_array` on.
        output_gda: Whether the old code requests GlobalDeviceArrays as outputs.
        host_local: Whether their arrays are the part of this process.
    """

    name: str
    before: Callable[[Any], Any]
    after: Callable[[Any, Library], Any]
    output_gda: bool = True
    host_local: bool = False


def local_part(x: np.ndarray) -> np.ndarray:
    """Return the rows of a global value that this process would have read."""
    rows = len(x) // jax.process_count()
    return x[jax.process_index() * rows : (jax.process_index() + 1) * rows]


def local_buffers(x: np.ndarray, mesh: Any, spec: Any) -> list[Any]:
    """Return its shards on the devices of this process."""
    from jax.experimental.global_device_array import get_shard_indices

    indices = get_shard_indices(x.shape, mesh, spec)
    return [jax.device_put(x[indices[device]], device) for device in mesh.local_devices]


def gda_from_callback(mesh):
    from jax.experimental import PartitionSpec as P
    from jax.experimental.global_device_array import GlobalDeviceArray

    return GlobalDeviceArray.from_callback(X.shape, mesh, P("x", "y"), lambda index: X[index])


def array_from_callback(mesh, lib):
    from jax.sharding import PartitionSpec as P

    return lib.from_callback(X.shape, lib.named_sharding(mesh, P("x", "y")), lambda index: X[index])


def gda_from_buffers(mesh):
    from jax.experimental.global_device_array import GlobalDeviceArray
    from jax.experimental.pjit import PartitionSpec as P

    spec = P(("x", "y"))
    return GlobalDeviceArray(X.shape, mesh, spec, local_buffers(X, mesh, spec))


def array_from_buffers(mesh, lib):
    from jax.sharding import PartitionSpec as P

    spec = P(("x", "y"))
    return lib.from_single_device_arrays(
        X.shape, lib.named_sharding(mesh, spec), local_buffers(X, mesh, spec)
    )


def shards_before(mesh):
    gda = gda_from_callback(mesh)
    return [gda.local_data(0), *[shard.data for shard in gda.local_shards]]


def shards_after(mesh, lib):
    array = array_from_callback(mesh, lib)
    return [array.addressable_data(0), *[shard.data for shard in array.addressable_shards]]


def host_local_before(mesh):
    from jax.experimental.pjit import PartitionSpec as P
    from jax.experimental.pjit import pjit

    in_pspecs, out_pspecs = P("x"), (P("x"), None)
    with mesh:
        f = pjit(lambda x: (x * 2, x.sum()), in_pspecs, out_pspecs)
        return f(local_part(X))


def host_local_after(mesh, lib):
    from jax.experimental import multihost_utils
    from jax.experimental.pjit import pjit
    from jax.sharding import PartitionSpec as P

    in_pspecs, out_pspecs = P("x"), (P("x"), None)
    with mesh:
        global_inps = multihost_utils.host_local_array_to_global_array(
            local_part(X), mesh, in_pspecs
        )
        global_outputs = pjit(
            lambda x: (x * 2, x.sum()), in_shardings=in_pspecs, out_shardings=out_pspecs
        )(global_inps)
        return multihost_utils.global_array_to_host_local_array(global_outputs, mesh, out_pspecs)


def batch_before(mesh):
    from jax.experimental.pjit import PartitionSpec as P
    from jax.experimental.pjit import pjit

    batch = {"image": local_part(X), "label": local_part(np.arange(8))}
    with mesh:
        return pjit(
            lambda b: b["image"].mean(axis=1) * b["label"],
            in_axis_resources=(P("x"),),
            out_axis_resources=P("x"),
        )(batch)


def batch_after(mesh, lib):
    from jax.experimental import multihost_utils
    from jax.experimental.pjit import pjit
    from jax.sharding import PartitionSpec as P

    batch = {"image": local_part(X), "label": local_part(np.arange(8))}
    batch = multihost_utils.host_local_array_to_global_array(batch, mesh, P("x"))
    with mesh:
        out = pjit(
            lambda b: b["image"].mean(axis=1) * b["label"],
            in_shardings=(P("x"),),
            out_shardings=P("x"),
        )(batch)
    return multihost_utils.global_array_to_host_local_array(out, mesh, P("x"))


def replicated_before(mesh):
    from jax.experimental.pjit import pjit

    with mesh:
        return pjit(jax.random.split, in_axis_resources=None, out_axis_resources=None)(
            jax.random.PRNGKey(1)
        )


def replicated_after(mesh, lib):
    from jax.experimental.pjit import pjit

    with mesh:
        return pjit(jax.random.split, in_shardings=None, out_shardings=None)(jax.random.PRNGKey(1))


def _noisy(key, x):
    return x + jax.random.normal(key, x.shape)


def mixed_before(mesh):
    from jax.experimental.pjit import PartitionSpec as P
    from jax.experimental.pjit import pjit

    with mesh:
        return pjit(_noisy, in_axis_resources=(P(None), P("x")), out_axis_resources=P("x"))(
            jax.random.PRNGKey(1), local_part(X)
        )


def mixed_after(mesh, lib):
    from jax.experimental import multihost_utils
    from jax.experimental.pjit import pjit
    from jax.sharding import PartitionSpec as P

    global_inp = multihost_utils.host_local_array_to_global_array(local_part(X), mesh, P("x"))
    with mesh:
        global_out = pjit(_noisy, in_shardings=(P(None), P("x")), out_shardings=P("x"))(
            jax.random.PRNGKey(1), global_inp
        )
    return multihost_utils.global_array_to_host_local_array(global_out, mesh, P("x"))


def from_gda_before(mesh):
    from jax.experimental.pjit import FROM_GDA, pjit
    from jax.experimental.pjit import PartitionSpec as P

    f = pjit(lambda x: x @ x.T, in_axis_resources=FROM_GDA, out_axis_resources=P("x", "y"))
    with mesh:
        return f(gda_from_callback(mesh))


def from_gda_after(mesh, lib):
    from jax.experimental.pjit import pjit
    from jax.sharding import PartitionSpec as P

    f = pjit(lambda x: x @ x.T, out_shardings=P("x", "y"))
    with mesh:
        return f(array_from_callback(mesh, lib))


def _four(a, b, c, d):
    return a + b, c * d


def from_gda_and_specs_before(mesh):
    from jax.experimental.pjit import FROM_GDA, pjit
    from jax.experimental.pjit import PartitionSpec as P

    pjitted_f = pjit(
        _four,
        in_axis_resources=(FROM_GDA, P("x"), FROM_GDA, P(None)),
        out_axis_resources=P("x", "y"),
    )
    with mesh:
        return pjitted_f(gda_from_callback(mesh), local_part(X), gda_from_buffers(mesh), X[0])


def from_gda_and_specs_after(mesh, lib):
    from jax.experimental import multihost_utils
    from jax.experimental.pjit import pjit
    from jax.sharding import PartitionSpec as P

    pjitted_f = pjit(_four, out_shardings=P("x", "y"))
    array2, array4 = multihost_utils.host_local_array_to_global_array(
        (local_part(X), X[0]), mesh, (P("x"), P(None))
    )
    with mesh:
        return pjitted_f(
            array_from_callback(mesh, lib), array2, array_from_buffers(mesh, lib), array4
        )


def one_row_each() -> tuple[Any, np.ndarray, list[Any]]:
    """Return for pmap a spec, the first rows, and each row on a device of this process."""
    from jax.interpreters import pxla

    devices = jax.local_devices()
    unstacked = (pxla.Unstacked(len(devices)), pxla.NoSharding())
    spec = pxla.ShardingSpec(sharding=unstacked, mesh_mapping=(pxla.ShardedAxis(0),))
    rows = X[: len(devices)]
    buffers = [jax.device_put(row, device) for row, device in zip(rows, devices, strict=True)]
    return spec, rows, buffers


def sda_for_pmap_before(mesh):
    from jax.interpreters import pxla

    spec, rows, buffers = one_row_each()
    sda = pxla.make_sharded_device_array(jax.ShapedArray(rows.shape, rows.dtype), spec, buffers)
    assert isinstance(sda, pxla.ShardedDeviceArray)
    return [sda, jax.pmap(lambda row: row * 2)(sda)]


def sda_for_pmap_after(mesh, lib):
    spec, rows, buffers = one_row_each()
    sharding = jax.sharding.PmapSharding(np.array(jax.local_devices()), spec)
    array = xlashard.make_array_from_single_device_arrays(rows.shape, sharding, buffers)
    return [array, jax.pmap(lambda row: row * 2)(array)]


def sda_for_pjit_before(mesh):
    from jax.experimental.pjit import PartitionSpec as P
    from jax.experimental.pjit import get_array_mapping, pjit
    from jax.interpreters import pxla

    aval = jax.ShapedArray(X.shape, X.dtype)
    spec = pxla.mesh_sharding_specs(mesh.shape, mesh.axis_names)(
        aval, get_array_mapping(P("x", "y"))
    )
    indices = pxla.spec_to_indices(X.shape, spec)
    buffers = [
        jax.device_put(X[index], device)
        for index, device in zip(indices, mesh.devices.flat, strict=True)
    ]
    sda = pxla.make_sharded_device_array(aval, spec, buffers, indices)
    with mesh:
        return [sda, pjit(jnp.sin, P("x", "y"), P("x", "y"))(sda)]


def sda_for_pjit_after(mesh, lib):
    from jax.experimental.pjit import pjit
    from jax.sharding import PartitionSpec as P

    sharding = lib.named_sharding(mesh, P("x", "y"))
    array = lib.from_single_device_arrays(X.shape, sharding, local_buffers(X, mesh, P("x", "y")))
    with mesh:
        return [array, pjit(jnp.sin, in_shardings=P("x", "y"), out_shardings=P("x", "y"))(array)]


def parallel_before(mesh):
    from jax.experimental.pjit import PartitionSpec as P
    from jax.experimental.pjit import pjit

    spec = P("x")
    with mesh:
        x = pjit(lambda v: v, None, spec)(np.arange(8))
        product = pjit(lambda v: v @ v.T, spec, None)(x)
        sine = pjit(jnp.sin, spec, spec)(x)
        copy = pjit(jnp.copy, spec, spec)(x)
        double = pjit(lambda v: v * 2, spec, spec)(x)
    return [product, sine, copy, double]


def parallel_after(mesh, lib):
    from jax.sharding import PartitionSpec as P

    put = xlashard.device_put if lib is XLASHARD else jax.device_put
    numpy = xlashard.numpy if lib is XLASHARD else jnp
    sharded_x = put(np.arange(8), lib.named_sharding(mesh, P("x")))
    matmul_sharded_x = sharded_x @ sharded_x.T
    sin_sharded_x = numpy.sin(sharded_x)
    copy_sharded_x = numpy.copy(sharded_x)
    double_out = jax.jit(lambda x: x * 2)(sharded_x)
    return [matmul_sharded_x, sin_sharded_x, copy_sharded_x, double_out]


PAIRS = (
    Pair("from_callback", gda_from_callback, array_from_callback),
    Pair("raw_constructor", gda_from_buffers, array_from_buffers),
    Pair("local_shards", shards_before, shards_after),
    Pair("host_local_inputs", host_local_before, host_local_after, False, True),
    Pair("a_batch", batch_before, batch_after, False, True),
    Pair("replicated_inputs", replicated_before, replicated_after),
    Pair("mixed_inputs", mixed_before, mixed_after, False, True),
    Pair("from_gda", from_gda_before, from_gda_after),
    Pair("from_gda_and_specs", from_gda_and_specs_before, from_gda_and_specs_after),
)
"""Pairs that also run on a pod."""

PAIRS_OF_ONE_PROCESS = (
    Pair("sharded_device_array_for_pmap", sda_for_pmap_before, sda_for_pmap_after, False),
    Pair("sharded_device_array_for_pjit", sda_for_pjit_before, sda_for_pjit_after, False),
    Pair("parallel_example", parallel_before, parallel_after),
)


def run_both_ways(pair: Pair, mesh: Any, lib: Library) -> None:
    """Run a pair, and check that both return equal values, shardings and types."""
    with legacy.jax_array(False), legacy.parallel_functions_output_gda(pair.output_gda):
        before = pair.before(mesh)
    with legacy.jax_array(True):
        after = pair.after(mesh, lib)
    assert type(before) is type(after) or not isinstance(before, list | tuple)
    old, new = jax.tree.leaves(before), jax.tree.leaves(after)
    assert len(old) == len(new) > 0
    for one, other in zip(old, new, strict=True):
        check_same(one, other)


def check_same(one: Any, other: Any) -> None:
    """Check equal values, shardings and types; of arrays of many processes by their shards."""
    assert isinstance(one, jax.Array)
    assert isinstance(other, jax.Array)
    assert (one.shape, one.dtype, one.weak_type) == (other.shape, other.dtype, other.weak_type)
    assert one.sharding.is_equivalent_to(other.sharding, one.ndim), (one.sharding, other.sharding)
    assert one.is_fully_addressable == other.is_fully_addressable
    pieces, others = one.addressable_shards, other.addressable_shards
    for piece, that in zip(pieces, others, strict=True):
        assert (piece.device, piece.index) == (that.device, that.index)
        assert piece.replica_id == that.replica_id
        np.testing.assert_array_equal(piece.data, that.data)
