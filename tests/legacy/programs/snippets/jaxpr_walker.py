"""Interprets and counts over jaxprs with the names that `jax.core` had."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax import linear_util as lu
from jax.abstract_arrays import ShapedArray
from jax.core import ClosedJaxpr, Jaxpr, Literal, Primitive, Var, jaxpr_as_fun
from jax.experimental import PartitionSpec as P
from jax.experimental.maps import mesh
from jax.experimental.pjit import pjit, with_sharding_constraint


def count(jaxpr: Jaxpr, found: Counter) -> Counter:
    """Counts the primitives of a jaxpr, and of those inside of it."""
    for eqn in jaxpr.eqns:
        found[eqn.primitive.name] += 1
        for value in eqn.params.values():
            if isinstance(value, ClosedJaxpr):
                count(value.jaxpr, found)
            elif isinstance(value, Jaxpr):
                count(value, found)
    return found


def run(jaxpr: Jaxpr, consts, *args):
    """An interpreter that evaluates a jaxpr equation by equation."""
    env = {}

    def read(v):
        return v.val if isinstance(v, Literal) else env[v]

    def write(v, value):
        assert isinstance(v, Var)
        env[v] = value

    jax.tree_map(write, list(jaxpr.constvars), list(consts))
    jax.tree_map(write, list(jaxpr.invars), list(args))
    for eqn in jaxpr.eqns:
        out = eqn.primitive.bind(*map(read, eqn.invars), **eqn.params)
        for v, value in zip(eqn.outvars, out if eqn.primitive.multiple_results else [out]):
            if not isinstance(v, core.DropVar):
                write(v, value)
    return [read(v) for v in jaxpr.outvars]


def main():
    def f(x, y):
        return jnp.sin(x) @ y + 1.0

    x, y = np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)
    closed = jax.make_jaxpr(f)(x, y)
    assert isinstance(closed, ClosedJaxpr)
    assert closed.in_avals[0] == ShapedArray((2, 3), jnp.float32)
    assert jax.ShapedArray is ShapedArray
    np.testing.assert_allclose(jaxpr_as_fun(closed)(x, y)[0], f(x, y), rtol=1e-6)
    np.testing.assert_allclose(run(closed.jaxpr, closed.consts, x, y)[0], f(x, y), rtol=1e-6)
    assert core.get_aval(x).shape == (2, 3)

    with mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")):
        pjitted = pjit(
            lambda v: with_sharding_constraint(jnp.cos(v), P("x")),
            in_axis_resources=P("x", "y"),
            out_axis_resources=None,
        )
        found = count(jax.make_jaxpr(pjitted)(np.ones((8, 2))).jaxpr, Counter())
    assert found["cos"] == 1
    assert found["pjit"] == 1

    half = Primitive("half")
    half.def_impl(lambda v: v / 2)
    half.def_abstract_eval(lambda v: ShapedArray(v.shape, v.dtype))
    assert half.bind(4.0) == 2.0
    wrapped = lu.wrap_init(lambda v: v * 3)
    assert wrapped.call_wrapped(2) == 6


if __name__ == "__main__":
    main()
