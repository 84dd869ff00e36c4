"""A program of 2022 that uses JAX's internals; `test_pjit_pods.py` runs it unchanged."""

from functools import partial

import jax
import numpy as np
from jax.config import config
from jax.experimental import PartitionSpec, maps, mesh_utils
from jax.experimental import pjit as pjit_lib
from jax.experimental.global_device_array import GlobalDeviceArray
from jax.experimental.maps import Mesh, ResourceEnv, thread_resources
from jax.experimental.pjit import PartitionSpec as P
from jax.experimental.pjit import pjit
from jax.experimental.pjit import with_sharding_constraint as constrain_on_mesh
from jax.interpreters import pxla


def global_mesh_defined():
    env = jax.experimental.maps.thread_resources.env
    return env.physical_mesh.devices.shape != ()


def constrain(x, axes):
    return constrain_on_mesh(x, axes) if global_mesh_defined() else x


def layer(params, x):
    return constrain(x @ params["w"], P("data", None))


values = np.arange(32, dtype=np.float32).reshape(8, 4)
mesh = Mesh(mesh_utils.create_device_mesh((4, 2)), ("data", "mp"))
assert not global_mesh_defined()
spec = PartitionSpec(*(P("data") + P("mp")))
assert isinstance(spec, tuple)
assert spec == ("data", "mp")

with mesh:
    assert not pxla.thread_resources.env.physical_mesh.empty
    assert thread_resources.env.shape["mp"] == 2
    apply = pjit(
        layer, in_axis_resources=({"w": P(None, "mp")}, P("data")), out_axis_resources=spec
    )
    compiled = apply.lower({"w": np.ones((4, 8), np.float32)}, values).compile()
    ins, outs = pjit_lib._get_pspec_from_executable(compiled.runtime_executable(), mesh)
    assert ins == (P(None, ("mp",)), P(("data",)))
    assert outs == (P(("data",), ("mp",)),)
thread_resources.env = ResourceEnv(Mesh(np.empty((), dtype=object), ()), ())

parsed, _, _, _ = pjit_lib._prepare_axis_resources(spec, "axis_resources")
aval = jax.ShapedArray(values.shape, np.dtype(np.float32))
mapping = pjit_lib.get_array_mapping(parsed)
placed = pxla.mesh_sharding_specs(mesh.shape, mesh.axis_names)(aval, mapping)
indices = pxla.spec_to_indices(values.shape, placed)
buffers = [jax.device_put(values[i], d) for i, d in zip(indices, mesh.devices.flat, strict=True)]
array = pxla.make_sharded_device_array(aval, placed, buffers, indices)
assert isinstance(array, jax.pxla.ShardedDeviceArray)
assert np.array_equal(np.asarray(array), values)

config.update("jax_array", False)
config.update("jax_parallel_functions_output_gda", True)
gda = GlobalDeviceArray.from_callback(
    global_shape=(8, 4), global_mesh=mesh, mesh_axes=spec, data_callback=lambda i: values[i]
)
before = maps._positional_semantics.val
maps._positional_semantics.val = maps._PositionalSemantics.GLOBAL
with Mesh(mesh.devices, mesh.axis_names):
    double = pjit(lambda x: x * 2, pjit_lib.FROM_GDA, P("data"))
    doubled = double(gda)
    auto = pjit(lambda x: x * 2, pjit_lib.AUTO, pjit_lib.AUTO).lower(aval, _global_avals=True)
    assert auto.compile().input_shardings
maps._positional_semantics.val = before
assert isinstance(doubled, GlobalDeviceArray)
assert doubled.mesh_axes == ("data",)
assert np.array_equal(doubled._value, values * 2)


@Mesh(mesh.devices, mesh.axis_names)
@partial(pjit, in_axis_resources=None, out_axis_resources=None)
def increase(x):
    return x + 1


config.update("jax_parallel_functions_output_gda", False)
assert isinstance(increase(values), (jax.xla.DeviceArray, jax.pxla.ShardedDeviceArray))
try:
    maps.xmap(layer, in_axes=["i", ...], out_axes=["i", ...])
except NotImplementedError as error:
    print("reached inside;", error)
