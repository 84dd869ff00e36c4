"""Functions that tests of `xlashard preflight` compile."""

import jax
import jax.numpy as jnp

from xlashard import NamedSharding, P, pjit
from xlashard.preflights import Workload


def product(mesh):
    x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
    gram = pjit(lambda x: x @ x.T, out_shardings=NamedSharding(mesh, P("data")))
    return gram, (x,), Workload(tokens=64, model_flops=1e9, parameters=8, active_parameters=8)


def jitted_product(mesh):
    """Return `product` as a function of `jax.jit`, whose shardings are JAX's."""
    rows = jax.NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=rows)
    return jax.jit(lambda x: x @ x.T, out_shardings=rows), (x,), product(mesh)[2]


def by_name(topology):
    mesh = topology.mesh({"x": -1})
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    return lambda w: w + 1, {"w": w}


def lowered(mesh):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P()))
    return pjit(lambda x: x + 1).lower(x)


def too_large(mesh):
    shape = (1 << 20, 1 << 16)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
    return lambda x: jnp.sin(x) + 1, (x,)


def untraceable(mesh):
    def step(x):
        return x @ jnp.ones((3, 3))

    return step, (jax.ShapeDtypeStruct((64, 64), jnp.float32),)


def fails():
    raise LookupError("no such layer\nand more of it")


def gives_a_number():
    return 3


def gives_a_name(mesh):
    return "step", (mesh,)


def gives_an_array(mesh):
    return jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32)


def takes_more(layers, mesh):
    return None


NOT_CALLABLE = 3


def slow_to_compile(mesh):
    def layers(x):
        for _ in range(400):
            x = jnp.tanh(x @ x)
        return x

    rows = NamedSharding(mesh, P("data"))
    return layers, (jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=rows),)


@jax.jit
def jitted():
    return jnp.arange(8) * 2


@jax.jit
def doubled(x):
    return x * 2
