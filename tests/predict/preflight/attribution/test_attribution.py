"""Causes of collectives, and suggestions that remove them."""

import jax
import jax.numpy as jnp
import pytest

import xlashard
from tests.jax_releases import since_jaxlib
from tests.predict.preflight.scheduled import scheduled
from xlashard import NamedSharding, P
from xlashard.hlo import read
from xlashard.predict.preflight.attribution.attribution import describe_traffic
from xlashard.predict.preflight.attribution.hlo_dataflow import HloDataflow
from xlashard.predict.preflight.attribution.step_lines import add_lines
from xlashard.predict.preflight.time_estimate import estimate_time, schedule_step
from xlashard.tpu import topology

PLACE = topology("v5e:2x4")
MESH = PLACE.mesh({"data": 2, "model": 4})


def struct(shape, *spec, mesh=MESH):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))


def constrained(x, *spec):
    return xlashard.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def traffic(function, *arguments, **how):
    return describe_traffic(scheduled(function, *arguments, **how), PLACE, MESH)[0]


def causes(reports):
    return sorted((r.kind, r.along, r.origin) for r in reports)


def loss(params, x):
    hidden = jnp.tanh(x @ params["up"])
    return jnp.mean((hidden @ params["down"]) ** 2)


def step(params, x):
    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x))


def layout_of(params):
    return jax.tree.map(lambda p: p.sharding, params)


def test_gradient_is_all_reduced_along_the_data_axis():
    params = {
        "up": struct((1024, 2048), None, "model"),
        "down": struct((2048, 1024), "model", None),
    }
    x = struct((4096, 1024), "data", None)
    found = traffic(step, params, x, out_shardings=layout_of(params))
    assert causes(found) == [
        ("all-reduce", "data", "gradient"),
        ("all-reduce", "model", "reduction"),
    ]
    assert all(r.requested and not r.suggestion for r in found)


@since_jaxlib("0.11.1", "XLA keeps no source of its own gathers")
def test_fsdp_gathers_parameters_and_scatters_gradients():
    params = {
        "up": struct((1024, 2048), "data", "model"),
        "down": struct((2048, 1024), "model", "data"),
    }
    x = struct((4096, 1024), "data", None)
    found = traffic(step, params, x, out_shardings=layout_of(params))
    assert set(causes(found)) == {
        ("all-gather", "data", "argument"),
        ("all-reduce", "model", "reduction"),
        ("reduce-scatter", "data", "gradient"),
    }
    assert {r.argument for r in found} == {"", "params['up']", "params['down']"}


@since_jaxlib("0.11.1", "XLA keeps no source of its own gathers")
@pytest.mark.parametrize("by_scan", [False, True])
def test_gathers_that_remat_repeats_are_named_so(by_scan):
    def layer(x, w):
        x = constrained(jnp.tanh(x @ w["up"]), "data", None)
        return x @ w["down"], None

    def run(params, x):
        if by_scan:
            x = jax.lax.scan(jax.checkpoint(layer), x, params)[0]
        else:
            for i in range(2):
                x = jax.checkpoint(layer)(x, jax.tree.map(lambda w, i=i: w[i], params))[0]
        return jnp.mean(x**2)

    params = {
        "up": struct((2, 1024, 2048), None, "data", None),
        "down": struct((2, 2048, 1024), None, "data", None),
    }
    x = struct((4096, 1024), "data", None)
    found = traffic(jax.grad(run), params, x, out_shardings=layout_of(params))
    gathers = [r for r in found if r.kind == "all-gather"]
    repeated = [r for r in gathers if r.origin == "rematerialization"]
    assert 0 < len(repeated) < len(gathers)
    assert {r.origin for r in gathers} == {"argument", "rematerialization"}
    assert all(r.requested and not r.suggestion for r in gathers)


def test_windowed_matmuls_keep_their_collectives():
    mesh = PLACE.mesh({"data": 4, "model": 2})
    params = {"up": struct((1024, 4096), "data", "model", mesh=mesh)}
    x = struct((8192, 1024), "data", None, mesh=mesh)

    def tail(params, x):
        gradients = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["up"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients)

    compilation = scheduled(tail, params, x, out_shardings=layout_of(params))
    found = describe_traffic(compilation, PLACE, mesh)[0]
    rings = [r for r in found if r.kind == "collective-permute"]
    assert {(r.origin, r.along) for r in rings} == {
        ("argument", "data"),
        ("gradient", "data"),
    }
    assert all(r.requested and not r.suggestion for r in found)


MERGED = """HloModule m, num_partitions=8

%slice (a: f32[2,4], at: s32[]) -> f32[1,4] {
  %a = f32[2,4]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %s = f32[1,4]{1,0} dynamic-slice(%a, %at, %zero), dynamic_slice_sizes={1,4}
}

ENTRY %main (up: f32[2,4], at: s32[]) -> f32[8,4] {
  %up = f32[2,4]{1,0} parameter(0), metadata={op_name="params['up']"}
  %at.1 = s32[] parameter(1), metadata={op_name="at"}
  %start = ((f32[2,4], s32[]), f32[1,4], u32[]) fusion-start(%up, %at.1), kind=kLoop, calls=%slice
  %done = f32[1,4]{1,0} fusion-done(%start)
  ROOT %g = f32[8,4]{1,0} all-gather(%done), replica_groups=[1,8]<=[8], dimensions={0}
}"""


