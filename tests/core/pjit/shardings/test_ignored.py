"""Shardings that a program names and does not follow: warnings, errors, rows of reports."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.pjit.helpers import f32
from tests.message_patterns import naming
from xlashard import NamedSharding, P, device_put, explain, pjit, with_sharding_constraint
from xlashard.errors import IgnoredShardingError, IgnoredShardingWarning

pytestmark = pytest.mark.devices(8)


def zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)


@pytest.fixture
def rows(mesh):
    return NamedSharding(mesh, P("x"))


@pytest.fixture
def abstract(mesh):
    return NamedSharding(mesh.abstract_mesh, P("x"))


CASES = {
    "argument": lambda s, _: lambda x: {"m": jnp.zeros_like(x["w"])},
    "constraint": lambda _, s: lambda x: with_sharding_constraint(jnp.zeros((4, 2)), s),
    "constraint of jax": lambda _, s: (
        lambda x: jax.lax.with_sharding_constraint(jnp.zeros((4, 2)), s)
    ),
    "device_put": lambda s, _: lambda x: device_put(x["w"] * 2, s),
    "device_put of jax": lambda s, _: lambda x: jax.jit(lambda x: jax.device_put(x, s))(x["w"]),
    "arange": lambda s, _: lambda x: jnp.arange(8, device=s) + x["w"].sum().astype(int),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ignored_shardings_are_reported(rows, abstract, name):
    """The program is that of jax.jit; a warning, explain and strict mode name the sharding."""
    f, kind = CASES[name](rows, abstract), name.replace("arange", "device_put").split()[0]
    x = {"w": device_put(f32(8, 4), rows)}
    call, subject = pjit(f), "x['w'] of" if kind == "argument" else f"a {kind} of"
    with pytest.warns(IgnoredShardingWarning, match=naming(subject, "P('x',)")) as caught:
        for _ in range(3):
            out = call(x)
    assert len(caught) == 1 and caught[0].filename == __file__
    wanted = jax.jit(f)(x)
    for ours, theirs in zip(jax.tree.leaves(out), jax.tree.leaves(wanted), strict=True):
        assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
        np.testing.assert_array_equal(ours, theirs)
    for strict in (pjit(f, strict=True), pjit(f, strict=True).lower):
        with pytest.raises(IgnoredShardingError, match=naming("P('x',)")):
            strict(x)
    for function in (jax.jit(f), pjit(f)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = explain(function, x)
        (row,) = [row for row in report.unmet if row.kind == kind]
        assert row.requested == "P('x')" and "Asked for and not done" in str(report)


def test_state_of_many_leaves_warns_once(rows):
    params = {name: device_put(f32(8, size), rows) for size, name in enumerate("abc", 1)}
    with pytest.warns(IgnoredShardingWarning, match=naming("params['a']", "2 more")) as caught:
        pjit(lambda params: zeros(params))(params)
    assert len(caught) == 1
    report = explain(jax.jit(lambda params: zeros(params)), params)
    assert [row.path for row in report.unmet] == ["params['c']", "params['b']", "params['a']"]


@pytest.mark.slow
def test_programs_that_follow_their_shardings_are_silent(mesh, rows, abstract):
    x, whole = device_put(f32(8, 4), rows), NamedSharding(mesh, P())
    explicit = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    put = NamedSharding(explicit, P("x"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for f, options, arg in (
            (zeros, {"out_shardings": rows}, x),
            (zeros, {"out_shardings": rows, "keep_unused": True}, x),
            (zeros, {}, device_put(f32(8, 4), whole)),
            (zeros, {}, f32(8, 4)),
            (zeros, {"device": jax.devices()[2]}, x),
            (lambda x: x.ndim, {}, x),
            (lambda x: with_sharding_constraint(x * 2, abstract), {}, x),
            (lambda x: device_put(x * 2, whole), {}, x),
            (lambda x: jax.device_put(x * 2, jax.devices()[0]), {}, x),
            (lambda x: device_put(x * 2, put), {}, device_put(f32(8, 4), put)),
        ):
            pjit(f, strict=True, **options)(arg)
