"""`explain`: its arguments, its lack of side effects, and the facts of a whole program."""

import json
import warnings
from dataclasses import fields, is_dataclass

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest

import xlashard
from tests.core.pjit.helpers import f32, make_mesh
from tests.message_patterns import naming
from xlashard import NamedSharding, P, explain, pjit, with_sharding_constraint
from xlashard.errors import ArgumentError, DonationWarning, ResourceError, UnevenShardingWarning


def named(mesh, *spec):
    return NamedSharding(mesh, P(*spec))


def train(w, batch):
    """Run a training step of one layer, `[8,16]` parameters and `[64,8]` examples."""
    loss, gradient = jax.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(w)
    return w - 0.1 * gradient, loss


@pytest.fixture
def step(mesh):
    """Data parallelism along `x`, with donated parameters."""
    ins = named(mesh), named(mesh, "x")
    return pjit(train, in_shardings=ins, out_shardings=named(mesh), donate_argnums=0)


def test_inputs_outputs_collectives_and_devices_are_reported(step, partitioner):
    report = explain(step, f32(8, 16), f32(64, 8))
    assert report.name == "train"
    place = report.place
    assert (place.platform, place.num_devices, place.num_processes) == ("cpu", 8, 1)
    assert (place.mesh, place.partitioner) == ((("x", 4), ("y", 2)), partitioner)
    assert (place.xlashard, place.jax) == (xlashard.__version__, jax.__version__)
    assert [
        (v.path, v.type, v.spec, v.nbytes, v.device_bytes, v.copies) for v in report.inputs
    ] == [
        ("w", "float32[8,16]", "P()", 512, 512, 8),
        ("batch", "float32[64,8]", "P('x')", 2048, 512, 2),
    ]
    assert [(v.path, v.type, v.device_bytes) for v in report.outputs] == [
        ("result[0]", "float32[8,16]", 512),
        ("result[1]", "float32[]", 4),
    ]
    # The gradient and the loss, over the data; 2 * 3 / 4 of the bytes for each.
    sent = {(c.kind, c.axes): c.sent_bytes for c in report.collectives}
    assert set(sent) == {("all-reduce", ("x",))}
    assert sum(c.sent_bytes for c in report.collectives) == (512 + 4) * 3 // 2
    assert report.memory.argument_bytes == 1024
    assert report.memory.alias_bytes == 512
    assert report.cost.flops > 2 * 16 * 8 * 16
    assert report.cost.bytes_accessed > 0


def test_mesh_axes_of_size_1_are_counted():
    names = ("pod", "data", "stage", "fsdp", "seq", "tensor", "expert")
    mesh = make_mesh((1, 4, 1, 1, 1, 2, 1), names)
    batch = NamedSharding(mesh, P(("pod", "data", "fsdp"), ("tensor", "expert")))
    for jit in (pjit, jax.jit):
        report = explain(jit(jnp.sum, in_shardings=batch), f32(8, 4))
        assert "data=4 × tensor=2 and 5 axes of size 1" in str(report)
        assert {axis for c in report.collectives for axis in c.axes} == {"data", "tensor"}
        assert report.to_dict()["place"]["mesh"][0] == ["pod", 1]
        assert "data=4 × tensor=2 and 5 axes of size 1" in report.to_html()


def test_call_after_explain_reuses_the_program(mesh, compilations):
    fun = pjit(lambda w, x: (w + x.sum(), x), in_shardings=named(mesh, "x"), donate_argnums=0)
    report = explain(fun, f32(8), f32(16))
    assert compilations.count == 1
    fun(f32(8), f32(16))
    assert explain(fun, f32(8), f32(16)) == report
    assert compilations.count == 1
    # And `explain` finds a call before it.
    fun(f32(16), f32(16))
    assert compilations.count == 2
    explain(fun, f32(16), f32(16))
    assert compilations.count == 2


def test_explain_neither_runs_nor_donates(mesh):
    calls = []

    def noisy(x):
        jax.debug.callback(lambda: calls.append(1))
        return x + 1

    x = xlashard.device_put(f32(8), named(mesh, "x"))
    explain(pjit(noisy, donate_argnums=0), x)
    jax.effects_barrier()
    assert not calls
    assert not x.is_deleted()


def test_shape_dtype_structs_replace_arrays(step):
    batch = jax.ShapeDtypeStruct((64, 8), np.float32)
    report = explain(step, jax.ShapeDtypeStruct((8, 16), np.float32), batch=batch)
    assert report.moves == ()
    with_values = explain(step, f32(8, 16), f32(64, 8))
    assert report.collectives == with_values.collectives
    assert report.inputs == with_values.inputs


def test_specs_are_resolved_on_the_mesh_in_force(mesh):
    double = pjit(lambda x: x * 2, in_shardings=P("y"), out_shardings=P())
    with mesh:
        report = explain(double, f32(8))
    assert [c.along for c in report.collectives] == ["y"]
    with pytest.raises(xlashard.errors.MeshError):
        explain(double, f32(8))


