"""`explain` of functions made without this package: the same facts as under `pjit`."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import xlashard
from tests.core.pjit.helpers import f32, make_mesh
from tests.message_patterns import naming
from xlashard import explain, testing
from xlashard.errors import ArgumentError

MESH = make_mesh((4, 2), ("data", "model"))


def named(*spec: Any) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(MESH, P(*spec))


def placed(value: Any, *spec: Any) -> jax.Array:
    return jax.device_put(value, named(*spec))


class Program(NamedTuple):
    """Function, the options of its `jit`, and the arguments of a call."""

    fun: Any
    options: dict[str, Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = MappingProxyType({})
    mesh: Any = None


def plain() -> Program:
    return Program(lambda x, y: (x @ y, x.sum()), {}, (placed(f32(8, 16), "data"), f32(16, 4)))


def with_options() -> Program:
    def step(state, batch, *, rate):
        loss, grad = jax.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(state["w"])
        return {"w": state["w"] - rate * grad}, loss

    rows = named("data")
    return Program(
        step,
        {"out_shardings": ({"w": named()}, None), "donate_argnums": 0},
        ({"w": placed(f32(8, 16))}, jax.ShapeDtypeStruct((64, 8), np.float32, sharding=rows)),
        {"rate": 0.1},
    )


def unused_donation() -> Program:
    options = {
        "in_shardings": (named("data"), named(None, "model")),
        "donate_argnums": (0, 1),
        "keep_unused": True,
    }
    return Program(lambda x, y: x.astype(jnp.bfloat16), options, (f32(8, 8), f32(8, 8)))


def static() -> Program:
    def scaled(x, times, *, power):
        return (x**power * times,)

    options = {"static_argnums": 1, "static_argnames": "power"}
    return Program(scaled, options, (placed(f32(8, 4), "data"), 3), {"power": 2})


def closing_over() -> Program:
    table = placed(f32(64, 8), "data", "model")
    return Program(lambda ids: table[ids], {}, (placed(np.arange(16), "data"),))


def scan_with_constraints() -> Program:
    def run(layers, x):
        def layer(x, w):
            x = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), P("data", "model"))
            return jax.lax.with_sharding_constraint(x, named("data")), None

        return jax.lax.scan(layer, x, layers)[0]

    args = placed(f32(3, 8, 8), None, None, "model"), placed(f32(16, 8), "data")
    return Program(run, {}, args, mesh=MESH)


def shard_mapped() -> Program:
    def total(x):
        return jax.lax.psum(x, "data")

    mapped = jax.shard_map(
        total, mesh=MESH, in_specs=P("data", "model"), out_specs=P(None, "model")
    )
    return Program(mapped, {}, (placed(f32(8, 8), "data", "model"),))


def explicit() -> Program:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(f32(8, 16), jax.sharding.NamedSharding(mesh, P("data")))
    w = jax.device_put(f32(16, 8), jax.sharding.NamedSharding(mesh, P(None, "model")))

    def apply(x, w):
        return jnp.einsum("bi,io->bo", x, w, out_sharding=P("data")), x.sum()

    return Program(apply, {}, (x, w), mesh=mesh)


def linen_model() -> Program:
    model = linen.Sequential([linen.Dense(16), linen.relu, linen.Dense(4)])
    variables = model.init(jax.random.key(0), jnp.ones((1, 8)))
    variables = jax.tree.map(lambda v: placed(v, None, "model") if v.ndim == 2 else v, variables)
    return Program(
        lambda variables, x: model.apply(variables, x), {}, (variables, placed(f32(8, 8), "data"))
    )


def nnx_model() -> Program:
    model = nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 4, rngs=nnx.Rngs(1)))
    graph, state = nnx.split(model)
    return Program(
        lambda state, x: nnx.merge(graph, state)(x),
        {"in_shardings": (named(), named("data"))},
        (state, f32(8, 8)),
    )


def equinox_model() -> Program:
    model = eqx.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))
    params, rest = eqx.partition(model, eqx.is_array)
    return Program(
        lambda params, x: jax.vmap(eqx.combine(params, rest))(x),
        {"donate_argnames": "x"},
        (params, placed(f32(16, 8), "data")),
    )


def on_one_device() -> Program:
    x = jax.device_put(f32(4), jax.devices()[1])
    return Program(lambda x: x + 1, {"device": jax.devices()[2]}, (x,))


PROGRAMS = [
    plain,
    with_options,
    unused_donation,
    static,
    scan_with_constraints,
    shard_mapped,
    explicit,
    linen_model,
    nnx_model,
    equinox_model,
    on_one_device,
]


def reports(jit: Any, program: Program) -> tuple[Any, Any]:
    """Return the reports of a function and of its traced stage."""
    fun = jit(program.fun, **program.options)
    if program.mesh is None:
        stage = fun.trace(*program.args, **program.kwargs)
        return explain(fun, *program.args, **program.kwargs), explain(stage)
    with jax.set_mesh(program.mesh):
        return reports(jit, program._replace(mesh=None))


def without_module_names(report: Any) -> Any:
    """Return a report whose operations have no `jit(...)` of the function in front."""
    prefix = f"jit({report.name})/"

    def renamed(name: str) -> str:
        return f"{report.name}/{name.removeprefix(prefix)}" if name.startswith(prefix) else name

    collectives = [
        replace(c, op_name=renamed(c.op_name), needed_by=renamed(c.needed_by))
        for c in report.collectives
    ]
    return replace(report, collectives=tuple(collectives))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:backend and device argument:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::xlashard.errors.DonationWarning")
@pytest.mark.parametrize("make", PROGRAMS)
def test_jax_jit_and_xlashard_jit_have_equal_reports(make):
    program = make()
    ours, _ = reports(xlashard.jit, program)
    theirs, of_stage = map(without_module_names, reports(jax.jit, program))
    assert theirs == ours
    assert ours.inputs and ours.outputs
    # A stage of JAX keeps no values, and so no arrays that a call would move.
    assert replace(of_stage, moves=ours.moves, forgotten="") == ours


def struct(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def of_dtype(dtype: Any) -> Program:
    # Seven rows of three elements of less than 8 bits end within a byte.
    args = struct((8, 6), dtype, named("data", "model")), struct((7, 3), dtype)
    return Program(lambda x, y: (x.T, y[1:]), {}, args)


def on_abstract_mesh(place: str) -> Program:
    rows = jax.sharding.NamedSharding(MESH.abstract_mesh, P("data"))
    requests = {"in_shardings": (rows, None), "out_shardings": rows}
    options = {place: requests[place]} if place in requests else {}
    x = struct((8, 8), np.float32, None if options else rows)
    return Program(lambda x, y: x @ y, options, (x, placed(f32(8, 4), None, "model")))


def dropping(result: Any) -> Program:
    return Program(lambda x, y: result(y), {}, (placed(f32(8, 8), "data"), f32(8)))


FIGURES = {
    **{
        str(dtype): partial(of_dtype, dtype)
        for dtype in map(np.dtype, (jnp.int2, jnp.uint4, jnp.float4_e2m1fn, bool, np.complex64))
    },
    "keys": lambda: of_dtype(jax.random.key(0).dtype),
    "float0": lambda: Program(
        jax.grad(lambda x: x.sum() * 1.0, allow_int=True), {}, (np.arange(6),)
    ),
    **{
        f"abstract {place}": partial(on_abstract_mesh, place)
        for place in ("argument", "in_shardings", "out_shardings")
    },
    "mesh of a dropped argument": lambda: dropping(lambda y: y + 1),
    "all arguments dropped": lambda: dropping(lambda y: jnp.ones(4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", FIGURES.values(), ids=FIGURES)
def test_bytes_and_devices_are_those_of_the_compiled_program(make):
    program = make()
    fun = jax.jit(program.fun, **program.options)
    with jax.set_mesh(MESH) if program.mesh else nullcontext():
        compiled, report = fun.lower(*program.args).compile(), explain(fun, *program.args)
    stats = compiled.memory_analysis()
    assert report.memory.argument_bytes == stats.argument_size_in_bytes
    assert sum(v.device_bytes for v in report.inputs) == stats.argument_size_in_bytes
    # Several results have a tuple of pointers.
    pointers = 8 * len(report.outputs) if len(report.outputs) > 1 else 0
    assert sum(v.device_bytes for v in report.outputs) + pointers == stats.output_size_in_bytes
    devices = [s.device_set for s in jax.tree.leaves(compiled.output_shardings)]
    assert [v.copies for v in report.outputs] == [
        len(d) * v.device_bytes // v.nbytes for d, v in zip(devices, report.outputs, strict=True)
    ]
    assert {len(d) for d in devices} == {report.place.num_devices}


def test_closed_over_arrays_are_constants_of_each_device():
    table, rows = placed(f32(64, 8), "data", "model"), named("data")
    layers = {"w": [f32(32, 32), f32(32, 32)]}

    def inner(x):
        return x @ jnp.asarray(layers["w"][0]) @ jnp.asarray(layers["w"][1])

    def lookup(ids):
        return jax.jit(inner)(jnp.zeros((4, 32))).sum() + table[ids].sum() + table.sum()

    ids = jax.ShapeDtypeStruct((16,), np.int32, sharding=rows)
    report = explain(jax.jit(lookup), ids)
    assert [v.path for v in report.inputs] == ["ids"]
    found = {c.path: (c.nbytes, c.argument_bytes, c.spec) for c in report.constants}
    assert found == {
        "inner: layers['w'][0]": (4096, 4096, ""),
        "inner: layers['w'][1]": (4096, 4096, ""),
        "table": (2048, 256, "P('data', 'model')"),
    }
    text = " ".join(str(report).split())
    assert "as an argument with P('data', 'model'): 1.8 KiB less on each device" in text
    compiled = jax.jit(lookup).lower(ids).compile()
    assert report.memory.argument_bytes == compiled.memory_analysis().argument_size_in_bytes == 16
    # pjit passes the table as an argument.
    ours = explain(xlashard.jit(lookup), ids)
    assert ours.constants == () and [v.path for v in ours.inputs] == ["ids", "closed over [0]"]


def test_jaxprs_among_parameters_close_over_values_of_the_trace():
    """Primitives of libraries, such as lineax's, keep a jaxpr that JAX does not lower."""
    held = Primitive("held")
    held.def_impl(lambda x, jaxpr: x)
    held.def_abstract_eval(lambda x, jaxpr: x)
    mlir.register_lowering(held, lambda ctx, x, jaxpr: [x])

    def solve(x):
        scaled = x * 2
        return held.bind(scaled, jaxpr=jax.make_jaxpr(lambda: scaled @ scaled.T)())

    report = explain(jax.jit(solve), placed(f32(8, 16), "data"))
    assert [v.path for v in report.inputs] == ["x"] and report.constants == ()


