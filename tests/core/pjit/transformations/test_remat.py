"""Checkpointing around pjit and inside it: residuals equal the residuals of jax.jit."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

from tests.core.pjit.helpers import f32
from xlashard import NamedSharding, P, pjit

W, X = f32(4, 4) / 10, f32(8, 4) / 10
policies = jax.checkpoint_policies
POLICIES = {
    "everything": policies.everything_saveable,
    "nothing": policies.nothing_saveable,
    "dots": policies.dots_saveable,
    "dots without batch": policies.dots_with_no_batch_dims_saveable,
    "these": policies.save_only_these_names("a"),
    "names but these": policies.save_any_names_but_these("a"),
    "anything but these": policies.save_anything_except_these_names("a"),
    "both": policies.save_from_both_policies(
        policies.dots_saveable, policies.save_only_these_names("a")
    ),
    "offload names": policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["a"],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "offload dots": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


def layer(w, x):
    h = checkpoint_name(x @ w, "h")
    a = checkpoint_name(jnp.tanh(h), "a")
    return jnp.sin(a) @ w


def saved(fun):
    """Return each residual of a function of W and X: its type, and whether it is an argument."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print_saved_residuals(lambda w, x: fun(w, x).sum(), W, X)
    return sorted((line.split()[0], "argument" in line) for line in out.getvalue().splitlines())


def scanned(f):
    return lambda w, x: jax.lax.scan(lambda c, _: (f(w, c), None), x, length=3)[0]


@pytest.mark.parametrize("placed", [False, True], ids=["free", "placed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_saved_residuals_equal_jax_jit(mesh, policy, placed):
    policy, kwargs = POLICIES[policy], {}
    if placed:
        rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
        kwargs = {"in_shardings": (whole, rows), "out_shardings": rows}
    for build in (
        lambda jit: jax.checkpoint(jit(layer, **kwargs), policy=policy),
        lambda jit: jit(jax.checkpoint(layer, policy=policy), **kwargs),
        lambda jit: scanned(jax.checkpoint(jit(layer, **kwargs), policy=policy)),
    ):
        assert saved(build(pjit)) == saved(build(jax.jit))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["everything", "offload names"])
def test_values(mesh, policy, partitioner):
    policy, rows = POLICIES[policy], NamedSharding(mesh, P("x"))
    f = pjit(layer, in_shardings=(None, rows), out_shardings=rows)
    wanted = jax.grad(lambda w: layer(w, X).sum())(W)
    for g in (jax.checkpoint(f, policy=policy), pjit(jax.checkpoint(f, policy=policy))):
        gradient = jax.grad(lambda w, g=g: g(w, X).sum())
        np.testing.assert_allclose(gradient(W), wanted, rtol=1e-5)
        np.testing.assert_allclose(pjit(gradient)(W), wanted, rtol=1e-5)


@pytest.mark.slow
def test_arguments_of_checkpoint(mesh):
    rows = NamedSharding(mesh, P("x"))
    power = pjit(lambda x, n: jnp.sin(x) ** n, static_argnums=1, in_shardings=rows)
    outside = jax.checkpoint(power, static_argnums=(1,), prevent_cse=False)
    gradient = jax.grad(lambda x: outside(x, 2).sum())(X)
    np.testing.assert_allclose(gradient, np.sin(2 * X), rtol=1e-4)
    twice = jax.checkpoint(pjit(jax.checkpoint(pjit(jnp.sin, in_shardings=rows))))
    hessian = jax.jacfwd(jax.grad(lambda x: twice(x).sum()))(X[:, 0])
    np.testing.assert_allclose(np.diagonal(hessian), -np.sin(X[:, 0]), rtol=1e-5)