def test_stages_are_explained_without_arguments(step):
    report = explain(step, f32(8, 16), f32(64, 8))
    traced = step.trace(f32(8, 16), f32(64, 8))
    assert explain(traced) == explain(traced.lower()) == report
    # A compiled program has neither the arguments of the call nor the function.
    compiled = explain(traced.lower().compile())
    assert compiled.moves == ()
    assert {v.decided_by for v in compiled.inputs} == {"unknown"}
    assert [v.spec for v in compiled.inputs] == [v.spec for v in report.inputs]
    assert compiled.donations == report.donations
    assert [c.sent_bytes for c in compiled.collectives] == [
        c.sent_bytes for c in report.collectives
    ]


@pytest.mark.parametrize("value", [f32(3), "step"])
def test_explain_refuses_a_value_instead_of_a_function(value):
    with pytest.raises(ArgumentError, match=naming(type(value).__name__, "xlashard.explain(f, x)")):
        explain(value, f32(8))


def test_stages_with_arguments_and_calls_inside_a_trace_are_refused(step):
    lowered = step.lower(f32(8, 16), f32(64, 8))
    with pytest.raises(ArgumentError, match=naming("Lowered", "xlashard.explain(")):
        explain(lowered, f32(8, 16))
    double = pjit(lambda x: x * 2)
    with pytest.raises(ArgumentError, match=naming("<lambda>", "tracer", "outside")):
        jax.jit(lambda x: explain(double, x))(f32(8))
    other = double.trace(f32(8)).lower(lowering_platforms=("tpu",))
    with pytest.raises(ArgumentError, match=naming("tpu", "cpu", "lowering_platforms")):
        explain(other)


def test_explain_raises_the_errors_of_a_call(step):
    with pytest.raises(ResourceError, match="batch"):
        explain(step, f32(8, 16), f32(62, 8))


def test_single_device_report_has_no_collectives():
    report = explain(pjit(lambda x: x @ x), f32(4, 4))
    assert (report.collectives, report.unmet, report.place.mesh) == ((), (), ())
    assert [v.spec for v in report.inputs] == [f"device {jax.devices()[0].id}"]


def test_a_report_is_a_frozen_value_of_plain_frozen_values(step):
    report = explain(step, f32(8, 16), f32(64, 8))
    with pytest.raises(AttributeError):
        report.name = "other"
    assert hash(report) == hash(explain(step, f32(8, 16), f32(64, 8)))

    def check(value):
        if is_dataclass(value):
            for field in fields(value):
                check(getattr(value, field.name))
        elif isinstance(value, tuple):
            for item in value:
                check(item)
        else:
            assert isinstance(value, str | int | float | None)

    check(report)


@pytest.mark.slow
def test_report_round_trips_through_json(step, mesh):
    def constrained(x):
        x = xlashard.with_sharding_constraint(jnp.sin(x), named(mesh, "x", "y"))
        return xlashard.with_sharding_constraint(jnp.cos(x), named(mesh, "x"))

    for fun, args in ((step, (f32(8, 16), f32(64, 8))), (pjit(constrained), (f32(8, 8),))):
        report = explain(fun, *args)
        assert xlashard.ProgramReport.from_json(report.to_json()) == report
        data = report.to_dict()
        assert data == json.loads(report.to_json(indent=None))
        jsonschema.validate(data, xlashard.ProgramReport.json_schema())
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**data, "format": 0}, xlashard.ProgramReport.json_schema())
        assert data["format"] == 2
        assert data["inputs"][0]["shape"] == list(args[0].shape)


@pytest.mark.parametrize(
    ("text", "facts"),
    [('{"format": 99}', ("99", "format 2")), ("{}", ("format",)), ("[]", ("format",))],
)
def test_json_of_an_unsupported_format_is_refused(text, facts):
    with pytest.raises(ArgumentError, match=naming(*facts, "xlashard.explain(")):
        xlashard.ProgramReport.from_json(text)


@pytest.mark.slow
def test_keys_and_closed_over_arrays_are_inputs(mesh):
    table = xlashard.device_put(f32(16, 4), named(mesh, "x"))

    def draw(key, unused):
        return jax.random.uniform(key, (4,)) + table.sum()

    report = explain(pjit(draw), jax.random.key(0), f32(3))
    found = {v.path: (v.nbytes, v.device_bytes, v.used, v.decided_by) for v in report.inputs}
    assert found["key"][:3] == (8, 8, True)
    assert found["unused"][:3] == (12, 0, False)
    assert found["closed over [0]"] == (256, 64, True, "function")


def test_collectives_on_a_three_axis_mesh_are_named_by_axes(partitioner):
    mesh = make_mesh((2, 2, 2), ("a", "b", "c"))
    total = pjit(lambda x: x.sum(), in_shardings=named(mesh, ("a", "c")))
    report = explain(total, f32(16))
    assert sorted({name for c in report.collectives for name in c.axes}) == ["a", "c"]


def test_effect_tokens_are_not_listed_as_values():
    def shout(unused, x):
        jax.debug.print("x", ordered=True)
        return x.sum(), x + 1

    report = explain(pjit(shout, donate_argnums=1), f32(3), f32(8))
    assert [(v.path, v.used) for v in report.inputs] == [("unused", False), ("x", True)]
    assert [(d.path, d.result) for d in report.donations] == [("x", "result[1]")]
    assert [v.path for v in report.outputs] == ["result[0]", "result[1]"]