def test_a_program_that_jax_refuses_is_refused_with_its_reason():
    other = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    constraint = jax.NamedSharding(jax.sharding.Mesh(other.devices[::-1], ("a", "b")), P("a", "b"))
    refused = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, constraint) + 1)
    x = placed(f32(32, 32), "data", "model")
    with pytest.raises(ValueError, match="incompatible devices"):
        refused(x)
    with pytest.raises(ValueError, match="incompatible devices"):
        explain(refused, x)


REPORTS = {
    "explain": explain,
    "preflight": partial(xlashard.preflight, topology="v5e-8", mesh={"data": 4, "model": 2}),
    "auto_shard": partial(xlashard.auto_shard, mesh=MESH),
    "assert_collectives": lambda f, x: testing.assert_collectives(f, (x,), total=0),
}


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.jacfwd])
@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_a_tracer_among_the_arguments_is_named(report, transform):
    fun = jax.jit(lambda batch: batch["x"][0] * 2)

    def inside(x):
        report(fun, {"x": [x]})
        return x

    with pytest.raises(ArgumentError, match=naming("batch['x'][0]", "tracer", "outside")):
        transform(inside)(f32(4))


def with_members(**members: Any) -> Any:
    """Return a callable object with members of the names by which wrappers are recognized."""
    return type("Doubler", (), {"__call__": lambda self, x: x * 2, **members})()


