"""Functions that ask the mesh for its axes, wrap each other, and talk to the host."""

import functools
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import PartitionSpec as P
from jax.experimental import host_callback as hcb
from jax.experimental import maps
from jax.experimental.global_device_array import GlobalDeviceArray
from jax.experimental.maps import thread_resources
from jax.experimental.pjit import FROM_GDA, pjit, with_sharding_constraint

seen = []


def head_print(*args, **kwargs):
    if jax.process_index() == 0:
        print(*args, **kwargs)


def mp_size():
    return thread_resources.env.shape["mp"]


def maybe_shard(x, spec):
    env = maps.thread_resources.env
    if env.physical_mesh.empty or not set(filter(None, spec)) <= set(env.physical_mesh.axis_names):
        return x
    return with_sharding_constraint(x, spec)


def stacked(spec, layers):
    """The spec of parameters of which there is one per layer."""
    assert isinstance(spec, tuple)
    return P(*((None,) + spec)) if layers else spec


def attend(w, x):
    heads = jnp.einsum("be,ehd->bhd", x, w.reshape(x.shape[-1], mp_size(), -1))
    return maybe_shard(heads, P("dp", "mp", None)).reshape(x.shape[0], -1)


def network(params, x):
    def layer(h, w):
        return maybe_shard(jnp.tanh(attend(w, h)), P("dp")), None

    return jax.lax.scan(jax.checkpoint(layer), x, params)[0]


def main():
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = maps.mesh(devices, ("dp", "mp"))
    spec = P(None, "mp")
    params_spec = stacked(spec, layers=3)
    assert params_spec == (None, None, "mp") and params_spec[1:] == (None, "mp")
    unpickled = pickle.loads(pickle.dumps((FROM_GDA, params_spec)))

    rng = np.random.RandomState(0)
    params = (rng.normal(size=(3, 8, 8)) / 3).astype(np.float32)
    x = rng.normal(size=(4, 8)).astype(np.float32)

    def loss(params, x):
        inner = pjit(network, in_axis_resources=(params_spec, P("dp")), out_axis_resources=P("dp"))
        value = jnp.mean(inner(params, x) ** 2)
        hcb.id_tap(lambda v, transforms: seen.append(float(v)), value)
        return value

    jax.config.update("jax_parallel_functions_output_gda", True)
    try:
        with mesh:
            assert mp_size() == 4
            place = partial(pjit, lambda v: v, None)
            w, b = place(params_spec)(params), place(P("dp"))(x)
            step = pjit(
                jax.value_and_grad(loss),
                in_axis_resources=(unpickled[0], FROM_GDA)
                if isinstance(w, GlobalDeviceArray)
                else (params_spec, P("dp")),
                out_axis_resources=(None, unpickled[1]),
            )
            shapes = jax.eval_shape(step, w, b)
            value, grads = step(w, b)
            # The second time nothing is compiled, and the mesh is an equal one.
        with maps.Mesh(devices.copy(), ("dp", "mp")):
            again, _ = step(w, b)
        assert (shapes[0].shape, shapes[1].shape) == ((), params.shape)
        if not jax.config.jax_array:
            assert isinstance(grads, GlobalDeviceArray) and grads.mesh_axes == params_spec
    finally:
        jax.config.update("jax_parallel_functions_output_gda", False)

    def plain(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    expected, expected_grads = jax.value_and_grad(plain)(params, x)
    hcb.barrier_wait()
    np.testing.assert_allclose(float(value), expected, rtol=1e-5)
    np.testing.assert_allclose(float(again), expected, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(grads), expected_grads, rtol=1e-4, atol=1e-6)
    assert len(seen) >= 2 and abs(seen[0] - float(expected)) < 1e-5

    def doubled(v):
        return hcb.call(lambda a: np.asarray(a) * 2, v, result_shape=v)

    np.testing.assert_array_equal(jax.jit(doubled)(jnp.arange(3)), [0, 2, 4])

    @maps.Mesh(devices, ("dp", "mp"))
    def in_mesh():
        return functools.reduce(lambda a, b: a * b, thread_resources.env.shape.values())

    head_print("devices", in_mesh())
    assert in_mesh() == 8


if __name__ == "__main__":
    main()