def test_totals_are_grouped_by_kind_and_axes(mesh):
    def f(x, w):
        return (x @ w).sum(), w * 2

    ins = named(mesh, "x"), named(mesh, None, "x")
    outs = named(mesh), named(mesh)
    report = explain(pjit(f, in_shardings=ins, out_shardings=outs), f32(64, 8), f32(8, 16))
    totals = {(t.kind, t.along): (t.count, t.result_bytes) for t in report.totals}
    assert totals[("all-gather", "x")][1] % (8 * 16 * 4) == 0
    assert totals[("all-reduce", "x")] == (1, 4)
    assert sum(t.sent_bytes for t in report.totals) == sum(c.sent_bytes for c in report.collectives)
    assert sum(t.count for t in report.totals) == sum(c.count for c in report.collectives)


def test_stablehlo_programs_are_explained(mesh):
    module = """
        func.func @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
          %y = stablehlo.add %x, %x : tensor<8x4xf32>
          return %y : tensor<8x4xf32>
        }"""
    program = xlashard.compile_stablehlo(
        module, in_shardings=named(mesh, "x"), out_shardings=named(mesh), name="double"
    )
    report = explain(program)
    assert (report.name, [c.kind for c in report.collectives]) == ("double", ["all-gather"])
    assert [v.spec for v in (*report.inputs, *report.outputs)] == ["P('x')", "P()"]
    assert "double  8 devices" in str(report)


def test_references_are_inputs_and_their_writes_are_outputs(mesh):
    total, seen = jax.new_ref(jnp.zeros(8)), jax.new_ref(jnp.ones(4))

    def add(reference, x):
        reference[...] += x
        total[...] += x
        return (x * seen[...].sum()).sum()

    report = explain(pjit(add), jax.new_ref(jnp.zeros(8)), f32(8))
    assert {v.path: v.nbytes for v in report.inputs} == {
        "reference": 32,
        "x": 32,
        "closed over [0]": 32,
        "closed over [1]": 16,
    }
    assert sorted((v.path, v.nbytes) for v in report.outputs) == [
        ("closed over as written", 32),
        ("reference as written", 32),
        ("result", 4),
    ]
    assert "reference as written" in str(report)


def test_references_are_not_donated():
    def add(reference, x):
        reference[...] += x
        return x * 2

    report = explain(pjit(add), jax.new_ref(jnp.zeros(8)), f32(8))
    assert "reference" not in [d.path for d in report.donations]


@pytest.mark.devices(8)
def test_explicit_axes_are_named():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(f32(8, 8), jax.NamedSharding(mesh, P("x", "y")))
        report = explain(pjit(lambda x: x.sum(1)), x)
    assert [(c.kind, c.axes) for c in report.collectives] == [("all-reduce", ("y",))]
    assert [v.spec for v in (*report.inputs, *report.outputs)] == ["P('x', 'y')", "P('x')"]


def test_a_function_without_arguments_or_results_is_explained():
    report = explain(pjit(lambda: None))
    assert (report.inputs, report.outputs) == ((), ())
    assert "holds" in str(report)


def test_a_loaded_program_is_explained(step):
    compiled = step.lower(f32(8, 24), f32(64, 8)).compile()
    report, loaded = explain(compiled), explain(type(compiled).deserialize(compiled.serialize()))
    assert loaded.collectives == report.collectives
    assert loaded.inputs == report.inputs
    assert loaded.donations == report.donations
    assert loaded.place == report.place
    assert {v.decided_by for v in loaded.outputs} == {"unknown"}
    assert "decided by" not in str(loaded)


def test_gather_of_a_donated_argument_names_its_source_file(mesh):
    def f(x):
        return with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P("x"))) * 2

    rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    f = pjit(f, in_shardings=rows, out_shardings=whole, donate_argnums=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DonationWarning)
        text = str(explain(f, f32(8, 8)))
    assert "all-gather" in text and "unknown to XLA" not in text
    assert "test_explain.py" in text


def test_gather_that_xla_adds_for_a_result_names_its_source_file(mesh):
    def f(x):
        return with_sharding_constraint(jnp.sin(x)[:6], NamedSharding(mesh, P("x"))) * 2

    rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    with pytest.warns(UnevenShardingWarning, match="size 6"):
        report = explain(pjit(f, in_shardings=rows, out_shardings=whole), f32(8, 8))
    (padded,) = report.unmet
    assert "padded to 8, 4 tiles of 2 along x, 1 of padding alone" in padded.actual
    text = str(report)
    assert "all-gather" in text and "unknown to XLA" not in text
    assert "test_explain.py" in text


def test_unknown_trip_count_is_listed_as_not_understood():
    def grow(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x)

    report = explain(pjit(grow), f32(8))
    assert report.not_understood == (("loop of unknown trip count", 1),)
    assert "loop of unknown trip count" in str(report)
    assert explain(pjit(lambda x: x + 1), f32(8)).not_understood == ()
