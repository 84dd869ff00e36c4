"""Shardings that a program does not satisfy are reported once, and are errors under strict=True."""

import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.pjit.helpers import f32
from tests.message_patterns import naming
from xlashard import (
    NamedSharding,
    P,
    ProgramReport,
    device_put,
    explain,
    pjit,
    record_programs,
    with_sharding_constraint,
)
from xlashard.analysis.explain.model import UnmetRequest
from xlashard.core.pjit import function
from xlashard.core.program import uneven_shardings as uneven
from xlashard.errors import (
    ReplicationError,
    ReplicationWarning,
    UnevenShardingError,
    UnevenShardingWarning,
)
from xlashard.support.formatting import plain_text

X = f32(10, 6)


def issued(run):
    """Return the warnings of a call under Python's default filter, which shows each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        run()
    return caught


def pinned(mesh, *spec, by=with_sharding_constraint):
    sharding = NamedSharding(mesh, P(*spec))
    return lambda x: by(x * 2, sharding)


BY = {"ours": with_sharding_constraint, "JAX's": jax.lax.with_sharding_constraint}


@pytest.mark.devices(8)
@pytest.mark.parametrize("by", BY)
def test_uneven_sharding_warns_once_per_call_site(mesh, by):
    @pjit
    def total(x):
        return pinned(mesh, "x", by=BY[by])(x).sum()

    def twice():
        for _ in range(2):
            total(X)
        total.clear_cache()
        np.testing.assert_allclose(total(X), 2 * X.sum(), rtol=1e-6)

    (warning,) = issued(twice)
    assert warning.category is UnevenShardingWarning and warning.filename == __file__
    facts = "float32[10,6]", "size 10", "'x'=4", "to 12, 3 on each", "72 B", "48 B", "240 B", "P()"
    assert all(fact in str(warning.message) for fact in facts)


@pytest.mark.devices(8)
@pytest.mark.slow
@pytest.mark.parametrize("by", BY)
def test_strict_mode_raises_for_uneven_shardings(mesh, by, monkeypatch):
    f = pinned(mesh, "x", by=BY[by])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnevenShardingWarning)
        with pytest.raises(UnevenShardingError, match=naming("float32[10,6]", __file__)) as caught:
            pjit(f, strict=True)(X)
    error = caught.value
    assert (error.dim, error.size, error.tiles, error.axes) == (0, 10, 4, (("x", 4),))
    nested = pjit(f, strict=True)
    loop = pjit(lambda x: jax.lax.fori_loop(0, 2, lambda _, y: f(y), x), strict=True)
    for bad in (jax.jit(nested), jax.grad(lambda x: nested(x).sum()), loop, loop.lower):
        with pytest.raises(UnevenShardingError):
            bad(X)
    monkeypatch.setattr(uneven, "FLAGS", dataclasses.replace(uneven.FLAGS, strict=True))
    with pytest.raises(UnevenShardingError):
        pjit(f)(X)
    pjit(f)(f32(12, 6))
    with pytest.warns(UnevenShardingWarning):
        pjit(pinned(mesh, "x", by=jax.lax.with_sharding_constraint), strict=False)(X)


@pytest.mark.devices(8)
def test_strict_constraints_name_the_path(mesh):
    def f(tree):
        return with_sharding_constraint(tree, NamedSharding(mesh, P("x", "y")), strict=True)

    for call in (f, jax.jit(f), pjit(f)):
        with pytest.raises(UnevenShardingError, match=naming("x['b'] (float32[7,3])")) as caught:
            call({"a": f32(8, 2), "b": f32(7, 3)})
        assert (caught.value.path, caught.value.size) == ("x['b']", 7)


@pytest.mark.devices(8)
@pytest.mark.slow
def test_constraints_in_tuples_of_jaxprs_are_found(mesh):
    double = pinned(mesh, "x", by=jax.lax.with_sharding_constraint)

    def solve(x):
        return jax.lax.custom_linear_solve(double, x, lambda _, x: x / 2, symmetric=True)

    (warning,) = issued(lambda: pjit(solve)(X))
    assert warning.category is UnevenShardingWarning and warning.filename == __file__


@pytest.mark.slow
def test_divisible_shardings_do_not_warn(mesh):
    def run():
        pjit(pinned(mesh, "x", P.UNCONSTRAINED))(f32(8, 3))
        jax.jit(pinned(mesh, ("x", "y")))(f32(16, 3))
        alone = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
        pjit(pinned(alone, "x"))(f32(7, 3))
        pjit(lambda x: x * 2, strict=True)(X)

    assert issued(run) == []


def test_repeat_calls_skip_the_checks(mesh, monkeypatch):
    double = pjit(pinned(mesh, "x"), strict=True)
    x = f32(8, 2)
    double(x)
    for name in ("report_uneven_constraints", "report_replicated"):
        monkeypatch.delattr(function, name)
    double(x)


@pytest.mark.devices(8)
@pytest.mark.slow
@pytest.mark.usefixtures("partitioner")
def test_explain_lists_uneven_dimensions(mesh):
    columns = NamedSharding(mesh, P(None, ("x", "y")))

    def loss(x, labels):
        logits = jax.lax.with_sharding_constraint(x @ x.T, columns)
        return jnp.tanh(logits).mean() + labels.mean()

    with pytest.warns(UnevenShardingWarning):
        report = explain(pjit(jax.value_and_grad(loss)), X, f32(4))
    (row,) = report.unmet
    assert (row.kind, row.path) == ("uneven constraint", "float32[10,10]")
    assert (row.requested, row.nbytes) == ("P(None, ('x', 'y'))", 240)
    assert row.actual == "padded to 16, 8 tiles of 2 along x, y, 3 of padding alone"
    assert row.reason == "dimension 1 of 10 does not divide by 8"
    assert row.source.file == __file__
    assert ProgramReport.from_json(report.to_json()) == report
    text = plain_text(report.renderable(), 200)
    assert "240 B" in text and "test_uneven.py" in text and "3 of padding alone" in text


@pytest.mark.devices(8)
@pytest.mark.usefixtures("partitioner")
def test_report_shows_requested_and_actual_spec_of_a_result(mesh):
    with pytest.warns(UnevenShardingWarning):
        report = explain(pjit(pinned(mesh, "x")), X)
    (row,) = [u for u in report.unmet if u.kind == "uneven constraint"]
    assert row.actual.endswith(f"; result is {report.outputs[0].spec}")
    assert report.outputs[0].spec != row.requested


@pytest.fixture
def little(monkeypatch):
    """Count values from 1 MiB on as large."""
    monkeypatch.setattr(uneven, "FLAGS", dataclasses.replace(uneven.FLAGS, warn_replicated=1))


LARGE = np.ones((512, 512), np.float32)


@pytest.mark.devices(8)
def test_large_arguments_without_a_sharding_warn_once(mesh, little):
    def run():
        with jax.set_mesh(mesh):
            pjit(lambda w: w["a"].sum())({"a": LARGE})
            total = pjit(lambda w, x: w.sum() + x.sum())
            total(LARGE, f32(8))
            total(LARGE, f32(8))

    first, second = (str(warning.message) for warning in issued(run))
    assert "w['a']" in first and "float32[512,512]" in first and "1.0 MiB on each of 8" in first
    assert "P(('x', 'y')" in first and second.startswith("w of ")


@pytest.mark.devices(8)
@pytest.mark.slow
def test_programs_compiled_without_a_call_warn(mesh, little):
    def total(w, x):
        return w.sum() + x.sum()

    struct = jax.ShapeDtypeStruct(LARGE.shape, LARGE.dtype)
    own, jitted = pjit(total), jax.jit(total)
    with jax.set_mesh(mesh):
        lowered = own.lower(LARGE, f32(8))
        compiling = (
            lambda: lowered.compile(),
            lambda: lowered.compile(compiler_options={"xla_embed_ir_in_executable": True}),
            lambda: explain(own, struct, f32(8)),
        )
        for run in compiling:
            (warning,) = issued(run)
            assert warning.category is ReplicationWarning and warning.filename == __file__
            assert re.match(naming("w of total", "1.0 MiB", "in_shardings"), str(warning.message))
        assert issued(lambda: own.lower(LARGE, f32(8))) == []
        with pytest.raises(ReplicationError):
            explain(pjit(total, strict=True), LARGE, f32(8))
        row = UnmetRequest(
            "argument without sharding",
            "w",
            "unspecified",
            "P()",
            7 * LARGE.nbytes // 8,
            "XLA leaves it whole",
            "shard dimension 0 over x, y by in_shardings or device_put",
        )
        # Reports of jax.jit list it.
        with record_programs() as programs:
            jitted(LARGE, f32(8))
        stages = jitted.trace(LARGE, f32(8)), *programs
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            reports = explain(jitted, struct, f32(8)), *map(explain, stages)
            assert [report.unmet for report in reports] == [(row,)] * 3
            assert explain(jitted, LARGE[1:], f32(8)).unmet == ()


@pytest.mark.devices(8)
@pytest.mark.slow
def test_large_results_without_a_sharding_warn_or_raise(mesh, little):
    rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    x = jax.device_put(LARGE[:8], rows)

    def outer(x):
        return x.T @ x

    (warning,) = issued(lambda: pjit(outer)(x))
    assert warning.category is ReplicationWarning
    assert re.match(naming("result of outer", "1.0 MiB", "out_shardings"), str(warning.message))
    (row,) = explain(jax.jit(outer), x).unmet
    assert (row.path, row.actual) == ("result", "P()") and "out_shardings" in row.advice
    with pytest.raises(ReplicationError, match="out_shardings"):
        pjit(outer, strict=True)(x)
    pinned = lambda x: jax.lax.with_sharding_constraint(outer(x), whole)  # noqa: E731
    for f in (pjit(outer, out_shardings=whole), pjit(outer, out_shardings=rows), pjit(pinned)):
        assert issued(lambda: f(x)) == []  # noqa: B023
    # A replicated state stays so.
    assert issued(lambda: pjit(lambda w, x: w + outer(x))(jax.device_put(LARGE, whole), x)) == []


@pytest.mark.slow
def test_sharded_and_small_values_do_not_warn(mesh, little):
    def run():
        with jax.set_mesh(mesh):
            total = pjit(lambda w: w.sum())
            total(LARGE[1:])
            total(device_put(LARGE, NamedSharding(mesh, P("x"))))
            total(device_put(LARGE, NamedSharding(mesh, P())))
            pjit(lambda w: w.sum(), in_shardings=P())(LARGE)
            pjit(lambda w: w * 2, out_shardings=P())(LARGE[1:])
            pjit(lambda w, x: x)(LARGE, f32(4))  # unused
        pjit(lambda w: w.sum())(LARGE)

    assert issued(run) == []


@pytest.mark.devices(8)
def test_replication_warning_of_an_indivisible_size_suggests_pad_to_mesh(mesh, little):
    f = pjit(lambda x: x.sum())
    with jax.set_mesh(mesh), pytest.warns(ReplicationWarning, match=naming("x of", "pad_to_mesh")):
        f(np.ones((1023, 1025), np.float32))


def test_zero_threshold_disables_the_replication_warning(mesh, monkeypatch):
    monkeypatch.setattr(uneven, "FLAGS", dataclasses.replace(uneven.FLAGS, warn_replicated=0))
    with jax.set_mesh(mesh):
        assert issued(lambda: pjit(lambda x: x.sum())(LARGE)) == []
