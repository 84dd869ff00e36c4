"""Shardings under `AUTO`: the planner's requests, and calls under its layout."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.core.pjit.helpers import f32, make_mesh, spec_of
from tests.message_patterns import naming
from xlashard import (
    AUTO,
    UNSPECIFIED,
    NamedSharding,
    P,
    SingleDeviceSharding,
    device_put,
    explain,
    explain_recompile,
    legacy,
    pjit,
    record_programs,
)
from xlashard._jax.trace.rewriting import InsertionSite, insert_equations
from xlashard.core.pjit.compile import PROGRAMS
from xlashard.core.pjit.constraint import constraint_p, constraint_params
from xlashard.core.pjit.shardings.automatic import ChosenLayout, use_planner
from xlashard.core.program import uneven_shardings as uneven
from xlashard.errors import MeshError, ReplicationWarning, ResourceError
from xlashard.legacy.shardings.partition_spec import AUTO_ON_MESH


class Planner:
    """Planner that shards each first dimension over `x`, and constrains the first operation."""

    spec = P("x")

    def __init__(self):
        self.requests = []

    def plan_call(self, function, call, mesh):
        self.requests.append((call.in_shardings, call.out_shardings))
        traced = call.traced

        def specs(avals):
            return tuple(self.spec if aval.ndim else P() for aval in avals)

        inside = InsertionSite((0,), "result", 0, NamedSharding(mesh, P(None, "y")))
        jaxpr = insert_equations(traced.jaxpr, constraint_p, constraint_params, [inside])
        return ChosenLayout(specs(traced.in_avals), specs(traced.jaxpr.out_avals), jaxpr)


@pytest.fixture
def planner():
    own = Planner()
    before = use_planner(own)
    yield own
    use_planner(before)


def step(state, batch):
    return {"w": state["w"] * 2 + batch}, batch.sum()


X = f32(8, 4)


@pytest.mark.devices(8)
def test_planned_shardings_are_used_by_the_compiled_program(mesh, planner):
    f = pjit(step, in_shardings=AUTO, out_shardings=AUTO, donate_argnums=0)
    with jax.set_mesh(mesh):
        compiled = f.lower({"w": X}, X).compile()
        assert planner.requests == [((None, None), (None, None))]
        state, total = f({"w": X}, X)
        assert len(planner.requests) == 1
    (ins, _), outs = compiled.input_shardings, compiled.output_shardings
    assert ins == ({"w": NamedSharding(mesh, P("x"))}, NamedSharding(mesh, P("x")))
    assert outs == ({"w": NamedSharding(mesh, P("x"))}, NamedSharding(mesh, P()))
    text = compiled.as_text("stablehlo")
    assert text.count("sharding_constraint") == 1 or text.count("@Sharding") == 1
    np.testing.assert_array_equal(state["w"], X * 3)
    assert (float(total), spec_of(state["w"])) == (X.sum(), ("x",))


def test_repeat_call_skips_the_planner_and_stays_on_the_fast_path(mesh, planner, compilations):
    f = pjit(step, in_shardings=AUTO, out_shardings=AUTO, donate_argnums=0)
    with jax.set_mesh(mesh):
        state = f({"w": X}, X)[0]
        state = f(state, X)[0]
        planned, size = len(planner.requests), f._cache_size()
        for _ in range(3):
            old, (state, _) = state, f(state, X)
            assert old["w"].is_deleted()
    assert (len(planner.requests), f._cache_size()) == (planned, size)
    assert compilations.count == 1
    np.testing.assert_array_equal(state["w"], X * 63)


@pytest.mark.devices(8)
@pytest.mark.slow
def test_planner_keeps_requested_and_committed_shardings(mesh, planner):
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("y"))
    placed = device_put(X, rows)
    f = pjit(
        lambda a, b, c, d: (a + b + c + d, a),
        in_shardings=(AUTO, P(), UNSPECIFIED, UNSPECIFIED),
        out_shardings=(P(None, "x"), AUTO),
    )
    with jax.set_mesh(mesh):
        compiled = f.lower(X, X, placed, X).compile()
    fixed = (None, whole, rows, None), (NamedSharding(mesh, P(None, "x")), None)
    assert planner.requests == [fixed]
    ins = [sharding.spec for sharding in compiled.input_shardings[0]]
    assert ins == [P("x"), P(), P("y"), P("x")]
    assert [s.spec for s in compiled.output_shardings] == [P(None, "x"), P("x")]


@pytest.mark.parametrize("columns", [P(None, "x"), None])
def test_arrays_on_devices_are_resharded(mesh, planner, columns):
    other = SingleDeviceSharding(jax.devices()[1])
    x = device_put(X, other if columns is None else NamedSharding(mesh, columns))
    f = pjit(lambda x: x * 2, in_shardings=AUTO, out_shardings=AUTO)
    with jax.set_mesh(mesh):
        for _ in range(2):
            out = f(x)
            np.testing.assert_array_equal(out, X * 2)
            assert spec_of(out) == ("x",) and not x.is_deleted()
        compiled = f.lower(x).compile()
        np.testing.assert_array_equal(compiled(x), X * 2)
        np.testing.assert_array_equal(compiled(out), X * 4)
    given = pjit(lambda x, y: x + y, in_shardings=(AUTO, P("y")))
    with jax.set_mesh(mesh), pytest.raises((ResourceError, ValueError), match=naming("y", "P")):
        given(x, device_put(X, NamedSharding(mesh, P("x"))))


@pytest.mark.devices(8)
def test_mesh_is_taken_from_shardings_or_arrays(mesh, planner):
    f = pjit(lambda x, y: x + y, in_shardings=(AUTO, NamedSharding(mesh, P())))
    assert f.lower(X, X).compile().input_shardings[0][0] == NamedSharding(mesh, P("x"))
    g = pjit(lambda x: x * 2, in_shardings=AUTO)
    out = g(device_put(X, NamedSharding(mesh, P(None, "y"))))
    assert spec_of(out) == ("x",)
    with pytest.raises(MeshError, match=naming("in_shardings of x", "AUTO", "jax.set_mesh(mesh)")):
        g(X)
    late = pjit(lambda x: {"r": x * 2}, out_shardings={"r": AUTO})
    with pytest.raises(MeshError, match=naming("out_shardings of result['r']", "AUTO")):
        late(X)


@pytest.mark.devices(8)
def test_explicit_axes_are_refused(planner):
    explicit = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Explicit))
    with jax.set_mesh(explicit), pytest.raises(MeshError, match=naming("x", "'y'", "AxisType")):
        pjit(lambda x: x * 2, in_shardings=AUTO)(X)
    assert not planner.requests


@pytest.mark.devices(8)
@pytest.mark.slow
def test_strict_accepts_replication_chosen_by_auto(mesh, planner, monkeypatch):
    monkeypatch.setattr(planner, "spec", P())
    monkeypatch.setattr(uneven, "FLAGS", dataclasses.replace(uneven.FLAGS, warn_replicated=1))
    large, f = np.ones((1024, 512), np.float32), lambda x: {"r": x * 2}
    with jax.set_mesh(mesh):
        with pytest.warns(ReplicationWarning, match=naming("x of", "AUTO chooses")):
            pjit(f)(large)
        chosen = pjit(f, in_shardings=AUTO, out_shardings={"r": AUTO}, strict=True)
        assert chosen(large)["r"].sharding.is_fully_replicated


def test_single_device_mesh_skips_the_planner(planner):
    alone = make_mesh((1,), ("x",))
    with jax.set_mesh(alone):
        compiled = pjit(lambda x: x * 2, AUTO, AUTO).lower(X).compile()
    assert compiled.input_shardings[0][0] == NamedSharding(alone, P())
    assert not planner.requests


@pytest.mark.devices(8)
@pytest.mark.slow
def test_outer_program_decides_auto_shardings_of_a_nested_call(mesh, planner):
    inner = pjit(lambda x: jnp.sin(x) * 2, in_shardings=AUTO, out_shardings=AUTO)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(inner)(X), np.sin(X) * 2, rtol=1e-6)
        assert jax.grad(lambda x: inner(x).sum())(X).shape == X.shape
        assert not planner.requests
        outer = pjit(lambda x: inner(x) + 1, in_shardings=AUTO, out_shardings=AUTO)
        np.testing.assert_allclose(outer(X), np.sin(X) * 2 + 1, rtol=1e-6)
    assert len(planner.requests) == 1


@pytest.mark.devices(8)
@pytest.mark.slow
def test_references_tokens_and_keys(mesh, planner):
    def f(ref, key):
        ref[...] += jax.random.uniform(key[0], (8, 4))
        return ref[...] * 2

    ref, keys = jax.new_ref(jnp.zeros((8, 4))), jax.random.split(jax.random.key(0), 8)
    with jax.set_mesh(mesh):
        out = pjit(f, in_shardings=AUTO, out_shardings=AUTO)(ref, keys)
    np.testing.assert_allclose(out, ref[...] * 2, rtol=1e-6)
    assert len(planner.requests) == 1


@pytest.mark.devices(8)
@pytest.mark.slow
def test_plan_is_freed_with_its_function(mesh, planner):
    def made():
        f = pjit(lambda x: x * 2 + 1, in_shardings=AUTO)
        with jax.set_mesh(mesh):
            f(X)
        return f

    f = made()
    (body,) = f._function.planned
    assert PROGRAMS._by_jaxpr.get(body) is not None
    f.clear_cache()
    assert PROGRAMS._by_jaxpr.get(body) is None
    gone = weakref.ref(body)
    del body, f
    gc.collect()
    assert gone() is None
    function = weakref.ref(made()._function)
    gc.collect()
    assert function() is None


@pytest.mark.devices(8)
def test_reports_show_the_layout(mesh, planner):
    f = pjit(lambda x: x * 2, in_shardings=AUTO, out_shardings=AUTO)
    with jax.set_mesh(mesh):
        with record_programs() as programs:
            f(X)
        reports = explain(f, X), explain(programs[-1]), explain(f.lower(X))
        f(X)
    assert [report.inputs[0].spec for report in reports] == [reports[0].inputs[0].spec] * 3
    assert "'x'" in str(reports[0].inputs[0].spec)
    origins = [(r.inputs[0].decided_by, r.outputs[0].decided_by) for r in reports]
    assert origins == [("auto", "auto")] * 3
    assert len(programs) == 1 and len(planner.requests) == 1
    assert len(explain_recompile(f).explanations) >= 1


@pytest.mark.devices(8)
@pytest.mark.slow
def test_legacy_auto_markers_use_the_planner(mesh, planner):
    for marker in (AUTO, AUTO_ON_MESH, AUTO_ON_MESH(mesh)):
        f = legacy.pjit(lambda x: x * 2, marker, marker)
        with mesh:
            assert spec_of(f(X)) == ("x",)
            assert spec_of(f(f(X))) == ("x",)
    assert len(planner.requests) == 6  # NumPy arrays, and arrays whose type has the mesh
