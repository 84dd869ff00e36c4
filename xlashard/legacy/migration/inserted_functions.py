"""Functions that the migration inserts into programs, where one expression is not enough.

A program gets their source code, with the functions that they call, and imports what they read.
"""

# They have no annotations: the programs that get them have none.
# pyright: reportAttributeAccessIssue=false, reportOptionalIterable=false

import inspect
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Names that only the programs import.
    import functools

    import jax
    import numpy

_MODULES = ("functools", "numpy", "jax.experimental.array_serialization.serialization", "jax")


def functions_with_callees(names: Collection[str]) -> dict[str, str]:
    """Return the source code of inserted functions and of those that they call, by sorted names.

    Args:
        names: The names of the functions.
    """
    sources: dict[str, str] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in sources:
            sources[name] = inspect.getsource(globals()[name])
            pending += [
                each for each in function_names() if re.search(rf"\b{each}\b", sources[name])
            ]
    return dict(sorted(sources.items()))


def modules_read_by(source: str) -> list[str]:
    """Return the modules that an inserted function reads.

    Args:
        source: Its source code.
    """
    return [name for name in _MODULES if re.search(rf"\b{re.escape(name)}\.", source)]


def function_names() -> list[str]:
    """Return the names of all inserted functions."""
    own = globals().items()
    return [name for name, each in own if name.startswith("_") and inspect.isfunction(each)]


def _jit_on_mesh(fun, **options):
    """Compile a function by jax.jit, with specs of the `with mesh:` around each call.

    Where the mesh is known: jax.jit(fun, in_shardings=jax.sharding.NamedSharding(mesh, spec)).
    """
    by_mesh = {}

    def on_mesh():
        mesh = _mesh_in_force()
        if mesh not in by_mesh:
            shardings = {
                name: jax.tree.map(lambda leaf: _sharding_on(mesh, leaf), value)
                for name, value in options.items()
                if name in ("in_shardings", "out_shardings")
            }
            by_mesh[mesh] = jax.jit(fun, **{**options, **shardings})
        return by_mesh[mesh]

    @functools.wraps(fun)
    def call(*args, **kwargs):
        return on_mesh()(*args, **kwargs)

    call.lower = lambda *args, **kwargs: on_mesh().lower(*args, **kwargs)
    return call


def _pjit(fun, *resources, **options):
    """Compile a function with the arguments of pjit, in which None is replicated."""
    names = ("in_shardings", "out_shardings", "static_argnums", "donate_argnums")
    options = {
        name.replace("_axis_resources", "_shardings"): value for name, value in options.items()
    }
    options.update(zip(names, resources))
    for name in options.keys() & {"in_shardings", "out_shardings"}:
        options[name] = _none_is_replicated(options[name])
    return _jit_on_mesh(fun, **options)


def _replicate(x):
    return jax.lax.with_sharding_constraint(x, jax.P())


def _mesh_in_force():
    """Return the mesh of the `with mesh:` around; an empty mesh outside of all."""
    try:
        return jax.jit(_replicate).trace(0).jaxpr.eqns[0].params["sharding"].mesh
    except RuntimeError:
        return jax.sharding.Mesh(numpy.empty((), dtype=object), ())


def _sharding_on(mesh, spec):
    """Return a spec's sharding on a mesh; without a mesh, P() is any sharding."""
    if not isinstance(spec, jax.P) or not isinstance(mesh, jax.sharding.Mesh):
        return spec
    if mesh.empty:
        return spec if tuple(spec) else None
    return jax.sharding.NamedSharding(mesh, spec)


def _none_is_replicated(specs):
    """Write P() for None, which meant replicated to pjit."""
    return jax.tree.map(
        lambda spec: jax.P() if spec is None else spec, specs, is_leaf=lambda x: x is None
    )


def _with_sharding_constraint(x, axis_resources):
    """Constrain the sharding of a tree."""
    return jax.lax.with_sharding_constraint(x, axis_resources)


def _old_attribute(x, name):
    """Return an attribute that arrays of 2022 had; other objects keep theirs."""
    if not isinstance(x, jax.Array):
        return getattr(x, name)
    todays = {
        "device": lambda: lambda: x.device,
        "device_buffer": lambda: x.addressable_data(0),
        "device_buffers": lambda: [shard.data for shard in x.addressable_shards],
        "local_data": lambda: x.addressable_data,
        "local_shards": lambda: x.addressable_shards,
        "mesh_axes": lambda: x.sharding.spec,
    }
    return todays[name]()


def _as_tuple(x):
    """Write a tuple for a PartitionSpec, which was one."""
    return tuple(x) if isinstance(x, jax.P) else x


