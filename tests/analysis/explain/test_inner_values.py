"""Shardings that the partitioner chooses for values inside of a program."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import xlashard as xs
from tests.core.pjit.helpers import f32, make_mesh
from tests.message_patterns import naming
from xlashard import ProgramReport, explain
from xlashard.analysis.explain.inner_values import short_name
from xlashard.errors import ArgumentError
from xlashard.support.formatting import plain_text

pytestmark = [pytest.mark.partitioner, pytest.mark.usefixtures("partitioner")]

MESH = make_mesh((4, 2), ("data", "model"))


def named(*spec):
    return jax.sharding.NamedSharding(MESH, P(*spec))


def shape(dims, *spec):
    return jax.ShapeDtypeStruct(dims, np.float32, sharding=named(*spec))


def layer(x, w):
    with jax.named_scope("attention"):
        scores = checkpoint_name(jnp.tanh(x @ w["up"]), "scores")
    return scores @ w["down"], None


def loss(w, x):
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, w)
    with jax.named_scope("logits"):
        logits = x @ w["up"][0]
    return (logits**2).mean()


WEIGHTS = {"up": shape((3, 16, 32), None, None, "model"), "down": shape((3, 32, 16), None, "model")}
BATCH = shape((64, 16), "data")


@pytest.mark.parametrize("jit", [jax.jit, xs.pjit])
def test_values_of_a_scan_and_of_both_passes(jit):
    report = explain(jit(jax.grad(loss)), WEIGHTS, BATCH, values="scores|logits")

    def rows(name, in_pass):
        return [v for v in report.values if v.name == name and v.in_pass == in_pass]

    for in_pass in ("forward", "rematerialized"):
        (scores,) = rows("scores", in_pass)
        # The value of one iteration.
        assert scores.type == "float32[64,32]" and scores.times == 3
        assert scores.spec == "P('data', 'model')" and scores.copies == 1
        assert scores.device_bytes == 64 * 32 * 4 // 8
        assert scores.op_name.endswith("attention/tanh")
        assert scores.source.file == __file__ and scores.source.function == "layer"
    (logits,) = rows("logits/dot_general", "forward")
    assert (logits.spec, logits.times) == ("P('data', 'model')", 1)
    backward = rows("logits/dot_general", "backward")
    assert {(v.type, v.spec, v.copies) for v in backward} == {
        ("float32[32,16]", "P('model')", 4),
        ("float32[64,16]", "P('data')", 2),
    }
    assert ProgramReport.from_json(report.to_json()) == report
    text = plain_text(report.renderable(all=True), 140)
    assert "Values inside" in text and "rematerialized, 3 times" in text and "f32[64,32]" in text
    page = report.to_html()
    assert "Values inside" in page and "logits/<wbr>dot_general" in page


def test_chosen_sharding_is_the_one_of_the_value_as_a_result():
    def inner(x, w):
        with jax.named_scope("hidden"):
            hidden = jnp.tanh(x @ w)
        return hidden, hidden.sum()

    for specs in [("data", None), (None, "model"), (("data", "model"), None), (None, None)]:
        args = shape((64, 16), specs[0]), shape((16, 32), None, specs[1])
        report = explain(jax.jit(inner), *args, values="hidden/tanh")
        (hidden,) = report.values
        assert hidden.spec == report.outputs[0].spec
        assert hidden.device_bytes == report.outputs[0].device_bytes
        assert hidden.copies == report.outputs[0].copies


def test_uneven_value_has_the_bytes_of_its_padded_shard():
    def inner(x):
        return jax.lax.with_sharding_constraint(jnp.sin(x), named("data")).sum()

    (value, *_) = explain(jax.jit(inner), shape((10, 4)), values="sin$").values
    assert value.device_bytes in (3 * 4 * 4, 10 * 4 * 4)


def test_value_in_shard_map_is_a_shard():
    def inner(x):
        return jax.shard_map(jnp.sin, mesh=MESH, in_specs=P("data"), out_specs=P("data"))(x).sum()

    (value,) = explain(jax.jit(inner), shape((8, 4), "data"), values="sin").values
    assert (value.spec, value.type, value.copies) == ("in shard_map", "float32[2,4]", 0)
    assert value.device_bytes == 2 * 4 * 4
    assert value.op_name == "jit(inner)/shard_map/sin"


def test_modules_have_values_by_their_functions_and_lines():
    class Attention(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(f32(16, 32))

        def __call__(self, x):
            return jnp.tanh(x @ self.w[...])

    with jax.set_mesh(MESH):
        (of_nnx,) = explain(
            nnx.jit(lambda m, x: m(x).sum()), Attention(), BATCH, values="__call__.*|tanh"
        ).values[:1]
    model = eqx.nn.MLP(16, 4, 32, 1, key=jax.random.key(0))
    report = explain(
        eqx.filter_jit(lambda m, x: jax.vmap(m)(x).sum()), model, BATCH, values="dot_general"
    )
    assert of_nnx.spec == "P('data')"
    assert {(v.shape, v.spec) for v in report.values} == {
        ((32, 64), "P(None, 'data')"),
        ((4, 64), "P(None, 'data')"),
    }


def test_stages_have_values_as_far_as_they_keep_the_module():
    lowered = jax.jit(jax.grad(loss)).lower(WEIGHTS, BATCH)
    by_scope = explain(lowered, values="attention/tanh").values
    # Names are not in the module.
    assert {v.in_pass for v in by_scope} == {"forward", "rematerialized"}
    assert "no value has such a name" in explain(lowered, values="scores").values[0].reason
    with pytest.raises(ArgumentError, match=naming("values='tanh'", "pass its Lowered")):
        explain(lowered.compile(), values="tanh")


def test_names_without_an_operation_are_unknown():
    def inner(x):
        total, _ = jax.lax.scan(lambda c, y: (c + y, None), x[0], x)
        return checkpoint_name(x, "input").sum() + checkpoint_name(total, "total").sum()

    values = explain(jax.jit(inner), shape((8, 4), "data"), values="input|total").values
    assert {(v.name, v.spec, v.device_bytes) for v in values} == {
        ("input", "unknown", 0),
        ("total", "unknown", 0),
    }
    assert all("argument, or a result of a loop" in v.reason for v in values)


def test_pattern_without_a_match_has_the_closest_names():
    report = explain(jax.jit(loss), WEIGHTS, BATCH, values="atention|logit$")
    (row,) = report.values
    assert row.count == 0 and "attention" in row.reason and "logits" in row.reason


def test_argument_named_values_passes_through():
    report = explain(jax.jit(lambda values: values + 1), values=f32(4))
    assert report.inputs[0].path == "values" and report.values == ()


def test_program_of_one_device_has_whole_values():
    value, total = explain(jax.jit(lambda x: jnp.sin(x).sum()), f32(8, 4), values="sin|sum").values
    assert (value.spec, value.device_bytes, value.copies) == ("device 0", 128, 1)
    assert (total.name, total.device_bytes, total.count) == ("reduce_sum", 4, 1)


def test_short_names_have_scopes_and_operations():
    assert short_name("jit(f)/jvp(a)/while/body/closed_call/jit(relu)/max") == "a/relu/max"
