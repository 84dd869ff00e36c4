"""Products that every device computes whole."""

import jax
import jax.numpy as jnp
import pytest

from tests.core.pjit.helpers import f32
from xlashard import NamedSharding, P, ProgramReport, explain, pjit
from xlashard.support.formatting import plain_text

pytestmark = pytest.mark.usefixtures("partitioner")


def named(mesh, *spec):
    return NamedSharding(mesh, P(*spec))


def loss(params, x):
    hidden = jax.nn.relu(x @ params["up"])
    return ((hidden @ params["down"]) ** 2).mean()


PARAMS = {"up": f32(8, 32), "down": f32(32, 8)}
X = f32(64, 8)


def test_products_of_replicated_operands_are_reported(mesh):
    step = pjit(jax.grad(loss), in_shardings=named(mesh))
    report = explain(step, PARAMS, X)
    flops = 2 * 64 * 8 * 32
    assert {(r.flops, r.devices, r.times, r.operation) for r in report.repeated} == {
        (flops, 8, 1, "dot_general")
    }
    # Two products forward, three backward, all of them with the batch.
    assert len(report.repeated) == 5
    assert sum(r.share for r in report.repeated) == pytest.approx(1)
    assert {(r.argument, r.spec) for r in report.repeated} == {("x", "P(('x', 'y'),)")}
    assert {r.source.file for r in report.repeated} == {__file__}
    assert ProgramReport.from_json(report.to_json()) == report
    text = plain_text(report.renderable(), 200)
    assert "Repeated by every device" in text and "shard x as P(('x', 'y'),)" in text
    assert "32.8 kFLOP" in text and "20.0%" in text and "test_repeated.py" in text


@pytest.mark.slow
def test_sharded_products_are_not_listed(mesh):
    whole, rows = named(mesh), named(mesh, "x")
    data = pjit(jax.grad(loss), in_shardings=({"up": whole, "down": whole}, rows))
    assert explain(data, PARAMS, X).repeated == ()
    shard = pjit(lambda x, w: x @ w, in_shardings=whole, out_shardings=rows)
    assert explain(shard, X, PARAMS["up"]).repeated == ()

    def manual(x, w):
        specs = {"in_specs": (P("x"), P()), "out_specs": P("x")}
        return jax.shard_map(lambda x, w: x @ w, mesh=mesh, **specs)(x, w)

    assert explain(pjit(manual), X, PARAMS["up"]).repeated == ()
    assert explain(pjit(jax.grad(loss)), PARAMS, X).repeated == ()  # one device


@pytest.mark.slow
def test_loops_and_constraints(mesh):
    def scanned(weights, x):
        x, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, weights)
        return x

    report = explain(pjit(scanned, in_shardings=named(mesh)), f32(5, 8, 8), f32(16, 8))
    (row,) = report.repeated
    assert (row.count, row.times, row.flops) == (1, 5, 5 * 2 * 16 * 8 * 8)
    assert (row.operands, row.result) == (("float32[16,8]", "float32[8,8]"), "float32[16,8]")

    def pinned(x, w):
        w = jax.lax.with_sharding_constraint(w, named(mesh))
        return jax.lax.with_sharding_constraint(x, named(mesh)) @ w

    (row,) = explain(pjit(pinned, in_shardings=named(mesh, "x")), X, PARAMS["up"]).repeated
    assert row.argument == "" and row.constraint.file == __file__


@pytest.mark.slow
def test_convolutions(mesh):
    def conv(x, k):
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME").sum()

    fun = pjit(conv, in_shardings=named(mesh))
    (row,) = explain(fun, f32(8, 4, 6, 6), f32(2, 4, 3, 3)).repeated
    assert row.operation == "conv_general_dilated"
    assert row.flops == 2 * (8 * 2 * 6 * 6) * (4 * 3 * 3)
    assert (row.argument, row.spec) == ("x", "P(('x', 'y'),)")
    shared = pjit(conv, in_shardings=(named(mesh, "x"), named(mesh)))
    assert explain(shared, f32(8, 4, 6, 6), f32(2, 4, 3, 3)).repeated == ()
