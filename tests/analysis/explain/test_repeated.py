"""Work that every device repeats on whole values."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

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
def test_parameters_are_to_be_sharded_and_not_the_other_dimension_of_a_batch(mesh):
    def loss(params, x):
        return ((x @ params["in"] @ params["out"]) ** 2).mean()

    def step(params, momentum, x):
        gradient = jax.grad(loss)(params, x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, momentum, gradient)
        return jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum), momentum

    whole, rows = named(mesh), named(mesh, ("x", "y"))
    params = {"in": f32(128, 128), "out": f32(128, 128)}
    report = explain(pjit(step, in_shardings=(whole, whole, rows)), params, params, f32(16, 128))
    elementwise = [r for r in report.repeated if not r.flops]
    assert elementwise and "x" not in {r.argument for r in elementwise}


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


def squares(x):
    return x.reshape(64, 16, 16)


def positive(x):
    return jnp.einsum("bij,bkj->bik", squares(x), squares(x)) + 256 * jnp.eye(16)


LOOP = {"length": 5}
# The opcode in the compiled module of what is computed, for float32[64,256].
WORK = {
    "fft": ("fft", lambda x: jnp.fft.fft(x, axis=1).real),
    "rfft": ("fft", lambda x: jnp.abs(jnp.fft.rfft(x, axis=1))),
    "sort": ("sort", lambda x: jnp.sort(x, axis=1)),
    "argsort": ("sort", lambda x: jnp.argsort(x, axis=1)),
    "top_k": ("custom-call", lambda x: lax.top_k(x, 16)),
    "cumsum": ("reduce-window", lambda x: jnp.cumsum(x, axis=1)),
    "cumprod": ("reduce-window", lambda x: jnp.cumprod(x, axis=1)),
    "cummax": ("reduce-window", lambda x: lax.cummax(x, axis=1)),
    "cumlogsumexp": ("reduce-window", lambda x: lax.cumlogsumexp(x, axis=1)),
    "chain": ("tanh", lambda x: jnp.tanh(jnp.sin(x) * 2 + 1)),
    "softmax": ("exponential", lambda x: jax.nn.softmax(x, axis=1)),
    "gelu": ("tanh", lambda x: jax.nn.gelu(x)),
    "erf_inv": ("sqrt", lambda x: lax.erf_inv(x)),
    "sum": ("reduce", lambda x: (x * x).sum(1)),
    "argmax": ("reduce", lambda x: jnp.argmax(x, 1)),
    "pooling": (
        "reduce-window",
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 4), (1, 4), "VALID"),
    ),
    "where": ("exponential", lambda x: jnp.where(x > 0, x, jnp.exp(x))),
    "gather": ("gather", lambda x: x[:, (jnp.arange(256) * 7) % 256]),
    "scatter": ("scatter", lambda x: x.at[:, (jnp.arange(128) * 3) % 256].add(1.0)),
    "update": ("dynamic-update-slice", lambda x: lax.dynamic_update_slice(x, x[:, 1:], (0, 0))),
    "scan": ("sine", lambda x: lax.scan(lambda c, _: (jnp.sin(c) * 1.5, None), x, None, **LOOP)[0]),
    "while": (
        "cosine",
        lambda x: lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, jnp.cos(c[1])), (0, x))[
            1
        ],
    ),
    "sort in a loop": ("sort", lambda x: lax.fori_loop(0, 3, lambda _, c: jnp.sort(c, 1), x)),
    "uniform": ("xor", lambda x: x + jax.random.uniform(jax.random.key(0), x.shape)),
    "normal": ("xor", lambda x: x * jax.random.normal(jax.random.key(0), x.shape)),
    "product": ("dot", lambda x: x @ jnp.ones((256, 32))),
    "convolution": (
        "convolution",
        lambda x: lax.conv_general_dilated(
            x.reshape(64, 4, 8, 8), jnp.ones((8, 4, 3, 3)), (1, 1), "SAME"
        ),
    ),
    "cholesky": ("custom-call", lambda x: jnp.linalg.cholesky(positive(x))),
    "solve": (
        "custom-call",
        lambda x: lax.linalg.triangular_solve(positive(x), squares(x), left_side=True),
    ),
    "branch": ("exponential", lambda x: lax.cond(x[0, 0] > 0, jnp.exp, lambda x: x, x)),
    "gradient": ("cosine", lambda x: jax.grad(lambda x: jnp.sin(jnp.sin(x)).sum())(x)),
    "power": ("clamp", lambda x: jnp.clip(x, -1, 1) ** 3),
}


def largest_arrays(text, opcode):
    """Return the elements of the largest array that each instruction of an opcode touches."""
    found = re.findall(r"^ *(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\((.*)$", text, re.MULTILINE)
    sizes = {
        name: max(
            (math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", shape)),
            default=1,
        )
        for name, shape, _, _ in found
    }
    return [
        max(sizes[name], *(sizes.get(each, 1) for each in re.findall(r"%([\w.-]+)", rest)))
        for name, _, code, rest in found
        if code == opcode
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", WORK)
def test_repeated_work_is_that_which_the_compiled_program_does_whole(mesh, name):
    opcode, f = WORK[name]
    for spec in (P(), P("x"), P(("x", "y"))):
        x = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=NamedSharding(mesh, spec))
        text = jax.jit(f).lower(x).compile().as_text()
        whole = max(largest_arrays(text, opcode), default=0) >= 64 * 256
        report = explain(jax.jit(f), x)
        found = [r for r in report.repeated if r.flops or r.nbytes]
        assert bool(found) == whole, (spec, found)
        assert whole or spec, text
        for row in found:
            assert (row.flops == 0) != (row.nbytes == 0) and 0 < row.share <= 1


@pytest.mark.slow
def test_fft_along_a_sharded_dimension_is_repeated(mesh):
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=named(mesh, ("x", "y")))
    report = explain(jax.jit(lambda x: jnp.fft.fft(x, axis=0).real), x)
    (row,) = [r for r in report.repeated if r.operation == "fft"]
    assert (row.flops, row.share) == (5 * 64 * 256 * 6, 1)
    assert (row.argument, row.spec) == ("x", "P(None, ('x', 'y'))")


@pytest.mark.slow
def test_a_shard_of_a_larger_value_of_the_line_is_not_whole(mesh):
    rows, whole = named(mesh, ("x", "y")), named(mesh)
    large = jax.ShapeDtypeStruct((4096, 64), jnp.float32, sharding=rows)
    small = jax.ShapeDtypeStruct((512, 64), jnp.float32, sharding=rows)
    report = explain(jax.jit(lambda x, y: (jnp.sin(x), jnp.sin(y))), large, small)
    assert report.repeated == ()
    shared = jax.jit(lambda x: jax.shard_map(jnp.sin, mesh=mesh, in_specs=P(), out_specs=P())(x))
    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32, sharding=whole)
    assert explain(shared, x).repeated == ()
