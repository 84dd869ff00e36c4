"""Helper functions that `migrate` inserts into programs, as they are written here."""

# pyright: reportAttributeAccessIssue=false, reportOptionalIterable=false

import jax


def _none_is_replicated(specs):
    """Write P() for None, which meant replicated to pjit."""
    return jax.tree.map(
        lambda spec: jax.P() if spec is None else spec, specs, is_leaf=lambda x: x is None
    )


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
