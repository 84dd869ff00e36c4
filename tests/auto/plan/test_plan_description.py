"""Logical axes of arguments, and their rules."""

import jax
import jax.numpy as jnp
import pytest

from tests.auto.examples import hand_layout, shapes, step
from xlashard import P, pjit
from xlashard.auto.auto_program import read_program
from xlashard.auto.plan.plan_description import axis_rules, describe_axes, logical_axes


def test_layouts_are_named_by_what_each_axis_does():
    fun = pjit(step, donate_argnums=0)
    program = read_program(fun, shapes(), {}, {"data": 4, "model": 2})
    both = ("data", "model")
    for state, batch, title in (
        (P(), P(both), "data over data × model"),
        (P(both), P(both), "FSDP over data × model"),
        (P(None, "model"), P("data"), "data over data, tensor over model"),
        (P("data", "model"), P("data"), "FSDP over data, tensor over model"),
        (P(), P(None, "model"), "replicated over data, tensor over model"),
    ):
        layout = hand_layout(program.program, "auto(data>model, 0.4); inside: none", state, batch)
        assert describe_axes(program, layout) == f"{title}, nothing pinned inside"
    stateless = read_program(lambda w, x: w @ x, [jnp.ones((8, 8))] * 2, {}, {"data": 8})
    assert describe_axes(stateless, hand_layout(stateless.program, "data")) == ""


def test_logical_axes_are_read_from_flax_boxes():
    linen = pytest.importorskip("flax.linen")
    params = {"mlp": {"up": linen.Partitioned(jnp.ones((4, 8)), names=("embed", "mlp"))}}
    state = {"params": params, "step": 0, "names": ("a", "b")}
    assert logical_axes((state,)) == ((), (), ("embed", "mlp"), ())
    assert logical_axes(jax.eval_shape(lambda: params)) == (("embed", "mlp"),)


def test_rules_of_logical_axes_follow_the_most_bytes():
    rules = axis_rules(
        [
            (("embed", "mlp"), P("data", "model"), 1000),
            (("mlp", "embed"), P("model"), 10),
            (("heads", None), P(("data", "model")), 10),
        ]
    )
    assert rules == (("embed", ("data",)), ("heads", ("data", "model")), ("mlp", ("model",)))