def test_a_slice_beside_other_work_is_one_of_its_argument():
    module = read(MERGED)
    home = module.computations[module.entry]
    assert HloDataflow(module).argument(home, "done") == "params['up']"


def test_gradient_of_a_constraint_is_required():
    def loss(x):
        moved = constrained(jnp.sin(constrained(jnp.sin(x), "data", None)), None, "data")
        return jnp.mean(jnp.sin(moved) ** 2)

    x = struct((1024, 1024), "data", None)
    found = traffic(jax.grad(loss), x, out_shardings=x.sharding)
    moves = {r.origin for r in found if r.kind == "all-to-all"}
    assert moves == {"constraint"} and sum(r.count for r in found) > 1
    assert all(r.requested for r in found)


def test_constraint_that_unshards_a_dimension_causes_an_all_gather():
    def closed(x, w):
        return jnp.exp(constrained(x @ w, "data", None))

    found = traffic(closed, struct((1024, 1024), "data", None), struct((1024, 1024), None, "model"))
    assert causes(found) == [("all-gather", "model", "constraint")]


def test_all_gather_for_a_replicated_result_is_required():
    whole = NamedSharding(MESH, P())
    found = traffic(jnp.sin, struct((1024, 1024), "data", None), out_shardings=whole)
    assert causes(found) == [("all-gather", "data", "result")]


def test_collectives_of_a_shard_map_are_required():
    def summed(x):
        return jax.shard_map(
            lambda x: jax.lax.psum(x, "model"),
            mesh=MESH,
            in_specs=P("data", "model"),
            out_specs=P("data", None),
        )(x)

    found = traffic(summed, struct((1024, 1024), "data", "model"))
    assert causes(found) == [("all-reduce", "model", "explicit")]


def add(x, y):
    return x + y


def add_later(x, y):
    z = jnp.tanh(y) * 2
    return x + z


