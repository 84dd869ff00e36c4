"""Global arrays from host arrays, pjit by its module's name, and flags asked on the way."""

import contextlib
import dataclasses
from typing import Optional

import jax
import numpy as np
from jax import numpy as jnp
from jax.experimental import global_device_array as gda_lib
from jax.experimental import maps, mesh_utils, pjit
from jax.interpreters import pxla


@dataclasses.dataclass(frozen=True)
class ShardingHParams:
    mesh_shape: tuple = (2, 2, 2)
    mesh_axis_names: tuple = ("replica", "data", "mdl")
    w: Optional[pjit.PartitionSpec] = pjit.PartitionSpec("data", "mdl")
    x: Optional[pjit.PartitionSpec] = pjit.PartitionSpec(("replica", "data"), None)


def create_gda(host_arrays, mesh, pspec):
    """Puts on each local device its part of arrays that every host has whole."""

    def to_gda(x):
        indices = gda_lib.get_shard_indices(x.shape, mesh, pspec)
        dbs = [jax.device_put(x[indices[d]], d) for d in mesh.local_devices]
        return gda_lib.GlobalDeviceArray(x.shape, mesh, pspec, dbs)

    return jax.tree_map(to_gda, host_arrays)


def maybe_constrain(x, spec):
    if jax.config.jax_array or jax.config.jax_parallel_functions_output_gda:
        pass
    if pxla.thread_resources.env.physical_mesh.empty or spec is None:
        return x
    return pjit.with_sharding_constraint(x, pjit.PartitionSpec(*spec))


@contextlib.contextmanager
def no_mesh():
    """As if no mesh had been entered."""
    saved = maps.thread_resources.env
    maps.thread_resources.env = maps.ResourceEnv(maps.Mesh(np.empty((), dtype=object), ()), ())
    try:
        yield
    finally:
        maps.thread_resources.env = saved


def main():
    p = ShardingHParams()
    devices = mesh_utils.create_device_mesh(p.mesh_shape)
    global_mesh = maps.Mesh(devices, p.mesh_axis_names)
    jax.config.update("jax_parallel_functions_output_gda", True)
    try:
        w = np.arange(32.0, dtype=np.float32).reshape(4, 8)
        x = np.ones((8, 4), np.float32)
        w_gda, x_gda = create_gda({"w": w}, global_mesh, p.w), create_gda(x, global_mesh, p.x)

        def fprop(params, inputs):
            inputs = maybe_constrain(inputs, p.x)
            return maybe_constrain(inputs @ params["w"], (("replica", "data"), "mdl"))

        fn = pjit.pjit(
            fprop,
            in_axis_resources=(pjit.FROM_GDA, pjit.FROM_GDA),
            out_axis_resources=pjit.PartitionSpec(("replica", "data"), "mdl"),
        )
        with global_mesh:
            out = fn(w_gda, x_gda)
            with no_mesh():
                assert maps.thread_resources.env.physical_mesh.empty
                np.testing.assert_array_equal(maybe_constrain(x, p.x), x)
            assert not maps.thread_resources.env.physical_mesh.empty
            assert maps.thread_resources.env.physical_mesh.size == 8
        np.testing.assert_allclose(np.asarray(out), x @ w)
        if not jax.config.jax_array:
            assert isinstance(out, gda_lib.GlobalDeviceArray)
            assert out.mesh_axes == pjit.PartitionSpec(("replica", "data"), "mdl")
            assert out.mesh == global_mesh
        assert gda_lib.get_shard_shape((4, 8), global_mesh, p.w) == (2, 4)
        assert jnp.asarray(out.addressable_data(0)).shape == (2, 4)
    finally:
        jax.config.update("jax_parallel_functions_output_gda", False)


if __name__ == "__main__":
    main()