def _array_from_callback(global_shape, global_mesh, mesh_axes, data_callback):
    """Make an array from pieces of host data."""
    sharding = jax.sharding.NamedSharding(global_mesh, mesh_axes)
    return jax.make_array_from_callback(tuple(global_shape), sharding, data_callback)


def _array_from_buffers(global_shape, global_mesh, mesh_axes, device_buffers):
    """Make an array from one array per device."""
    sharding = jax.sharding.NamedSharding(global_mesh, mesh_axes)
    return jax.make_array_from_single_device_arrays(
        tuple(global_shape), sharding, list(device_buffers)
    )


def _get_shard_indices(global_shape, global_mesh, mesh_axes):
    """Return the index of each device's shard."""
    sharding = jax.sharding.NamedSharding(global_mesh, mesh_axes)
    return sharding.devices_indices_map(tuple(global_shape))


def _get_shard_shape(global_shape, global_mesh, mesh_axes):
    """Return the shape of a shard."""
    return jax.sharding.NamedSharding(global_mesh, mesh_axes).shard_shape(tuple(global_shape))


def _array_from_batched_callback(global_shape, global_mesh, mesh_axes, data_callback):
    """Make an array from the pieces that one call of a function returns."""
    sharding = jax.sharding.NamedSharding(global_mesh, mesh_axes)
    indices = sharding.addressable_devices_indices_map(tuple(global_shape))
    pieces = data_callback(list(indices.values()))
    arrays = [jax.device_put(piece, device) for device, piece in zip(indices, pieces)]
    return jax.make_array_from_single_device_arrays(tuple(global_shape), sharding, arrays)


def _array_from_batched_callback_with_devices(global_shape, global_mesh, mesh_axes, data_callback):
    """Make an array from the pieces that one call returns on their devices."""
    sharding = jax.sharding.NamedSharding(global_mesh, mesh_axes)
    placements = {}
    for device, index in sharding.addressable_devices_indices_map(tuple(global_shape)).items():
        key = tuple((each.start, each.stop) for each in index)
        placements.setdefault(key, (index, []))[1].append(device)
    arrays = data_callback([(index, tuple(devices)) for index, devices in placements.values()])
    return jax.make_array_from_single_device_arrays(tuple(global_shape), sharding, arrays)


def _device_put_sharded(shards, devices):
    """Stack one tree per device, as jax.pmap takes them."""
    mesh = jax.sharding.Mesh(list(devices), ("devices",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("devices"))

    def stack(*pieces):
        arrays = [
            jax.device_put(jax.numpy.asarray(piece)[None], device)
            for piece, device in zip(pieces, devices)
        ]
        shape = (len(arrays), *arrays[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    return jax.tree.map(stack, *shards)


def _device_put_replicated(x, devices):
    """Stack a tree once for each device, as jax.pmap takes it."""
    return _device_put_sharded([x] * len(devices), devices)


def _call_host(callback_func, arg, *, result_shape=None):
    """Call a Python function on the host, for its result or for its effect."""
    if result_shape is None:
        return jax.debug.callback(callback_func, arg)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), result_shape)
    return jax.experimental.io_callback(callback_func, shapes, arg)


def _async_deserialize(sharding, *args, **kwargs):
    """Read an array on a sharding, or on a mesh and axes."""
    if isinstance(sharding, jax.sharding.Mesh):
        axes, *args = args
        sharding = jax.sharding.NamedSharding(sharding, axes)
    return jax.experimental.array_serialization.serialization.async_deserialize(
        sharding, *args, **kwargs
    )


def _run_deserialization(shardings, *args, **kwargs):
    """Read arrays on shardings, or on meshes and axes."""
    if all(isinstance(each, jax.sharding.Mesh) for each in shardings):
        axes, *args = args
        shardings = [*map(jax.sharding.NamedSharding, shardings, axes)]
    return jax.experimental.array_serialization.serialization.run_deserialization(
        shardings, *args, **kwargs
    )


def _get_metadata(arr):
    """Return the zarr metadata of an array, with its dtype."""
    spec = jax.experimental.array_serialization.serialization.get_tensorstore_spec(
        "/array", arr=arr
    )
    dtype = jax.numpy.dtype(arr.dtype)
    return {**spec["metadata"], "dtype": dtype.name if dtype.kind == "V" else dtype.str}


def _spec_has_metadata(spec):
    """Return True if a TensorStore spec, or one inside it, has metadata."""
    return "metadata" in spec or any(
        isinstance(part, dict) and _spec_has_metadata(part) for part in spec.values()
    )


def _id_tap(tap_func, arg, *, result=None, **kwargs):
    """Call a Python function on the host, and return the value."""
    jax.debug.callback(lambda value: tap_func(value, (), **kwargs), arg)
    return arg if result is None else result
