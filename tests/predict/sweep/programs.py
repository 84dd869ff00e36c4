"""Targets of the sweep tests."""

import jax
import jax.numpy as jnp

from xlashard import NamedSharding, P, pjit


def gram(mesh):
    """Return a product with at least 4 rows and columns in each part: it can't be split into 8."""
    cut = NamedSharding(mesh, P("data", "model"))
    x = jax.ShapeDtypeStruct((2048, 1028), jnp.bfloat16, sharding=cut)
    return pjit(lambda x: x @ x.T, out_shardings=NamedSharding(mesh, P("data", "model"))), (x,)


def huge(mesh):
    """Return a program of 256 GiB, sharded over `model` only."""
    rows = NamedSharding(mesh, P("model"))
    x = jax.ShapeDtypeStruct((2**18, 2**19), jnp.bfloat16, sharding=rows)
    return pjit(lambda x: x + 1, donate_argnums=0), (x,)


def nothing(mesh):
    return "no program"


def unplaced_step(mesh):
    """Return a step of gradient descent whose arguments have no shardings."""
    w = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    x = jax.ShapeDtypeStruct((8192, 512), jnp.float32)
    loss = jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w)))
    return jax.jit(lambda w, x: w - 0.1 * loss(w, x), donate_argnums=0), (w, x)
