"""Suggestions that are tried: what they change is what the changed program reports."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xlashard
from xlashard import P, PreflightReport, preflight, tpu
from xlashard.analysis.programs.program import LoweredModule
from xlashard.predict.preflight.advice import AdviceTrials, try_script
from xlashard.predict.preflight.compilation import compile_for_report
from xlashard.predict.preflight.preflight_run import lower_on, read_on_topology
from xlashard.predict.preflight.report.build import build_report
from xlashard.predict.preflight.report.preflight_model import Suggestion

MESH = tpu.topology("v5e:2x4").mesh({"data": 2, "model": 4})
STATE = {name: jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16) for name in ("mean", "sum")}
X = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)


def constrain(x: Any, spec: P) -> Any:
    return xlashard.with_sharding_constraint(x, xlashard.NamedSharding(MESH, spec))


def report_on(transform: Any, *changes: Suggestion) -> PreflightReport:
    """Return the report of an update that moves a value of its state, and one at a constraint."""
    specs = {"state['mean']": P(None, "data"), "state['sum']": P("data", None)}
    inner = {spec: spec for spec in (P("data", "model"), P("model", "data"))}
    for each in changes:
        sides = (each.before, each.after)
        before, after = (P(*[axes[0] if axes else None for axes in side]) for side in sides)
        if each.path:
            specs[each.path] = after
        else:
            inner[before] = after

    def update(state: Any, x: Any) -> Any:
        scaled = constrain(jnp.sin(x), inner[P("data", "model")])
        moved = constrain(jnp.cos(x * 2), inner[P("model", "data")])
        mean = state["mean"] + jnp.sin(state["sum"])
        return {"mean": mean, "sum": state["sum"]}, scaled * moved

    by_state = {name: jax.NamedSharding(MESH, specs[f"state['{name}']"]) for name in STATE}
    rows = jax.NamedSharding(MESH, P("data", None))
    shardings = {"in_shardings": (by_state, rows), "out_shardings": (by_state, None)}
    jitted = transform(update, **shardings, donate_argnums=0)
    return preflight(jitted, STATE, X, topology="v5e:2x4", estimate=bool(changes))


@pytest.mark.slow
@pytest.mark.parametrize("transform", [jax.jit, xlashard.pjit])
def test_tried_suggestions_change_what_they_say(transform: Any) -> None:
    before = report_on(transform)
    alone = [each.changes[0] for each in before.advice if len(each.changes) == 1]
    assert {bool(each.path) for each in alone} == {True, False}
    assert all(each.returned == bool(each.path) for each in alone)
    best = before.advice[0]
    assert len(best.changes) == 2 and best.outcome == "helps"
    assert "most worth doing: " + best.changes[0].text in " ".join(str(before).split())
    for each in before.advice if transform is jax.jit else [best]:
        after = report_on(transform, *each.changes)
        assert change(before, after) == (each.seconds, each.memory_bytes), each.text


def change(before: PreflightReport, after: PreflightReport) -> tuple[Any, Any]:
    """Return the change of the step's time and of the memory without code."""
    used = [r.memory.total_bytes - r.memory.code_bytes for r in (before, after)]
    return pytest.approx(after.time.seconds - before.time.seconds), used[1] - used[0]


def trial_of(function: Any, *settings: Any) -> AdviceTrials:
    """Return the trials of a function of settings and of a matrix."""
    rows = jax.NamedSharding(MESH, P("data", None))
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=rows)
    place = tpu.topology("v5e:2x4")
    program = jax.jit(partial(function, *settings))
    mesh, lowered, _ = read_on_topology(program, (x,), {}, place, None)
    assert isinstance(lowered, LoweredModule)
    compilation = compile_for_report(lowered, {}, estimate=True)
    report = build_report(compilation, place, mesh)
    return AdviceTrials(report, compilation, mesh, place, lower_on)


def combine(spec: P, x: Any) -> Any:
    moved = constrain(jnp.cos(x * 2), P("model", "data"))
    return constrain(jnp.sin(x), spec) * moved


def sum_up(spec: P, x: Any) -> Any:
    return combine(spec, x).sum()


@pytest.mark.slow
def test_suggestion_is_tried_in_all_programs_of_a_script_that_have_it() -> None:
    before = P("data", "model")
    trials = [trial_of(combine, before), trial_of(sum_up, before), trial_of(jnp.sin)]
    reports, advice = try_script(trials, [3, 2, 100])
    shared = next(each for each in advice if each.text.endswith("P('data', 'model'); 2 programs"))
    (after,) = {each.after for each in shared.changes}
    spec = P(*[axes[0] if axes else None for axes in after])
    changes = [
        change(old, trial_of(function, spec).report)
        for old, function in zip(reports[:2], (combine, sum_up), strict=True)
    ]
    own = [next(a for a in old.advice if shared.text.startswith(a.text)) for old in reports[:2]]
    assert changes == [(each.seconds, each.memory_bytes) for each in own]
    step, total = (each.seconds or 0.0 for each in own)
    assert shared.seconds == pytest.approx(3 * step + 2 * total)
    assert shared.memory_bytes == max(each.memory_bytes or 0 for each in own)
    assert shared.outcome == "helps" and reports[2] == trials[2].report


def split_layers(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        return ((jnp.tanh(x @ weights["up"]) @ weights["down"]) ** 2).mean()

    return jax.grad(loss)(weights)


@pytest.mark.slow
@pytest.mark.parametrize("transform", [jax.jit, xlashard.pjit])
def test_order_of_the_mesh_is_tried_where_an_axis_of_much_traffic_lies_on_slow_links(
    transform: Any,
) -> None:
    pod = tpu.topology("v5e-4", 2)
    # The last axis has the fast links: products over `model` are summed between the slices.
    poor = pod.mesh({"model": 4, "data": 2})
    specs = {"up": P(None, "model"), "down": P("model", None)}
    weights = {
        "up": jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16),
        "down": jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16),
    }
    x = jax.ShapeDtypeStruct((32768, 1024), jnp.bfloat16)

    def report_with(mesh: Any, **options: Any) -> PreflightReport:
        named = {path: jax.NamedSharding(mesh, spec) for path, spec in specs.items()}
        shardings = (named, jax.NamedSharding(mesh, P("data")))
        step = transform(split_layers, in_shardings=shardings, out_shardings=named)
        return preflight(step, weights, x, topology=pod, **options)

    before = report_with(poor)
    (advice,) = (each for each in before.advice if each.changes[0].order)
    (change_of_order,) = advice.changes
    assert change_of_order.order == ("model", "data") and advice.seconds < 0
    assert "model from" in advice.text and "DCN to" in advice.text
    better = pod.mesh({"model": 4, "data": 2}, order=change_of_order.order)
    after = report_with(better, estimate=True)
    assert change(before, after) == (advice.seconds, advice.memory_bytes)
    assert "order=" not in str(report_with(better))
