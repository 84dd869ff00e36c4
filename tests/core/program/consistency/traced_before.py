"""Print the digests of one process's programs, independent of what it has traced before.

With `after` it first traces and transforms all of them, in the other order and for other arguments.
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlashard import Mesh, P, pjit, with_sharding_constraint
from xlashard.core.program.consistency.fingerprint import ProgramFingerprint

MESH = Mesh(np.array(jax.devices()), ("data",))
SHAPE = (8, 16)
WEIGHTS = np.arange(128, dtype=np.float32).reshape(SHAPE)


@jax.jit
def inner(x):
    return jnp.sin(x) * 2


@jax.custom_vjp
def square(x):
    return x * x


square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * g * x,))


def calls(x):
    again = inner(x.astype(jnp.bfloat16)).astype(jnp.float32)
    return jnp.where(x > 0, inner(x), inner(x + 1)) + jnp.where(x > 1, again, 0.0)


def loops(x):
    total, rows = jax.lax.scan(lambda c, row: (inner(c) + row, c.sum()), x[0], x)
    return jax.lax.fori_loop(0, 3, lambda i, c: inner(c) * i, total), rows


def branches(x):
    return jax.lax.cond(x.sum() > 0, inner, lambda v: jnp.clip(v, 0, 1), x)


def randoms(x):
    keys = jax.random.split(jax.random.key(3))
    return jax.random.normal(keys[0], x.shape) + jax.random.uniform(keys[1], x.shape)


def algebra(x):
    return jnp.linalg.svd(x @ x.T)[1], jnp.linalg.cholesky(x @ x.T + 100 * jnp.eye(len(x)))


def library(x):
    found = {"sorted": jnp.sort(x), "order": jnp.argsort(x), "median": jnp.median(x)}
    return {**found, "soft": jax.nn.softmax(x), "outer": jnp.einsum("ij,kj->ik", x, x)}


def callbacks(x):
    jax.debug.print("{}", x.sum())
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(np.negative, kind, x) + jax.pure_callback(np.abs, kind, x)


def closes_over(x):
    return x + WEIGHTS[: x.shape[0], : x.shape[1]]


def by_hand(x):
    body = jax.shard_map(
        lambda part: jax.lax.psum(inner(part), "data"), mesh=MESH, in_specs=P("data"), out_specs=P()
    )
    return body(x)


def again(x):
    return jax.grad(lambda v: jax.checkpoint(lambda u: inner(square(u)).sum())(v))(x)


def nested(x):
    return pjit(calls)(x) + pjit(lambda v: with_sharding_constraint(inner(v), P("data")))(x)


def named(x):
    y = x * 3
    return {name: y for name in {f"name{number}" for number in range(20)}}


PROGRAMS: list[Callable[..., Any]] = [
    calls,
    loops,
    branches,
    randoms,
    algebra,
    library,
    callbacks,
    closes_over,
    by_hand,
    again,
    nested,
    named,
]


def total(function: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda x: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(function(x)))


def trace_much() -> None:
    """Fill the caches of tracing in another order, under transformations and for other shapes."""
    for function in reversed(PROGRAMS):
        for shape in (SHAPE, (4, 4)):
            with suppress(Exception):  # not every function has each of them
                jax.jit(function).lower(jnp.ones(shape))
            with suppress(Exception):
                jax.jit(jax.vmap(function)).lower(jnp.ones((2, *shape)))
            with suppress(Exception):
                jax.jit(jax.grad(total(function))).lower(jnp.ones(shape))
    inner(jnp.ones(SHAPE))
    jax.jvp(inner, (jnp.ones(SHAPE),), (jnp.ones(SHAPE),))


def digest(function: Callable[..., Any]) -> str:
    """Return the digest of a function's program on all devices."""
    lowered = pjit(function, in_shardings=P("data")).lower(np.ones(SHAPE, np.float32))._program
    return ProgramFingerprint(
        lowered.plan, lowered.body.module, callbacks=lowered.body.callbacks
    ).digest


if __name__ == "__main__":
    with jax.set_mesh(MESH):
        after = sys.argv[1] == "after"
        if after:
            trace_much()
        programs = reversed(PROGRAMS) if after else PROGRAMS
        print(json.dumps({function.__name__: digest(function) for function in programs}))