def test_members_of_a_callable_object_do_not_make_it_a_wrapper():
    for name in ("trace", "lower", "_function"):
        report = explain(with_members(**{name: 3.0}), f32(4))
        assert [value.path for value in report.inputs] == ["x"]


def stage_of(kind):
    """Return a stage of a function with a donation that no result can take over."""
    rows = named("data")
    traced = jax.jit(
        lambda x, unused, y: (jnp.tanh(x @ y), y.sum(0)),
        in_shardings=(rows, None, None),
        out_shardings=(named(), None),
        donate_argnums=(0, 2),
    ).trace(f32(16, 8), 1.0, placed(f32(8, 4), None, "model"))
    lowered = traced.lower()
    return {"Lowered": lowered, "Compiled": lowered.compile()}[kind]


@pytest.mark.filterwarnings("ignore:Some donated buffers:UserWarning")
@pytest.mark.parametrize("kind", ["Lowered", "Compiled"])
def test_report_of_a_jax_stage_has_inputs_outputs_and_collectives(kind):
    report = explain(stage_of(kind))
    assert report.name == "<lambda>"
    assert report.place.mesh == (("data", 4), ("model", 2))
    inputs = [(v.path, v.type, v.spec, v.decided_by, v.used) for v in report.inputs]
    assert inputs == [
        ("x", "float32[16,8]", "P('data')", "unknown", True),
        ("unused", "float32[]", "", "default", False),
        ("y", "float32[8,4]", "P(None, 'model')", "unknown", True),
    ]
    chosen = ["caller", "partitioner"] if kind == "Lowered" else ["unknown", "unknown"]
    assert [(v.path, v.decided_by) for v in report.outputs] == [
        (f"result[{i}]", by) for i, by in enumerate(chosen)
    ]
    assert ("all-gather", "data") in [(c.kind, c.along) for c in report.collectives]
    assert {c.source.function.rpartition(".")[2] for c in report.collectives if c.source} == {
        "<lambda>"
    }
    donations = [(d.path, d.donated, d.result) for d in report.donations]
    assert donations == [("x", True, ""), ("y", True, "")]
    unused = [u for u in report.unmet if u.kind == "donation"]
    assert len(unused) == 2 and all("result" in u.reason for u in unused)
    assert report.memory.argument_bytes == 16 * 8 * 4 // 4 + 8 * 4 * 4 // 2
    assert kind in report.forgotten and "moves" in report.forgotten
    assert report.moves == ()
    assert report.forgotten in " ".join(str(report).split())
    assert type(report).from_json(report.to_json()) == report


