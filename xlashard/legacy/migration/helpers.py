"""Functions that a migrated program gets where one expression of today is not enough."""

from collections.abc import Iterable
from textwrap import dedent

_ALL = {
    "_none_is_replicated": """
        def _none_is_replicated(specs):
            \"\"\"Write P() for None, which meant replicated to pjit.\"\"\"
            return jax.tree.map(
                lambda spec: jax.P() if spec is None else spec, specs, is_leaf=lambda x: x is None
            )
        """,
    "_array_from_batched_callback": """
        def _array_from_batched_callback(global_shape, global_mesh, mesh_axes, data_callback):
            \"\"\"Make an array from the pieces that one call of a function returns.\"\"\"
            sharding = jax.sharding.NamedSharding(global_mesh, mesh_axes)
            indices = sharding.addressable_devices_indices_map(tuple(global_shape))
            pieces = data_callback(list(indices.values()))
            arrays = [jax.device_put(piece, device) for device, piece in zip(indices, pieces)]
            return jax.make_array_from_single_device_arrays(tuple(global_shape), sharding, arrays)
        """,
    "_array_from_batched_callback_with_devices": """
        def _array_from_batched_callback_with_devices(
            global_shape, global_mesh, mesh_axes, data_callback
        ):
            \"\"\"Make an array from the pieces that one call returns on their devices.\"\"\"
            sharding = jax.sharding.NamedSharding(global_mesh, mesh_axes)
            wanted = {}
            for device, index in sharding.addressable_devices_indices_map(
                tuple(global_shape)
            ).items():
                key = tuple((each.start, each.stop) for each in index)
                wanted.setdefault(key, (index, []))[1].append(device)
            arrays = data_callback([(index, tuple(devices)) for index, devices in wanted.values()])
            return jax.make_array_from_single_device_arrays(tuple(global_shape), sharding, arrays)
        """,
    "_device_put_sharded": """
        def _device_put_sharded(shards, devices):
            \"\"\"Stack trees whose n-th one goes to the n-th device, as jax.pmap takes them.\"\"\"
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
        """,
    "_device_put_replicated": """
        def _device_put_replicated(x, devices):
            \"\"\"Stack a tree once for each device, as jax.pmap takes it.\"\"\"
            return _device_put_sharded([x] * len(devices), devices)
        """,
    "_call_host": """
        def _call_host(callback_func, arg, *, result_shape=None):
            \"\"\"Call a function of the host on a value, for its result or for its effect.\"\"\"
            if result_shape is None:
                return jax.debug.callback(callback_func, arg)
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), result_shape)
            return jax.experimental.io_callback(callback_func, shapes, arg)
        """,
    "_get_metadata": """
        def _get_metadata(arr):
            \"\"\"Return what zarr stores about an array, with its dtype.\"\"\"
            spec = jax.experimental.array_serialization.serialization.get_tensorstore_spec(
                "/array", arr=arr
            )
            dtype = jax.numpy.dtype(arr.dtype)
            return {**spec["metadata"], "dtype": dtype.name if dtype.kind == "V" else dtype.str}
        """,
    "_spec_has_metadata": """
        def _spec_has_metadata(spec):
            \"\"\"Return whether a spec of TensorStore, or one inside of it, has metadata.\"\"\"
            return "metadata" in spec or any(
                isinstance(part, dict) and _spec_has_metadata(part) for part in spec.values()
            )
        """,
    "_id_tap": """
        def _id_tap(tap_func, arg, *, result=None, **kwargs):
            \"\"\"Call a function of the host on a value, and return the value.\"\"\"
            jax.debug.callback(lambda value: tap_func(value, (), **kwargs), arg)
            return arg if result is None else result
        """,
}


_CALLS = {"_device_put_replicated": "_device_put_sharded"}
MODULES = {
    "_call_host": "jax.experimental",
    "_get_metadata": "jax.experimental.array_serialization.serialization",
}
"""Modules that a function needs besides `jax`."""


def with_callees(names: Iterable[str]) -> list[str]:
    """Return the names of functions and of those that they call.

    Args:
        names: Those that a program calls.
    """
    found = {*names}
    return sorted(found | {_CALLS[name] for name in found if name in _CALLS})


def source_of(name: str) -> str:
    """Return the source of a function that migrated programs may need.

    Args:
        name: The function's name.
    """
    return dedent(_ALL[name]).strip() + "\n"
