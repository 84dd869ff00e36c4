"""Derivatives of pjit-ed functions: residuals from forward to backward pass, and custom rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from tests.core.pjit.helpers import f32, spec_of
from tests.grouped_cases import sweep
from xlashard import NamedSharding, P, pjit

W, X = f32(4, 4) / 10, f32(8, 4) / 10


@pytest.fixture
def rows(mesh):
    return NamedSharding(mesh, P("x"))


def placed(x, sharding):
    return jax.device_put(x, sharding.jax_sharding(x.shape))


def where(x):
    """Return the addresses of an array's buffers."""
    return [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]


def arrays(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def same(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)


@pytest.mark.devices(8)
@pytest.mark.slow
@pytest.mark.parametrize("pinned", [False, True], ids=["free", "placed"])
def test_residuals_stay_sharded_without_copies(mesh, rows, pinned, partitioner):
    whole = NamedSharding(mesh, P())
    kwargs = {"in_shardings": (whole, rows), "out_shardings": rows} if pinned else {}
    f = pjit(lambda w, x: jnp.exp(jnp.tanh(x @ w)), **kwargs)
    w, x = placed(W, whole), placed(X, rows)
    y, pull = jax.vjp(f, w, x)
    residuals = {tuple(where(r)): r for r in arrays(pull)}
    # Both arguments, the result, and one more value: nothing is stored twice.
    assert len(residuals) == len(arrays(pull)) == 4
    assert {tuple(where(v)) for v in (w, x, y)} < set(residuals)
    for residual in residuals.values():
        assert len(residual.devices()) == 8
        assert spec_of(residual) == (() if residual.shape == W.shape else ("x",))
    same(pull(y), jax.vjp(f.__wrapped__, W, X)[1](np.asarray(y)))


@pytest.mark.devices(8)
@pytest.mark.slow
def test_host_arguments_are_moved_once(rows):
    f = pjit(lambda x: jnp.sin(x) * x, in_shardings=rows)
    _, pull = jax.vjp(f, X)
    assert all(spec_of(residual) == ("x",) for residual in arrays(pull))
    same(pull(X), jax.vjp(f.__wrapped__, X)[1](X))


def test_residuals_are_not_resharded_between_forward_and_backward(mesh, compilations):
    cols = NamedSharding(mesh, P(None, "x"))
    f = pjit(lambda x: jnp.sin(jnp.cos(x)), in_shardings=cols, out_shardings=cols)
    y, pull = jax.vjp(f, placed(f32(4, 8), cols))
    with jax.transfer_guard("disallow"):
        (ct,) = pull(y)
    assert spec_of(ct) == (None, "x")
    assert len(compilations.made) == 2
    for program in compilations.made:
        (module,) = program.hlo_modules()
        assert "all-" not in module.to_string()
        assert "collective-permute" not in module.to_string()


@pytest.mark.slow
def test_vjp_of_forwarded_and_repeated_results(rows):
    def fun(x, w):
        y = jnp.tanh(x)
        return x, y, y, w, 3.0

    for kwargs in ({}, {"in_shardings": rows}, {"out_shardings": (rows, rows, None, None, None)}):
        f = pjit(fun, **kwargs)
        for x in (X, placed(X, rows)):
            primals, pull = jax.vjp(f, x, X)
            wanted, pull_wanted = jax.vjp(fun, X, X)
            same(primals, wanted)
            assert all(isinstance(p, jax.Array) for p in primals)
            same(pull(wanted), pull_wanted(wanted))


@pytest.mark.slow
def test_integer_arguments_and_results(rows):
    f = pjit(lambda x, n: (x * n, n + 1), in_shardings=rows, out_shardings=rows)
    x, n = f32(8), np.arange(8)
    no_tangent = np.zeros(8, jax.dtypes.float0)
    (dx, dn) = jax.vjp(f, x, n)[1]((x, no_tangent))
    same(dx, x * n)
    assert dn.dtype == jax.dtypes.float0
    primals, tangents = jax.jvp(f, (x, n), (x, no_tangent))
    same(primals, (x * n, n + 1))
    same(tangents[0], x * n)
    assert tangents[1].dtype == jax.dtypes.float0


def test_linear_functions(mesh, rows):
    f = pjit(lambda w, x: (x @ w, 2 * x), in_shardings=(None, rows), out_shardings=rows)
    (ct,) = jax.linear_transpose(lambda x: f(W, x), X)((X, X))
    same(ct, X @ W.T + 2 * X)
    assert spec_of(ct) == ("x",)


@pytest.mark.slow
def test_higher_derivatives(rows):
    f = pjit(lambda x: jnp.sin(x) * x, in_shardings=rows, out_shardings=rows)
    plain = f.__wrapped__
    for derive in (
        lambda f: jax.grad(lambda x: (jax.grad(lambda x: f(x).sum())(x) ** 2).sum()),
        lambda f: jax.hessian(lambda x: f(x).sum()),
        lambda f: jax.jacrev(jax.jacfwd(f)),
    ):
        same(derive(f)(f32(4)), derive(plain)(f32(4)))


def custom_functions():
    @jax.custom_jvp
    def by_jvp(x):
        return x**2

    by_jvp.defjvp(lambda p, t: (p[0] ** 2, 7 * t[0]))

    @jax.custom_vjp
    def by_vjp(x):
        return jnp.sin(x)

    by_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (3 * x * ct,), optimize_remat=True)

    @jax.custom_vjp
    def with_zeros(x):
        return x * 2

    def forward(x):
        return x.value * 2, x.perturbed

    with_zeros.defvjp(forward, lambda _, ct: (ct * 5,), symbolic_zeros=True)

    def power(n, x):
        return x**n

    with_number = jax.custom_vjp(power, nondiff_argnums=(0,))
    with_number.defvjp(lambda n, x: (x**n, x), lambda n, x, ct: (n * ct,))
    clipped = jax.custom_gradient(lambda x: (x**2, lambda ct: jnp.clip(ct, -1, 1)))
    return [by_jvp, by_vjp, with_zeros, lambda x: with_number(3, x), clipped]


