"""Meshes whose axes are explicit: shardings are part of types, and pjit and constraints agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.facts import naming
from tests.pjit.helpers import f32
from xlashard import NamedSharding, P, pjit, with_sharding_constraint
from xlashard.errors import ResourceError

X = f32(8, 4)


@pytest.fixture
def explicit():
    return jax.make_mesh((4, 2), ("x", "y"))


@pytest.fixture
def mixed():
    """`x` is explicit, `y` is left to the partitioner."""
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))


def put(x, mesh, *spec):
    return jax.device_put(x, jax.NamedSharding(mesh, P(*spec)))


HOW = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x])),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
    "remat": lambda f: pjit(jax.grad(lambda x: jax.checkpoint(f)(x).sum())),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_values_and_types(explicit, how, partitioner):
    named = NamedSharding(explicit, P("x", "y"))
    f = pjit(lambda x: jnp.sin(x) * 2, in_shardings=named, out_shardings=named)
    x = put(X, explicit, "x", "y")
    with jax.set_mesh(explicit):
        out, wanted = HOW[how](f)(x), HOW[how](jax.jit(f.__wrapped__))(x)
        np.testing.assert_allclose(out, wanted, rtol=1e-5)
        assert jax.typeof(out) == jax.typeof(wanted)
        assert out.sharding.spec[-2:] == ("x", "y")


def test_inside_shard_map(explicit, partitioner):
    x = put(X, explicit, "x")
    with jax.set_mesh(explicit):
        whole = jax.shard_map(pjit(lambda x: jax.lax.psum(x, "x")), in_specs=P("x"), out_specs=P())
        np.testing.assert_allclose(pjit(whole)(x), X.reshape(4, 2, 4).sum(0), rtol=1e-6)
        part = jax.shard_map(
            pjit(lambda x: x * 2), in_specs=P("x"), out_specs=P("x"), axis_names=frozenset({"x"})
        )
        np.testing.assert_array_equal(pjit(part)(x), X * 2)


def constrained(mesh, *spec):
    return pjit(lambda x: with_sharding_constraint(x * 2, NamedSharding(mesh, P(*spec))))


def test_a_constraint_equal_to_the_type(explicit):
    x = put(X, explicit, "x")
    out = constrained(explicit, "x")(x)
    assert jax.typeof(out) == jax.typeof(x)
    np.testing.assert_array_equal(out, X * 2)


def test_a_constraint_changes_no_type(explicit, mixed):
    for mesh in (explicit, mixed):
        x = put(X, mesh, "x")
        with pytest.raises(
            ResourceError,
            match=r"of x is P\(None, 'x'\).*float32\[8@x,4\].*reshard\(x, P\(None, 'x'\)\)",
        ):
            constrained(mesh, None, "x")(x)
    with pytest.raises(
        ResourceError, match=naming("P()", "float32[8@x,4]", "dimension 0", "('x',)")
    ):
        constrained(explicit)(put(X, explicit, "x"))


def test_a_concrete_array_is_moved(explicit):
    x = put(X, explicit, "x")
    out = with_sharding_constraint(x, NamedSharding(explicit, P(None, "y")))
    assert out.sharding.spec == P(None, "y")


@pytest.mark.slow
@pytest.mark.parametrize("spec", [(None, "y"), (P.UNCONSTRAINED, "y"), ("x", "y")])
def test_automatic_axes_are_constrained_next_to_explicit_ones(mixed, spec):
    x = put(X, mixed, "x")
    with jax.set_mesh(mixed):
        out = constrained(mixed, *spec)(x)
        gradient = jax.grad(lambda x: (constrained(mixed, *spec)(x) ** 2).sum())(x)
    assert out.sharding.spec == P("x", "y")
    np.testing.assert_array_equal(out, X * 2)
    np.testing.assert_allclose(gradient, X * 8)
