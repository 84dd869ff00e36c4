"""Logical axes of arguments, and their rules."""

import jax
import jax.numpy as jnp
import pytest

from tests.auto.examples import hand_layout, shapes, step
from xlashard import P, auto_shard, pjit
from xlashard.auto.auto_program import read_program
from xlashard.auto.plan.plan_description import (
    axis_rules,
    describe_axes,
    logical_axes,
    spec_by_names,
)
from xlashard.auto.plan.plan_model import spec_of_text, text_of_spec


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


def test_rules_give_each_mesh_axis_to_one_dimension_that_it_divides():
    rules, sizes = (
        {"a": ("data",), "b": ("data", "model"), "c": ("model",)},
        {"data": 4, "model": 2},
    )
    for names, shape, spec in (
        (("a", "b"), (8, 8), P("data", "model")),
        (("b", "a"), (8, 8), P(("data", "model"))),
        (("a", "c"), (6, 8), P(None, "model")),
        ((None, "d"), (8, 8), P()),
    ):
        assert spec_by_names(names, rules, shape, sizes) == spec


@pytest.mark.slow
def test_tied_plans_have_one_spec_for_each_logical_name_and_for_equal_layers():
    linen = pytest.importorskip("flax.linen")

    def box(*names):
        shape = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        return linen.LogicallyPartitioned(shape, names)

    def loss(params, scale, x):
        for layer, factor in zip(params, scale, strict=True):
            x = jnp.tanh(x @ layer["up"].value * factor) @ layer["down"].value
        return (x**2).sum()

    params = [{"up": box("embed", "mlp"), "down": box("mlp", "embed")} for _ in range(2)]
    scale = [jax.ShapeDtypeStruct((128,), jnp.float32) for _ in range(2)]
    x = jax.ShapeDtypeStruct((512, 128), jnp.float32)
    mesh = {"data": 4, "model": 2}
    free = auto_shard(jax.jit(jax.grad(loss)), params, scale, x, mesh=mesh)
    plan = auto_shard(jax.jit(jax.grad(loss)), params, scale, x, mesh=mesh, tie="names")
    assert plan.beyond_rules == 0
    assert plan.untied_seconds == free.chosen.seconds
    rules, sizes = plan.logical_axis_rules(), dict(mesh)
    axes = {name: axes or () for name, axes in rules.items()}
    for value in plan.inputs[:4]:
        names = ("embed", "mlp") if "up" in value.path else ("mlp", "embed")
        assert value.spec == text_of_spec(spec_by_names(names, axes, value.shape, sizes))
    assert plan.inputs[4].spec == plan.inputs[5].spec
    with linen.logical_axis_rules(list(rules.items())):
        spec = linen.logical_to_mesh_axes(("embed", "mlp"))
    up = next(value for value in plan.inputs if "up" in value.path)
    assert spec_of_text(up.spec) == P(*spec) or up.spec == text_of_spec(spec)
    yaml = pytest.importorskip("yaml")
    text = plan.logical_axis_rules_yaml()
    read = yaml.safe_load(text)["logical_axis_rules"]
    assert read == [[name, list(axes[name])] for name in rules]
