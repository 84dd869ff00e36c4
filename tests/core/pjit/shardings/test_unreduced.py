"""Unreduced and reduced axes in programs: as in `jax.jit`, and refused where XLA fails."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, UnreducedKind, reshard

from tests.core.pjit.helpers import f32
from tests.grouped_cases import Together
from tests.message_patterns import naming
from xlashard import NamedSharding, P, device_put, explain, jit, pjit, with_sharding_constraint
from xlashard.errors import ResourceError, UnreducedError

X = f32(8, 4)
U, R = P(None, None, unreduced={"x"}), P(None, None, reduced={"x"})
GSPMD = not jax.config.jax_use_shardy_partitioner


@pytest.fixture
def mesh():
    found = jax.make_mesh((4, 2), ("x", "y"))
    with jax.set_mesh(found):
        yield found


def gram(a):
    return jnp.einsum("ab,ac->bc", a, a, out_sharding=U)


def summed(x):
    return np.asarray(device_put(x, P()))


needs_shardy = pytest.mark.skipif(GSPMD, reason="GSPMD refuses unreduced values")


@pytest.mark.slow
@needs_shardy
def test_unreduced_result_sums_to_the_right_value(mesh):
    x = device_put(X, P("x"))
    out = jit(gram)(x)
    assert out.sharding == NamedSharding(mesh, U)
    assert jax.typeof(out) == jax.typeof(jax.jit(gram)(x))
    with pytest.raises(UnreducedError):
        np.asarray(out)
    assert np.allclose(summed(out), X.T @ X)
    assert np.allclose(np.asarray(reshard(out, P())), X.T @ X)
    assert np.allclose(jit(lambda x: x, out_shardings=P())(out), X.T @ X)
    assert np.allclose(jit(lambda x: reshard(x, P("x")))(out), X.T @ X)


TRANSFORMED = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp of remat": lambda f, x: jax.jvp(jax.checkpoint(f), (x,), (x,)),
    "jvp of jvp": lambda f, x: jax.jvp(lambda x: jax.jvp(f, (x,), (x,))[1], (x,), (x,)),
    "vjp": lambda f, x: jax.vjp(f, x)[0],
    "linearize": lambda f, x: (lambda y, push: (y, push(x)))(*jax.linearize(f, x)),
    "jvp in jit": lambda f, x: jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "jit": lambda f, x: jit(lambda x: f(x))(x),
}


@pytest.mark.slow
@needs_shardy
def test_results_of_bare_transformations_become_partial_results_as_by_jax(mesh):
    def types(jit, run, x, spec, options):
        step = jit(lambda x: x * 2, out_shardings=NamedSharding(mesh, spec), **options)
        results = jax.tree.leaves(run(step, x))
        return [(str(jax.typeof(out)), out.sharding.spec) for out in results], results

    with Together() as together:
        for name, run in TRANSFORMED.items():
            for spec in (P(unreduced={"x"}), P("y", unreduced={"x"}), P("y")):
                # An inlined body has no results of its own where remat runs its equations.
                for inline in (False,) if "remat" in name else (False, True):
                    with together.case(f"{name}, {spec}, {inline}"):
                        case = run, device_put(X, P("x")), spec, {"inline": inline}
                        found, results = types(jit, *case)
                        assert found == types(jax.jit, *case)[0]
                        assert all(np.allclose(summed(out), 2 * X) for out in results)
        with together.case("grad"):
            halves = jit(lambda x: x * 2, out_shardings=P(unreduced={"x"}))
            gradient = jax.grad(lambda x: halves(x).sum())(device_put(X, P("x")))
            assert np.array_equal(gradient, np.full_like(X, 2))


@pytest.mark.slow
@needs_shardy
def test_results_without_reductions_become_partial_results_as_by_jax(mesh):
    with Together() as together:
        for spec in (P(), P("x"), P("y"), P(None, "x"), P("y", "x"), P(("x", "y"))):
            x = device_put(f32(8, 8), spec)
            for target in (U, P("y", unreduced={"x"}), P(unreduced={"x", "y"})):
                with together.case(f"{spec} to {target}"):
                    out, wanted = (j(lambda x: x, out_shardings=target)(x) for j in (jit, jax.jit))
                    assert out.sharding == wanted.sharding
                    # XLA mixes up the parts of a dimension over axes of different sizes.
                    if np.array_equal(summed(wanted), x):
                        assert np.array_equal(list_partials(out), list_partials(wanted))
                    assert np.array_equal(summed(out), x)


def list_partials(x):
    return [np.asarray(shard.data) for shard in x.addressable_shards]


@pytest.mark.slow
@needs_shardy
def test_boundaries_and_repeated_calls(mesh):
    out = jit(gram)(device_put(X, P("x")))
    double = jit(lambda x: x + x, in_shardings=U, out_shardings=U)
    for factor in (2, 4, 8):
        out = double(out)
        assert out.sharding == NamedSharding(mesh, U)
        assert np.allclose(summed(out), factor * (X.T @ X))
    given_up = jit(lambda x: x + x, donate_argnums=0)(out)
    assert out.is_deleted()
    assert np.allclose(summed(given_up), 16 * (X.T @ X))
    made = jit(lambda x: x + 1, out_shardings=U)(device_put(X, P()))
    assert jax.typeof(made).sharding.spec.unreduced == {"x"}
    assert np.allclose(summed(made), X + 1)


@needs_shardy
@pytest.mark.devices(8)
def test_unreduced_max_is_kept_through_programs(mesh):
    spec = P(None, unreduced={"x"}, unreduced_kind=UnreducedKind.max)
    out = jit(lambda x: jax.lax.reduce_max(x, (0,), out_sharding=spec))(device_put(X, P("x")))
    assert out.sharding == NamedSharding(mesh, spec)
    again = jit(lambda x: x)(out)
    assert again.sharding == NamedSharding(mesh, spec)
    assert np.array_equal(summed(again), X.max(0))


def losses():
    """Return functions of weights, each with an unreduced value inside."""

    def plain(w):
        return reshard(gram(w), P()).sum()

    def scanned(w):
        start = reshard(jnp.zeros((4, 4)), U)
        total = jax.lax.scan(lambda c, _: (c + gram(w), None), start, length=3)[0]
        return reshard(total, P()).sum()

    return {
        "plain": plain,
        "nested": lambda w: reshard(pjit(gram)(w), P()).sum(),
        "pinned": lambda w: reshard(pjit(gram, out_shardings=U)(w), P()).sum(),
        "pinned otherwise": lambda w: reshard(pjit(gram, out_shardings=P())(w), P()).sum(),
        "remat": lambda w: reshard(jax.checkpoint(gram)(w), P()).sum(),
        "scan": scanned,
        "cond": lambda w: jax.lax.cond(True, plain, lambda w: w.sum(), w),
        "constraint": lambda w: reshard(with_sharding_constraint(gram(w), U), P()).sum(),
        "device_put": lambda w: device_put(gram(w), P()).sum(),
    }


@needs_shardy
@pytest.mark.slow
def test_transformations(mesh):
    x = device_put(X, P("x"))
    with Together() as together:
        for name, loss in losses().items():
            with together.case(name):
                factor = 3 if name == "scan" else 1
                expected = 2 * factor * np.broadcast_to(X.sum(1, keepdims=True), X.shape)
                assert np.allclose(pjit(jax.grad(loss))(x), expected, atol=1e-4)
                assert np.allclose(pjit(loss)(x), factor * (X.T @ X).sum(), atol=1e-4)
    batch = device_put(np.stack([X, 2 * X]), P(None, "x"))
    assert np.allclose(summed(jax.vmap(pjit(gram))(batch))[1], 4 * (X.T @ X))
    tangent = jax.jvp(pjit(gram), (x,), (x,))[1]
    assert np.allclose(summed(tangent), 2 * (X.T @ X))


@pytest.mark.slow
@needs_shardy
def test_the_gradient_of_a_reduced_weight_is_unreduced(mesh):
    w, x = device_put(np.ones((4, 4), np.float32), R), device_put(X, P("x"))
    assert jit(lambda w: w * 2)(w).sharding == NamedSharding(mesh, R)
    for gradient in (jax.grad, lambda f: jit(jax.grad(f))):
        found = gradient(lambda w, x: jit(lambda x, w: x @ w)(x, w).sum())(w, x)
        assert found.sharding.spec.unreduced == {"x"}
        expected = np.broadcast_to(X.sum(0)[:, None], (4, 4))
        assert np.allclose(summed(found), expected, atol=1e-4)


@pytest.mark.slow
@needs_shardy
def test_stages_and_explain_keep_unreduced_shardings(mesh):
    out = jit(gram)(device_put(X, P("x")))
    lowered = pjit(lambda x: x + x).lower(out)
    main = next(line for line in lowered.as_text().splitlines() if "@main" in line)
    theirs = jax.jit(lambda x: x + x).lower(out.to_jax()).as_text()
    assert main in theirs
    assert main.count('unreduced={"x"}') == 2
    compiled = lowered.compile()
    assert compiled.output_shardings == NamedSharding(mesh, U)
    assert np.allclose(summed(compiled(np.ones((4, 4), np.float32))), 2)
    again = type(compiled).deserialize(compiled.serialize())
    assert again.output_shardings == NamedSharding(mesh, U)
    assert np.allclose(summed(again(out)), 2 * (X.T @ X))
    state = pjit(lambda s: s + s, donate_argnums=0).lower(out).compile()
    step = state.bind(out)
    step()
    assert np.allclose(summed(step.state), 2 * (X.T @ X))
    with pytest.raises(
        UnreducedError,
        match=naming("<lambda>", "result", "unreduced={'x'}", "device_put(result, sharding)"),
    ):
        state.bind(X[:4])
    report = explain(pjit(lambda x: reshard(x, P())), jit(gram)(device_put(X, P("x"))))
    text = str(report)
    assert "P(unreduced={'x'})" in text
    assert "96 B in 1 collective: 96 B along x" in text
    assert json.loads(report.to_json())["inputs"][0]["spec"] == "P(unreduced={'x'})"


@needs_shardy
@pytest.mark.devices(8)
def test_unreduced_programs_that_fail_in_xla_are_refused(mesh):
    out = jit(gram)(device_put(X, P("x")))
    to_other = P(unreduced={"y"})
    refused = {
        "other axes": (lambda x: reshard(x, to_other), "['x']"),
        "device_put to others": (lambda x: jax.device_put(x, to_other), "['x']"),
        "a callback": (lambda x: jax.pure_callback(np.sin, x, x), "pure_callback"),
        "a print": (lambda x: (jax.debug.print("{}", x), x)[1], "debug_print"),
    }
    with Together() as together:
        for name, (function, words) in refused.items():
            for call in (jit(function), pjit(lambda x, f=function: pjit(f)(x))):
                with together.case(name), pytest.raises(UnreducedError, match=words):
                    call(out)
    with pytest.raises(
        ResourceError,
        match=naming("out_shardings of result", "['x']", "['y']", "jax.sharding.reshard("),
    ):
        jit(lambda x: x, out_shardings=to_other)(out)
    with pytest.raises(ResourceError, match="complex64"):
        jit(lambda x: x, out_shardings=U)(device_put(X.astype(complex), P()))
    largest = P(unreduced={"x"}, unreduced_kind=UnreducedKind.max)
    with pytest.raises(ResourceError, match=naming("result", "max of whole values", "device_put")):
        jit(lambda x: x, out_shardings=largest)(device_put(X, P()))
    with pytest.raises(UnreducedError, match="complex64"):
        jit(lambda x: reshard(x, U))(device_put(X.astype(complex), P()))


ONES = np.ones((4, 4), np.float32)
BATCH = P(None, None, None, unreduced={"x"})
ROW = P(None, unreduced={"x"})
SCALAR = P(unreduced={"x"})
# Partial results of values that no operation has placed: function of `[4, 4]`, and its value.
UNPLACED = {
    "a constant": (lambda a: reshard(ONES, U), ONES),
    "a scalar": (lambda a: reshard(2.0, SCALAR) + reshard(1.0, SCALAR), 3),
    "a closed-over array": (lambda a: reshard(CLOSED["ones"], U), ONES),
    "device_put": (lambda a: jax.device_put(ONES, U), ONES),
    "a slice": (lambda a: reshard(jax.lax.slice(ONES, (0, 0), (2, 2)), U), ONES[:2, :2]),
    "jnp.full": (lambda a: jnp.full((4, 4), 3.0, out_sharding=U), 3 * ONES),
    "ones_like": (lambda a: jnp.ones_like(reshard(a, U)), ONES),
    "a broadcast": (
        lambda a: jax.lax.broadcast_in_dim(a, (2, 4, 4), (1, 2), out_sharding=BATCH),
        2 * [X[:4]],
    ),
    "iota": (lambda a: jnp.arange(4.0, out_sharding=ROW), np.arange(4)),
    "gather": (lambda a: a.at[np.array([1, 2])].get(out_sharding=U), X[1:3]),
    "auto_axes": (lambda a: jax.sharding.auto_axes(jnp.square, out_sharding=U)(a), X[:4] ** 2),
    # XLA ends the process of `jax.jit` for operands of unequal shardings.
    "einsum": (
        lambda a: jnp.einsum(
            "fh,fd,f->hd",
            ONES,
            reshard(a, P("x", "y")),
            ONES[0],
            out_sharding=P(None, "y", unreduced={"x"}),
        ),
        np.broadcast_to(X[:4].sum(0), (4, 4)),
    ),
    "a sum": (lambda a: reshard(a, U) + reshard(ONES, U), X[:4] + 1),
    "nested": (lambda a: pjit(lambda: reshard(ONES, U))(), ONES),
    "scan": (
        lambda a: jax.lax.scan(
            lambda c, _: (c + reshard(ONES, U), None), reshard(0 * ONES, U), length=3
        )[0],
        3 * ONES,
    ),
    "cond": (
        lambda a: jax.lax.cond(
            a[0, 1] > 0, lambda: reshard(ONES, U), lambda: jnp.zeros((4, 4), out_sharding=U)
        ),
        ONES,
    ),
}
CLOSED = {}


@pytest.mark.slow
@needs_shardy
def test_values_that_nothing_places_are_counted_once(mesh):
    """`jax.jit` returns four times the value of most of them."""
    x, CLOSED["ones"] = device_put(X[:4], P()), jnp.asarray(ONES)
    with Together() as together:
        for name, (function, expected) in UNPLACED.items():
            with together.case(name):
                out = jit(function)(x)
                assert out.sharding.spec.unreduced == {"x"}
                assert np.allclose(summed(out), expected)
        with together.case("a result"):
            assert np.array_equal(summed(jit(lambda: ONES, out_shardings=U)()), ONES)


WEIGHTS = {
    "sum": lambda w, x: (w * 2).sum(),
    "square": lambda w, x: (w * w).sum(),
    "sin": lambda w, x: jnp.sin(w).sum(),
    "product": lambda w, x: ((x @ w) ** 2).sum(),
    "split": lambda w, x: (x @ jnp.split(w, 2, axis=-1)[0]).sum(),
    "concatenate": lambda w, x: (x @ jnp.concatenate([w, w], axis=-1)).sum(),
    "scan": lambda w, x: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), x, w)[0].sum(),
    "nested": lambda w, x: jit(lambda x, w: (x @ w, x.sum()))(x, w)[0].sum(),
    "remat": lambda w, x: jax.checkpoint(lambda w: jnp.sin(x @ jnp.sin(w)))(w).sum(),
}


@pytest.mark.slow
@needs_shardy
def test_gradients_of_reduced_weights(mesh):
    with Together() as together:
        for name, loss in WEIGHTS.items():
            values = f32(3, 4, 4) if name == "scan" else X[:4], X / 8
            expected = jax.jit(jax.grad(loss))(*values)
            spec = P(*[None] * values[0].ndim, reduced={"x"})
            w, x = device_put(values[0], spec), device_put(values[1], P("x"))
            for nested in (loss, jit(loss)):
                with together.case(name):
                    found = jit(jax.grad(nested, argnums=(0, 1)))(w, x)[0]
                    assert found.sharding.spec.unreduced == {"x"}
                    assert np.allclose(summed(found), expected, rtol=1e-4, atol=1e-4)


@needs_shardy
@pytest.mark.devices(8)
def test_unreduced_type_and_boundary_mismatch_is_refused(mesh):
    out = jit(gram)(device_put(X, P("x")))
    with pytest.raises(ResourceError, match="committed as NamedSharding.*unreduced"):
        jit(lambda x: x, in_shardings=P())(out)
    for value in (X, jnp.asarray(X)):
        with pytest.raises(
            ResourceError, match=naming("in_shardings of x (float32[8,4])", "device_put(x, ")
        ):
            jit(lambda x: x, in_shardings=U)(value)
    with pytest.raises(ResourceError, match="is unreduced over \\['x'\\].*reshard"):
        jit(lambda x: with_sharding_constraint(x, P()))(out)
    compiled = pjit(lambda x: x + x).lower(device_put(X, P())).compile()
    with pytest.raises(ResourceError, match="committed as NamedSharding.*unreduced"):
        compiled(device_put(X, U))


@needs_shardy
@pytest.mark.devices(8)
def test_auto_axes_beside_unreduced_axes_are_refused():
    """XLA reduces twice there: `jax.jit` returns twice the sum."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh):
        x = device_put(X, P("x"))
        with pytest.raises(UnreducedError, match=naming("Auto", "['y']", "AxisType.Explicit")):
            jit(lambda x: reshard(gram(x), P()))(x)
        assert np.array_equal(summed(device_put(X, U)), X)


@pytest.mark.skipif(not GSPMD, reason="only GSPMD refuses")
def test_unreduced_shardings_are_refused_under_gspmd(mesh):
    assert np.array_equal(summed(device_put(X, U)), X)
    with pytest.raises(UnreducedError, match=naming("GSPMD", "Shardy")):
        jit(gram)(device_put(X, P("x")))
    with pytest.raises(UnreducedError, match="Shardy"):
        jit(lambda x: x)(device_put(X, U))