def merge(x):
    return jnp.sin(x).reshape(x.shape[0] * x.shape[1] // 64, 64)


def accumulate(x):
    return jnp.cumsum(x, axis=1)


ROWS, COLUMNS = ("data", None), (None, "data")
BY_ROWS = {"out_shardings": NamedSharding(MESH, P("data", None))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "before", "suggestion", "after", "how"),
    [
        (add, (ROWS, COLUMNS), "pass in_shardings P('data', None) for y", (ROWS, ROWS), BY_ROWS),
        (
            add_later,
            (ROWS, COLUMNS),
            "pass in_shardings P('data', None) for y",
            (ROWS, ROWS),
            BY_ROWS,
        ),
        (merge, (COLUMNS,), "pass in_shardings P('data', None) for x", (ROWS,), {}),
        (accumulate, (COLUMNS,), "pass in_shardings P('data', None) for x", (ROWS,), {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_suggestion_removes_the_collective(function, before, suggestion, after, how):
    def found(specs):
        arguments = [struct((1024, 1024), *spec) for spec in specs]
        return traffic(function, *arguments, **how)

    reports = found(before)
    assert {r.origin for r in reports} == {"resharding"}
    assert not any(r.requested for r in reports)
    assert {r.suggestion for r in reports} == {suggestion}
    assert found(after) == ()


@pytest.mark.slow
@pytest.mark.parametrize("indices", [("data", None), (None, "data")])
def test_no_suggestion_for_a_lookup_unshards_the_table(indices):
    rows = jax.ShapeDtypeStruct((64, 256), jnp.int32, sharding=NamedSharding(MESH, P(*indices)))
    out = NamedSharding(MESH, P(*indices, None))

    def found(*spec):
        table = struct((1024, 1024), *spec)
        return traffic(lambda table, rows: table[rows], table, rows, out_shardings=out)

    for before in ((None, "data"), ("data", None)):
        suggestions = {report.suggestion for report in found(*before) if not report.requested}
        assert suggestions == {""}


@pytest.mark.slow
def test_suggestion_for_a_lookup_by_columns_keeps_the_indices_sharded():
    out, table = NamedSharding(MESH, P(None, None, "data")), struct((1024, 1024), None, "data")

    def found(*spec):
        rows = jax.ShapeDtypeStruct((64, 256), jnp.int32, sharding=NamedSharding(MESH, P(*spec)))
        return traffic(lambda table, rows: table[rows], table, rows, out_shardings=out)

    (moved,) = [report for report in found(None, "data") if not report.requested]
    assert moved.suggestion == "pass in_shardings P('data', None) for rows"


def test_suggestion_shards_both_matmul_operands_over_the_contraction():
    mesh = PLACE.mesh({"data": 4, "model": 2})
    by_rows = NamedSharding(mesh, P("data", None))

    def unasked(*spec):
        x = struct((8192, 4096), *spec, mesh=mesh)
        w = struct((4096, 2048), "data", "model", mesh=mesh)
        compilation = scheduled(lambda a, b: a @ b, x, w, out_shardings=by_rows)
        return [r for r in describe_traffic(compilation, PLACE, mesh)[0] if not r.requested]

    suggestions = {r.suggestion for r in unasked(None, "model")}
    assert suggestions == {"pass in_shardings P(None, 'data') for a"}
    assert unasked(None, "data") == []


def test_conflicting_constraints_are_reported_by_line():
    one = NamedSharding(MESH, P("data", "model"))
    other = NamedSharding(MESH, P("model", "data"))

    def disagree(x, y):
        a = xlashard.with_sharding_constraint(jnp.sin(x), one)
        b = xlashard.with_sharding_constraint(jnp.cos(y), other)
        return a * b

    def agree(x, y):
        a = xlashard.with_sharding_constraint(jnp.sin(x), one)
        b = xlashard.with_sharding_constraint(jnp.cos(y), one)
        return a * b

    arguments = [struct((1024, 1024), "data", "model") for _ in range(2)]
    reports = traffic(disagree, *arguments)
    line = disagree.__code__.co_firstlineno + 2
    suggestions = {r.suggestion for r in reports if r.origin == "resharding"}
    change = "P('data', 'model'), not P('model', 'data')"
    assert f"constrain the value at test_attribution.py:{line} to {change}" in suggestions
    assert traffic(agree, *arguments) == ()


@pytest.mark.slow
def test_collectives_are_split_into_traffic_within_and_between_slices():
    place = topology("v5e:2x2", slices=2)
    mesh = place.mesh({"data": 4, "model": 2})
    params = {
        "up": struct((1024, 2048), "data", "model", mesh=mesh),
        "down": struct((2048, 1024), "model", "data", mesh=mesh),
    }
    x = struct((4096, 1024), "data", None, mesh=mesh)
    compilation = scheduled(step, params, x, out_shardings=layout_of(params))
    reports = describe_traffic(compilation, place, mesh)[0]
    between = [r for r in reports if r.network == "dcn"]
    assert {(r.kind, r.along, r.origin) for r in between} == {
        ("all-gather", "data:(1)2", "argument"),
        ("all-reduce", "data:(1)2", "gradient"),
    }
    inside = {(r.kind, r.along, r.origin) for r in reports} - {
        (r.kind, r.along, r.origin) for r in between
    }
    assert inside == {
        ("all-gather", "data:(2)2", "argument"),
        ("all-gather", "data:(2)2", "gradient"),
        ("all-reduce", "model", "reduction"),
        ("reduce-scatter", "data:(2)2", "gradient"),
    }
    schedule = schedule_step(compilation, place, mesh)
    estimate = estimate_time(compilation, place, mesh, schedule=schedule)
    waits = [x for x in add_lines(estimate, compilation, schedule, mesh).lines if x.bound == "dcn"]
    assert {line.kind for line in waits} <= {"all-gather", "all-reduce"}
    assert waits and all(line.source is not None for line in waits)
    shard = 1024 * 2048 * 2 // 8
    # Each device gathers half of its shard's group from the other slice, for two parameters, and
    # reduces two gradients of which it holds a quarter.
    assert (
        sum(t.sent_bytes for t in estimate.traffic if t.network == "dcn") == 2 * shard + 4 * shard
    )
    assert estimate.dcn_seconds == pytest.approx(sum(r.seconds for r in between))


@pytest.mark.slow
def test_time_estimate_sums_the_traffic():
    params = {
        "up": struct((1024, 2048), "data", "model"),
        "down": struct((2048, 1024), "model", "data"),
    }
    x = struct((4096, 1024), "data", None)
    compilation = scheduled(step, params, x, out_shardings=layout_of(params))
    estimate = estimate_time(compilation, PLACE, MESH)
    reports = describe_traffic(compilation, PLACE, MESH)[0]
    assert sum(t.seconds for t in estimate.traffic) == pytest.approx(
        sum(r.seconds for r in reports)
    )
    assert sum(t.sent_bytes for t in estimate.traffic) == sum(r.sent_bytes for r in reports)
    products = 4096 // 2 * 1024 * 2048 // 4 * 2
    assert dict(estimate.flops_by_dtype) == {"bfloat16": 5 * products}
    assert estimate.compute_seconds == pytest.approx(5 * products / 197e12)
    assert estimate.roofline_seconds == max(
        estimate.compute_seconds, estimate.hbm_seconds, estimate.ici_seconds, estimate.dcn_seconds
    )
    assert estimate.bound == "ici"
    # No schedule is faster than the lower bound of each of its parts.
    assert estimate.seconds > estimate.roofline_seconds
    assert estimate.below < 0 < estimate.above
    assert sum(seconds for _, seconds in estimate.shares) == pytest.approx(estimate.seconds)


def test_rejected_program_has_a_time_estimate():
    compilation = scheduled(jnp.sin, struct((1024, 1024), "data", None))
    estimate = estimate_time(compilation, PLACE, MESH)
    assert estimate.seconds > estimate.roofline_seconds > 0
