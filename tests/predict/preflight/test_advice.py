"""Suggestions that are tried: what they change is what the changed program reports."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xlashard
from xlashard import P, PreflightReport, preflight, tpu
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
