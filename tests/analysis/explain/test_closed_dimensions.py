"""From a constraint back to the sharding of the dimension that it closes, without compiling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
from tests.core.pjit.helpers import make_mesh
from xlashard import NamedSharding, P
from xlashard.analysis.explain.closed_dimensions import find_closed_dimensions

X, Y = 4, 2


@pytest.fixture
def mesh():
    return make_mesh((X, Y), ("x", "y"))


def constrain(value, mesh, *spec):
    return xlashard.with_sharding_constraint(value, NamedSharding(mesh, P(*spec)))


def closings(fun, mesh, **arguments):
    """Return the closed dimensions of a function of arrays, each given as its shape and spec."""
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape, _ in arguments.values()]
    jaxpr = jax.make_jaxpr(fun)(*shapes)
    placed = [(name, NamedSharding(mesh, P(*spec))) for name, (_, spec) in arguments.items()]
    return find_closed_dimensions(jaxpr, placed)


def described(fun, mesh, **arguments):
    return [(c.dims, sorted(c.axes), sorted(c.arguments)) for c in closings(fun, mesh, **arguments)]


CUT = (8, 8), ("x", "y")
WHOLE = (8, 8), ()


@pytest.mark.parametrize(
    "keeps",
    [
        lambda a, b: jnp.tanh(a) * 2 + b,
        lambda a, b: jnp.where(b > 0, a, b),
        lambda a, b: jax.nn.relu(a),
        lambda a, b: jax.jit(jnp.sin)(a),
        lambda a, b: jax.checkpoint(jnp.sin)(a),
        lambda a, b: (a.T * 2).T,
        lambda a, b: jnp.broadcast_to(a, (3, 8, 8)).max(0),
        lambda a, b: b @ a,
        lambda a, b: jnp.einsum("ij,jk->ki", a.T, b).T @ a,
        lambda a, b: jnp.squeeze(a[None], 0),
        lambda a, b: a.astype(jnp.bfloat16),
    ],
)
def test_operations_that_keep_a_dimension_are_followed(keeps, mesh):
    assert described(lambda a, b: constrain(keeps(a, b), mesh, "x"), mesh, a=CUT, b=WHOLE) == [
        ((1,), ["y"], ["a"])
    ]


@pytest.mark.parametrize(
    "mixes",
    [
        lambda a: jnp.cumsum(a, 1),
        lambda a: a.reshape(-1).reshape(8, 8),
        lambda a: a.sum(1, keepdims=True) * jnp.ones((8, 8)),
        lambda a: jnp.sort(a, 1),
        lambda a: a @ jnp.ones((8, 8)),
    ],
)
def test_search_stops_at_operations_that_mix_dimensions(mixes, mesh):
    assert described(lambda a: constrain(mixes(a), mesh, "x"), mesh, a=CUT) == []


def test_earlier_constraint_overrides_the_argument_sharding(mesh):
    def f(a):
        a = constrain(jnp.sin(a), mesh, "y", "x")
        return constrain(a * 2, mesh, "y")

    assert described(f, mesh, a=WHOLE) == [((1,), ["x"], [])]
    # The first one moves the axes of the argument, and keeps all of them.
    assert [c.sharding.spec for c in closings(f, mesh, a=CUT)] == [P("y")]


def test_axes_moved_to_another_dimension_are_not_closed(mesh):
    assert described(lambda a: constrain(a * 2, mesh, None, "x"), mesh, a=((8, 8), ("x",))) == []
    assert described(lambda a: constrain(a * 2, mesh, None, "x"), mesh, a=CUT) == []
    assert described(lambda a: constrain(a * 2, mesh, "y", None), mesh, a=CUT) == []
    assert described(lambda a: constrain(a * 2, mesh), mesh, a=CUT) == [((0, 1), ["x", "y"], ["a"])]


def test_unconstrained_dimensions_are_not_closed(mesh):
    assert described(lambda a: constrain(a * 2, mesh, "x", P.UNCONSTRAINED), mesh, a=CUT) == []


def test_slices_of_scanned_weights_come_from_the_stack(mesh):
    def f(stack, x):
        def layer(x, w):
            return constrain(jnp.tanh(x @ w), mesh, "x"), None

        return jax.lax.scan(layer, x, stack)[0]

    weights = (5, 8, 8), (None, None, "y")
    assert described(f, mesh, stack=weights, x=((8, 8), ("x",))) == [((1,), ["y"], ["stack"])]


def test_both_factors_of_a_batched_product_are_followed(mesh):
    def f(a, b):
        return constrain(jnp.einsum("nij,njk->nik", a, b), mesh)

    batched = (8, 4, 4)
    found = described(f, mesh, a=(batched, ("x",)), b=(batched, (None, None, "y")))
    assert found == [((0, 2), ["x", "y"], ["a", "b"])]


def test_inside_shard_map_values_are_shards(mesh):
    def f(a):
        body = lambda a: constrain(a * 2, mesh)  # noqa: E731
        spec = P("x")
        return jax.shard_map(
            body, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"x"}, check_vma=False
        )(a)

    assert described(f, mesh, a=CUT) == []


def test_gradient_reports_its_constraint_once(mesh):
    def loss(w, x):
        return constrain(jnp.tanh(x @ w), mesh, "x").sum()

    found = closings(jax.grad(loss), mesh, w=((8, 8), (None, "y")), x=((8, 8), ("x",)))
    assert [(c.dims, sorted(c.axes)) for c in found] == [((1,), ["y"])]
    assert found[0].frames[0].function == ""
    assert found[0].frames[0].line in {line for file, line in found[0].lines if file == __file__}
