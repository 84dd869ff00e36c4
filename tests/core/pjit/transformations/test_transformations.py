"""pjit under JAX's transformations: the values of plain jax.jit, with the shardings kept."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.pjit.helpers import f32, spec_of
from tests.grouped_cases import sweep
from tests.message_patterns import naming
from xlashard import NamedSharding, P, device_put, pjit
from xlashard.errors import ResourceError


def layer(w, x):
    return jnp.tanh(x @ w) * 2


W, X = f32(4, 8) / 10, f32(8, 4) / 10


def sharded(mesh, fun=layer):
    """Return the function with every argument and result sharded."""
    named = functools.partial(NamedSharding, mesh)
    return pjit(
        fun,
        in_shardings=(named(P(None, "y")), named(P("x", None))),
        out_shardings=named(P("x", "y")),
    )


def assert_same(got, wanted):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), got, wanted)


def loss(f):
    return lambda w, x: (f(w, x) ** 2).sum()


TRANSFORMED = {
    "grad": lambda f: jax.grad(loss(f)),
    "grad of both": lambda f: jax.grad(loss(f), argnums=(0, 1)),
    "value_and_grad": lambda f: jax.value_and_grad(loss(f)),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w * 2, x * 3)),
    "jvp of one": lambda f: lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (w * 2,)),
    "vjp": lambda f: lambda w, x: jax.vjp(f, w, x)[1](f32(8, 8)),
    "linearize": lambda f: lambda w, x: jax.linearize(f, w, x)[1](w * 2, x * 3),
    "hessian": lambda f: jax.hessian(loss(f)),
    "jacrev": lambda f: jax.jacrev(f),
    "jacfwd": lambda f: jax.jacfwd(f, argnums=1),
    "vmap": lambda f: lambda w, x: jax.vmap(f)(jnp.stack([w, w + 1]), jnp.stack([x, x + 1])),
    "vmap of one": lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, jnp.stack([x, x + 1])),
    "vmap to a later axis": lambda f: (
        lambda w, x: jax.vmap(f, (None, 1), 2)(w, jnp.stack([x, x + 1], 1))
    ),
    "vmap of grad": lambda f: (
        lambda w, x: jax.vmap(jax.grad(loss(f)), (0, None))(jnp.stack([w, w + 1]), x)
    ),
    "grad of vmap": lambda f: jax.grad(
        lambda w, x: jax.vmap(loss(f), (None, 0))(w, jnp.stack([x, x + 1])).sum()
    ),
    "scan": lambda f: (
        lambda w, x: jax.lax.scan(lambda c, _: (f(w, c)[:, :4], c.sum()), x, length=3)
    ),
    "grad of scan": lambda f: jax.grad(
        lambda w, x: jax.lax.scan(lambda c, _: (f(w, c)[:, :4], None), x, length=3)[0].sum()
    ),
    "while": lambda f: lambda w, x: jax.lax.fori_loop(0, 3, lambda i, c: f(w, c)[:, :4] + i, x),
    "cond": lambda f: lambda w, x: jax.lax.cond(x.sum() > 0, f, lambda w, x: x @ w, w, x),
    "remat": lambda f: jax.grad(loss(jax.checkpoint(f))),
    "remat with a policy": lambda f: jax.grad(
        loss(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable))
    ),
    "twice": lambda f: lambda w, x: f(w, f(w, x)[:, :4]),
}


@pytest.mark.slow
@pytest.mark.parametrize("outside", ["nothing", "jax.jit", "pjit"])
@pytest.mark.parametrize("how", sweep(TRANSFORMED, quick=["grad", "jvp", "vmap", "scan", "cond"]))
def test_transformed_values_equal_jax(mesh, how, outside):
    transformed = TRANSFORMED[how](sharded(mesh))
    around = {"nothing": lambda f: f, "jax.jit": jax.jit, "pjit": pjit}[outside]
    assert_same(around(transformed)(W, X), TRANSFORMED[how](layer)(W, X))


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", sweep(["grad of both", "jvp", "vmap", "grad of scan", "remat"], quick=["jvp", "vmap"])
)
def test_transformed_values_equal_jax_under_each_partitioner(mesh, how, partitioner):
    assert_same(TRANSFORMED[how](sharded(mesh))(W, X), TRANSFORMED[how](layer)(W, X))
    assert_same(jax.jit(TRANSFORMED[how](sharded(mesh)))(W, X), TRANSFORMED[how](layer)(W, X))


def placed(mesh, array, spec):
    return jax.device_put(array, NamedSharding(mesh, spec).jax_sharding(()))


@pytest.mark.devices(8)
@pytest.mark.slow
def test_gradients_stay_on_the_devices_of_committed_arguments(mesh):
    f = pjit(layer)
    w, x = placed(mesh, W, P(None, "y")), placed(mesh, X, P("x"))
    dw, dx = jax.grad(loss(f), argnums=(0, 1))(w, x)
    assert_same((dw, dx), jax.grad(loss(layer), argnums=(0, 1))(W, X))
    assert len(dw.devices()) == len(dx.devices()) == 8


@pytest.mark.slow
def test_gradients_have_the_shardings_of_their_arguments(mesh):
    dw, dx = jax.grad(loss(sharded(mesh)), argnums=(0, 1))(W, X)
    assert spec_of(dw) == (None, "y")
    assert spec_of(dx) == ("x",)


@pytest.mark.slow
def test_specs_and_the_mesh_in_force(mesh):
    f = pjit(layer, in_shardings=(P(None, "y"), P("x")), out_shardings=P("x", "y"))
    with mesh:
        dw = jax.grad(loss(f))(W, X)
    assert spec_of(dw) == (None, "y")
    assert_same(dw, jax.grad(loss(layer))(W, X))


def test_unused_results_and_their_arguments_are_dropped(mesh):
    f = pjit(lambda x, y: (jnp.sin(x), jnp.cos(y)), in_shardings=NamedSharding(mesh, P("x")))
    text = jax.jit(lambda x, y: f(x, y)[0]).lower(f32(8), f32(8)).as_text()
    assert "stablehlo.sine" in text and "stablehlo.cosine" not in text


def test_a_gradient_taken_twice_compiles_once(mesh, compilations):
    g = jax.grad(loss(sharded(mesh, lambda w, x: jnp.cos(x @ w))))
    g(W, X)
    before = compilations.count
    assert before > 0
    g(W + 1, X)
    assert compilations.count == before


@pytest.mark.slow
def test_closed_over_tracers(mesh):
    named = NamedSharding(mesh, P("x"))

    def outer(x, y):
        f = pjit(lambda x: x * y, in_shardings=named)
        return f(x).sum()

    np.testing.assert_allclose(jax.grad(outer, 1)(f32(8), 2.0), f32(8).sum())
    np.testing.assert_allclose(jax.jit(outer)(f32(8), 2.0), 2 * f32(8).sum())
    np.testing.assert_allclose(jax.vmap(outer, (None, 0))(f32(8), f32(3)), f32(3) * f32(8).sum())


@pytest.mark.devices(8)
def test_wrong_sharding_is_refused_inside_a_trace(mesh):
    f = sharded(mesh)
    with pytest.raises(ResourceError, match=r"in_shardings of x \(float32\[7,4\]\).*dimension 0"):
        jax.grad(loss(f))(W, f32(7, 4))
    with pytest.raises(ResourceError, match=r"in_shardings of x \(float32\[7,4\]\).*dimension 0"):
        jax.jit(f)(W, f32(7, 4))


PLACED = {
    "call": lambda f, x: f(x),
    "grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,))[0],
    "linearize": lambda f, x: jax.linearize(f, x)[0],
    "checkpoint": lambda f, x: jax.vjp(jax.checkpoint(f), x)[0],
    "vmap": lambda f, x: jax.vmap(f, in_axes=1)(x),
    "vmap grad": lambda f, x: jax.vmap(jax.grad(lambda x: f(x).sum()), in_axes=1)(x),
    "evaluated": lambda f, x: jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(f)(x))(x),
}


@pytest.mark.devices(8)
@pytest.mark.parametrize("how", sweep(PLACED, quick=["call", "grad", "vmap"]))
def test_committed_argument_of_another_sharding_is_refused(mesh, how):
    """A transformed call refuses what a direct one does, and accepts what it accepts."""
    rows, columns = (NamedSharding(mesh, spec) for spec in (P("x"), P(None, "x")))
    f = pjit(lambda v: v * 2, in_shardings=rows)
    with pytest.raises(ResourceError, match=naming("in_shardings puts v ", "committed")):
        PLACED[how](f, device_put(f32(8, 8), columns))
    PLACED[how](f, device_put(f32(8, 8), rows))
    PLACED[how](f, f32(8, 8))


@pytest.mark.slow
def test_committed_arguments_of_inlined_calls_are_moved(mesh):
    rows, columns = (NamedSharding(mesh, spec) for spec in (P("x"), P(None, "x")))
    inner = pjit(lambda v: v * 2, in_shardings=rows, inline=True)
    outer, x = pjit(lambda x: inner(x).sum()), device_put(f32(8, 8), columns)
    assert_same(outer(x), (f32(8, 8) * 2).sum())
    assert_same(jax.grad(outer)(x), np.full((8, 8), 2))


@pytest.mark.slow
def test_less_common_uses(mesh):
    named = NamedSharding(mesh, P("x"))
    double = pjit(lambda x: x * 2, in_shardings=named)
    x = f32(8)
    assert_same(jax.linear_transpose(double, x)(x), (x * 2,))
    assert_same(jax.lax.map(pjit(jnp.sin), x), jnp.sin(x))
    assert_same(jax.lax.associative_scan(pjit(jnp.add), x), np.cumsum(x))
    root = jax.lax.custom_root(
        pjit(lambda v: v**2 - 2.0),
        1.0,
        lambda f, v: jax.lax.fori_loop(0, 20, lambda _, v: v - f(v) / (2 * v), v),
        lambda g, y: y / g(1.0),
    )
    assert_same(root, np.sqrt(2))
    total = pjit(lambda v: jax.lax.psum(v, "batch"))
    assert_same(jax.vmap(total, axis_name="batch")(x), np.full(8, x.sum()))
    whole, tangent = jax.jvp(pjit(lambda v: (v * 2, 3)), (x,), (x,))[1]
    assert_same(whole, x * 2)
    assert tangent.dtype == jax.dtypes.float0
    outer = jax.jit(double, donate_argnums=0)
    given = jnp.asarray(x)
    assert_same(outer(given), x * 2)
    local = jax.shard_map(pjit(jnp.sin), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    assert_same(jax.jit(local)(x), jnp.sin(x))


@pytest.mark.slow
def test_values_and_types_of_results(mesh):
    f = pjit(lambda x: x * 2, out_shardings=NamedSharding(mesh, P()))
    out, tangent = jax.jvp(f, (2.0,), (1.0,))
    assert out.weak_type and float(out) == 4.0 and float(tangent) == 2.0