@pytest.mark.slow
@pytest.mark.parametrize("which", sweep(range(5), quick=[0, 1]))
def test_custom_rules_work_inside_pjit(rows, which):
    fun, x = custom_functions()[which], f32(2, 8)
    f = pjit(fun, in_shardings=rows, out_shardings=rows)
    for derive in (
        lambda f: jax.vmap(jax.grad(lambda x: f(x).sum())),
        lambda f: jax.grad(lambda x: jax.vmap(jax.checkpoint(f))(x).sum()),
    ):
        wanted = derive(fun)(x)
        same(derive(f)(x), wanted)
        same(pjit(derive(f))(x), wanted)


@pytest.mark.slow
def test_pjit_works_inside_custom_rules(rows):
    sine = pjit(jnp.sin, in_shardings=rows)
    f = jax.custom_vjp(sine)
    f.defvjp(lambda x: (sine(x), x), lambda x, ct: (pjit(jnp.multiply)(ct, 2 * x),))
    same(jax.grad(lambda x: pjit(f)(x).sum())(f32(8)), 2 * f32(8))

    @jax.custom_batching.custom_vmap
    def g(x):
        return sine(x)

    g.def_vmap(lambda size, batched, x: (x * size, True))
    same(jax.vmap(pjit(g))(f32(3, 8)), 3 * f32(3, 8))

    def closes_over(w, x):
        converted, values = jax.closure_convert(lambda y: sine(w * y), x)
        return converted(x, *values).sum()

    same(jax.jit(jax.grad(closes_over))(2.0, f32(8)), (np.cos(2 * f32(8)) * f32(8)).sum())


@pytest.mark.devices(8)
@pytest.mark.slow
def test_checkify(rows):
    def log(x):
        checkify.check(jnp.all(x > 0), "not above zero: {}", x.min())
        return jnp.log(x)

    checked = checkify.checkify(pjit(log, in_shardings=rows, out_shardings=rows))
    for f in (checked, jax.jit(checked)):
        error, out = f(f32(8) + 1)
        error.throw()
        same(out, np.log(f32(8) + 1))
        assert spec_of(out) == ("x",)
        with pytest.raises(checkify.JaxRuntimeError, match=r"not above zero: 0\.0"):
            f(f32(8))[0].throw()