def test_only_reports_of_stages_list_unavailable_facts():
    assert explain(jax.jit(jnp.sin), f32(4)).forgotten == ""
    assert "moves" in explain(jax.jit(jnp.sin).trace(f32(4))).forgotten


def test_a_lowering_for_another_platform_is_refused():
    lowered = jax.jit(jnp.sin).trace(f32(4)).lower(lowering_platforms=("tpu",))
    with pytest.raises(ArgumentError, match=naming("tpu", "cpu", "lowering_platforms")):
        explain(lowered)


@pytest.mark.slow
def test_constraint_by_spec_uses_the_mesh_in_force():
    def run(rows, whole):
        def layer(x, w):
            x = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), rows)
            return jax.lax.with_sharding_constraint(x * 2, whole), None

        return jax.jit(lambda layers, x: jax.lax.scan(layer, x, layers)[0])

    args = f32(3, 8, 8), placed(f32(16, 8), "data")
    with jax.set_mesh(MESH):
        by_spec = explain(run(P("data", "model"), P("data")), *args)
    by_sharding = explain(run(named("data", "model"), named("data")), *args)
    for report in (by_spec, by_sharding):
        (constraint,) = [u for u in report.unmet if u.kind == "constraint that gathers"]
        assert (constraint.requested, constraint.actual) == ("P('data')", "gathered along model")
    assert [u.nbytes for u in by_spec.unmet] == [u.nbytes for u in by_sharding.unmet]


@pytest.mark.slow
def test_shape_dtype_structs_replace_arrays_in_every_wrapper():
    x = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=named("data"))
    model = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    whole = jax.ShapeDtypeStruct((8, 4), np.float32)
    functions = [
        (eqx.filter_jit(lambda x, model: jax.vmap(model)(x)), (x, model), "argument", 2),
        (nnx.jit(lambda x: x * 2), (x,), "argument", 2),
        (jax.pmap(lambda x: x * 2), (whole,), "caller", 1),
    ]
    for function, args, decided, copies in functions:
        first = explain(function, *args).inputs[0]
        assert (first.path, first.type) == ("x", "float32[8,4]")
        assert (first.decided_by, first.copies) == (decided, copies)


@pytest.mark.slow
def test_partials_methods_and_modules():
    class Scaler:
        def __init__(self):
            self.scale = f32(4)

        @partial(jax.jit, static_argnums=0)
        def by_jit(self, x):
            return x * self.scale

        @partial(xlashard.jit, static_argnums=0)
        def by_pjit(self, x):
            return x * self.scale

        def plain(self, x):
            return x * self.scale

    scaler, module = Scaler(), eqx.nn.Identity()
    scaled = jax.jit(lambda x, times: x * times, static_argnums=1)
    calls = {
        "by_jit": (scaler.by_jit,),
        "by_pjit": (scaler.by_pjit,),
        "plain": (scaler.plain,),
        "partial": (partial(scaler.by_jit),),
        "inside": (jax.jit(partial(lambda x, times: x * times, times=2)),),
        "static": (scaled, 3),
        "module": (eqx.nn.Linear(4, 4, key=jax.random.key(0)),),
        "identity": (module,),
    }
    for name, (function, *more) in calls.items():
        report = explain(function, f32(4), *more)
        assert [v.path for v in report.inputs if v.path[0] != "c"] == ["x"], name
    # The donation and shardings of the function inside a partial are those of its calls.
    given = jax.jit(lambda w, x: x @ w, in_shardings=(named(), named("data")), donate_argnums=1)
    report = explain(partial(given, f32(8, 8)), f32(8, 8))
    assert [(v.path, v.spec) for v in report.inputs] == [("w", "P()"), ("x", "P('data')")]
    assert [d.path for d in report.donations if d.donated] == ["x"]
