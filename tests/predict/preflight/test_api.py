"""`xlashard.preflight`, from a function to a report."""

import ast
import contextlib
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.topologies import get_topology_desc
from jax.sharding import AxisType

import xlashard
from tests.message_patterns import naming
from tests.terminals import terminal_for_errors
from tests.waiting import wait_for
from xlashard import Mesh, NamedSharding, P, PreflightReport, explain, preflight, tpu
from xlashard.core.program import uneven_shardings as uneven
from xlashard.errors import (
    ArgumentError,
    CompileError,
    IncompleteDumpError,
    ReplicationWarning,
    TopologyError,
    UnsupportedOperationError,
)
from xlashard.hlo import hlo_program
from xlashard.predict.preflight import compilation
from xlashard.predict.preflight.preflight_run import read_on_topology
from xlashard.preflights import Workload, broken_limits, read_budget

POD = "v5e-16"
AXES = {"data": 8, "model": 2}
WORKLOAD = Workload(tokens=8192, model_flops=1e12, parameters=10**9, active_parameters=10**9)


def layers(x: Any, weights: Any, *, repeats: int = 3) -> Any:
    def body(carry: Any, _: None) -> tuple[Any, None]:
        cut = xlashard.with_sharding_constraint(carry @ weights["w"], P("data", None))
        return jax.nn.relu(cut), None

    return jax.lax.scan(body, x, None, length=repeats)[0]


X = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16)
W = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
PLACED = xlashard.pjit(
    layers,
    in_shardings=(P("data"), P(None, "model")),
    out_shardings=P("data"),
    donate_argnums=0,
)


OPTIONS: dict[str, Any] = {
    "topology": POD,
    "mesh": AXES,
    "workload": WORKLOAD,
    "price": "3.6 USD",
    "title": "layers",
    "values": "dot_general",
}


@pytest.fixture(scope="module")
def report() -> PreflightReport:
    return preflight(PLACED, *(X, W), **OPTIONS)


@pytest.mark.slow
def test_report_has_name_outcome_topology_and_mesh(report: PreflightReport) -> None:
    assert (report.name, report.title, report.outcome) == ("layers", "layers", "fits")
    assert (report.topology.name, report.topology.chips) == ("v5e:4x4", 16)
    assert [(axis.name, axis.size) for axis in report.mesh] == list(AXES.items())


def test_report_has_memory_and_donations(report: PreflightReport) -> None:
    memory = report.memory
    assert [(v.path, v.device_bytes, v.aliased) for v in report.inputs] == [
        ("x", 256 * 1024 * 2, "result"),
        ("weights['w']", 1024 * 512 * 2, ""),
    ]
    assert memory.alias_bytes == 256 * 1024 * 2
    assert 0 < memory.total_bytes < memory.available_bytes < report.topology.hbm_bytes
    (donation,) = [d for d in report.donations if d.donated]
    assert (donation.path, donation.result) == ("x", "result")


def test_replicated_arguments_warn_and_unused_donations_are_only_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uneven, "FLAGS", replace(uneven.FLAGS, warn_replicated=1))
    summed = xlashard.pjit(lambda x: x.sum(), donate_argnums=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = preflight(summed, X, topology=POD, mesh=AXES)
    (warning,) = caught
    assert warning.category is ReplicationWarning and warning.filename == __file__
    assert re.match(naming("x of", "4.0 MiB on each of 16"), str(warning.message))
    (donation,) = report.donations
    assert donation.donated and not donation.is_reused
    assert {(u.kind, u.path) for u in report.unmet} == {
        ("argument without sharding", "x"),
        ("donation", "x"),
    }


@pytest.mark.parametrize("estimate", [False, True])
def test_rematerialization_is_read_from_the_log_of_the_worker(estimate: bool) -> None:
    def f(x: Any) -> Any:
        x = xlashard.with_sharding_constraint(jnp.sin(x), P(None, ("data", "model")))
        return jnp.cos(xlashard.with_sharding_constraint(x, P("model", None)))

    run = xlashard.pjit(f, in_shardings=P(None, ("data", "model")))
    report = preflight(run, X, topology=POD, mesh=AXES, estimate=estimate)
    (row,) = [u for u in report.unmet if u.kind == "rematerialization"]
    assert (row.path, row.requested) == ("bfloat16[2048,1024]", "P('model')")
    assert row.advice == "constrain it to P('model', 'data') in between"
    assert row.source is not None and row.source.file == __file__


def test_report_has_flops_collectives_and_time(report: PreflightReport) -> None:
    # Three products of [256, 1024] by the gathered weights, [1024, 1024], on each device.
    assert report.time.flops == pytest.approx(3 * 2 * 256 * 1024 * 1024, rel=0.01)
    gathers = [t for t in report.traffic if t.kind == "all-gather"]
    assert [t.along for t in gathers] == ["model"]
    assert gathers[0].requested and gathers[0].origin == "constraint"
    assert gathers[0].times == 3
    line = gathers[0].needed_by_source
    assert line is not None and line.file == __file__ and line.in_user_file
    assert report.time.seconds >= report.time.roofline_seconds > 0


def test_report_has_price_and_throughput(report: PreflightReport) -> None:
    seconds = report.time.seconds
    assert report.price is not None and report.throughput is not None
    assert (report.price.currency, report.price.hour) == ("USD", pytest.approx(3.6 * 16))
    assert report.price.step == pytest.approx(3.6 * 16 * seconds / 3600)
    assert report.throughput.tokens_per_second == pytest.approx(8192 / seconds)
    assert report.throughput.utilisation == pytest.approx(1e12 / (seconds * 16 * 197e12))


def test_report_has_versions_and_compile_time(report: PreflightReport) -> None:
    assert report.versions.jax == jax.__version__
    assert report.versions.libtpu
    assert report.versions.runtime
    assert report.compile_seconds > 0


def test_report_round_trips_through_json(report: PreflightReport) -> None:
    assert PreflightReport.from_json(report.to_json()) == report


@pytest.mark.slow
def test_local_arrays_map_to_topology_axes_of_equal_names(
    report: PreflightReport,
) -> None:
    here = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    x = xlashard.device_put(jnp.ones(X.shape, X.dtype), NamedSharding(here, P("data")))
    w = xlashard.device_put(jnp.ones((1024, 1024), X.dtype), NamedSharding(here, P(None, "model")))
    by_follow = xlashard.pjit(layers, out_shardings=P("data"), donate_argnums=0)
    same = preflight(by_follow, x, weights={"w": w}, topology=POD, mesh=AXES)
    assert held_values(same) == held_values(report)
    assert [t.sent_bytes for t in same.traffic] == [t.sent_bytes for t in report.traffic]
    # Their own mesh fits another topology, and is the default.
    fewer = preflight(by_follow, x, {"w": w}, topology="v5e-8")
    assert [(axis.name, axis.size) for axis in fewer.mesh] == [("data", 4), ("model", 2)]


def test_mesh_of_another_client_keeps_its_order() -> None:
    pod = tpu.topology("v5e-4")
    theirs = get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    order = [theirs[i] for i in (3, 0, 2, 1)]
    mesh = Mesh(np.array(order).reshape(2, 2), ("x", "y"))
    rows = NamedSharding(mesh, P("x", "y"))
    gram = jax.jit(lambda x: x @ x.T, in_shardings=rows, out_shardings=NamedSharding(mesh, P()))
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    report = preflight(gram, x, topology=pod, estimate=True)
    assert not report.is_laid_out and "laid out" not in str(report)
    assert [axis.along for axis in report.mesh] == [(("x", 2),), ()]
    ours = pod.match_devices(order)
    assert ours is not None
    again = Mesh(np.array(ours).reshape(2, 2), ("x", "y"))
    assert preflight(gram, x, topology=pod, mesh=again, estimate=True).time == report.time
    sizes = preflight(gram, x, topology=pod, mesh={"x": 2, "y": 2}, estimate=True)
    assert sizes.is_laid_out and "x=2 × y=2 · mesh laid out by xlashard · " in str(sizes)
    assert [axis.along for axis in sizes.mesh] == [(("x", 2),), (("y", 2),)]


@pytest.mark.slow
def test_shapes_on_a_topology_mesh_require_no_mesh_argument() -> None:
    topology = tpu.topology("v5e-4")
    mesh = topology.mesh({"x": 2, "y": 2})
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("x", "y")))
    found = preflight(lambda x: x * 2, x, topology=topology)
    assert [v.spec for v in found.inputs] == ["P('x', 'y')"]
    assert preflight(lambda x: x * 2, x, topology="v5e-4").inputs == found.inputs


@pytest.mark.slow
def test_traced_and_lowered_stages_with_static_arguments() -> None:
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    power = xlashard.pjit(lambda x, n: x**n, static_argnums=1, in_shardings=P("data"))
    called = preflight(power, x, 3, topology="v5e-4", mesh={"data": -1})
    with jax.set_mesh(tpu.topology("v5e-4").mesh({"data": 4})):
        stages = (power.trace(x, 3), power.lower(x, 3))
    for stage in stages:
        assert preflight(stage, topology="v5e-4").memory == called.memory


def without_code(report: PreflightReport) -> PreflightReport:
    """Return the parts that a whole preflight and an estimate have in common.

    An estimate tries no suggestions. Each has the warnings of the compiler's steps that it runs.
    """
    memory, timeline = report.memory, report.time.timeline
    code = memory.code_bytes if report.fits else 0
    assert timeline is not None
    over_time = tuple((seconds, held - code) for seconds, held in timeline.memory)
    return replace(
        report,
        advice=(),
        traffic=tuple(replace(row, suggestion="") for row in report.traffic),
        memory=replace(
            memory, total_bytes=memory.total_bytes - code, code_bytes=memory.code_bytes - code
        ),
        time=replace(report.time, timeline=replace(timeline, memory=over_time)),
        compile_seconds=0.0,
        is_estimate=True,
        warnings=(),
    )


PARTITIONED = custom_partitioning(jnp.sin)
PARTITIONED.def_partition(
    partition=lambda mesh, args, out: (mesh, jnp.sin, out.sharding, (args[0].sharding,)),
    sharding_rule="i j -> i j",
)


def copy_kernel(x: Any, out: Any) -> None:
    out[...] = x[...]


def attend(x: Any) -> Any:
    """Return attention by the kernel of cuDNN, which JAX's trace refuses on machines without it."""
    heads = x.reshape(4, 128, 8, 64).astype(jnp.bfloat16)
    return jax.nn.dot_product_attention(heads, heads, heads, implementation="cudnn")


def multiply_scaled(x: Any) -> Any:
    values, scales = x[None].astype(jnp.float8_e4m3fn), jnp.ones((1, 512, 16), jnp.float8_e8m0fnu)
    return jax.nn.scaled_matmul(values, values, scales, scales)


def copy_by_kernel(x: Any, compiler_params: Any) -> Any:
    return pl.pallas_call(copy_kernel, out_shape=x, compiler_params=compiler_params)(x)


FLOATS = jax.ShapeDtypeStruct((512, 512), jnp.float32)
UNTAKEN: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("v5e-4", "hessenberg"): lambda x: jax.lax.linalg.hessenberg(x)[0],
    ("v5e-4", "tridiagonal"): lambda x: jax.lax.linalg.tridiagonal(x)[0],
    ("v5e-4", "mpmd_map"): lambda x: plgpu.kernel(copy_kernel, out_type=x)(x),
    ("v5e-4", "custom_partitioning"): lambda x: multiply_scaled(x),
    ("v5e-4", "pallas_call"): lambda x: copy_by_kernel(x, pltriton.CompilerParams()),
    ("h100-4", "pallas_call"): lambda x: copy_by_kernel(x, pltpu.CompilerParams()),
    ("h100-4", "schur"): lambda x: jax.lax.linalg.schur(x)[0],
}


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "operation"), UNTAKEN)
def test_an_operation_of_another_platform_is_named(topology: str, operation: str) -> None:
    function = UNTAKEN[topology, operation]
    with pytest.raises(UnsupportedOperationError) as caught:
        preflight(jax.jit(function), FLOATS, topology=topology, mesh={"data": 4})
    assert caught.value.operation == operation
    assert "test_api.py:" in caught.value.source
    assert operation != "pallas_call" or "compiler_params" in str(caught.value)


@pytest.mark.slow
def test_attention_of_cudnn_is_refused_by_tpus_with_its_line() -> None:
    whole = jax.jit(attend)
    sharded = jax.jit(
        lambda x: jax.shard_map(
            attend, mesh=jax.sharding.get_abstract_mesh(), in_specs=P(), out_specs=P()
        )(x)
    )
    for program, operation in ((whole, "custom_partitioning"), (sharded, "dot_product_attention")):
        with pytest.raises(UnsupportedOperationError) as caught:
            preflight(program, FLOATS, topology="v5e-4", mesh={"data": 4})
        assert caught.value.operation.startswith(operation)
        line = attend.__code__.co_firstlineno + 3
        assert caught.value.source.endswith(f"test_api.py:{line}")


REFUSED = {
    "eig": lambda x: jnp.linalg.eigvals(x),
    "schur": lambda x: jax.scipy.linalg.schur(x)[0],
    "pallas_call": lambda x: pl.pallas_call(copy_kernel, out_shape=x)(x),
    "a_target": lambda x: jax.ffi.ffi_call("a_target", x)(x),
    "custom_partitioning": lambda x: PARTITIONED(x),
}


@pytest.mark.slow
@pytest.mark.parametrize("operation", REFUSED)
def test_an_operation_that_no_topology_takes_is_named_with_its_line(operation: str) -> None:
    refused = REFUSED[operation]
    line = refused.__code__.co_firstlineno
    calls = {
        "preflight": lambda: preflight(
            jax.jit(refused), FLOATS, topology="v5e-4", mesh={"data": 4}
        ),
        "explain": lambda: explain(jax.jit(refused), on_topology(FLOATS)),
        "pjit": lambda: preflight(
            xlashard.pjit(refused), FLOATS, topology="v5e-4", mesh={"data": 4}
        ),
    }
    for call in calls.values():
        with pytest.raises(UnsupportedOperationError) as caught:
            call()
        assert caught.value.operation == operation
        assert caught.value.source.endswith(f"test_api.py:{line}")
        assert caught.value.source in str(caught.value)


def on_topology(x: Any) -> Any:
    """Return a shape that is placed on devices of a topology."""
    sharding = NamedSharding(tpu.topology("v5e-4").mesh({"data": 4}), P("data"))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


@pytest.mark.slow
def test_a_report_without_the_whole_dump_is_degraded(monkeypatch: pytest.MonkeyPatch) -> None:
    find = compilation._find_whole_dump

    def cut_dump(folder: Path) -> Path | None:
        """Cut the dump off at several places, as a full disk does, and remove it."""
        (file,) = folder.glob("*after_optimizations.hlo.pb")
        content = file.read_bytes()
        assert find(folder) == file
        for size in (0, 1, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:size])
            assert find(folder) is None
        file.unlink()
        return find(folder)

    monkeypatch.setattr(compilation, "_find_whole_dump", cut_dump)
    where = {"topology": "v5e-4", "mesh": {"data": 4}}
    found = preflight(jnp.dot, SQUARE, SQUARE, **where)
    assert "TMPDIR" in found.degraded and found.fits
    assert found.memory.argument_bytes == 2 * SQUARE.size * SQUARE.dtype.itemsize
    assert len(broken_limits(found, read_budget(["hbm=90%", "time=1min"]))) == 2
    with pytest.raises(IncompleteDumpError, match=naming("dot", "TMPDIR")):
        preflight(jnp.dot, SQUARE, SQUARE, **where, estimate=True)


def test_estimate_equals_the_preflight_except_for_code(report: PreflightReport) -> None:
    estimate = preflight(PLACED, *(X, W), **OPTIONS, estimate=True)
    (product,) = report.values
    # As the constraint on it requires.
    facts = product.type, product.spec, product.times
    assert facts == ("bfloat16[2048,1024]", "P('data')", 3)
    assert estimate.is_estimate and not report.is_estimate and report.memory.code_bytes > 0
    assert without_code(estimate) == without_code(report)
    assert "estimate" in repr(estimate) and "estimate" in str(estimate)
    assert PreflightReport.from_json(estimate.to_json()) == estimate


@pytest.mark.slow
def test_estimates_of_other_chips_slices_and_kernels() -> None:
    def attend(q: Any) -> Any:
        return flash_attention(q, q, q, causal=True).sum()

    def routed(x: Any, w: Any, sizes: Any) -> Any:
        products = jax.lax.ragged_dot(x, w, sizes)
        return products.sum(), jax.lax.top_k(x, 4), jax.lax.erf_inv(x.astype(jnp.float32))

    heads = jax.ShapeDtypeStruct((8, 8, 1024, 128), jnp.bfloat16)
    experts = jax.ShapeDtypeStruct((8, 1024, 512), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    spread = xlashard.pjit(routed, in_shardings=(P("data"), P(), P()))
    summed = xlashard.pjit(lambda x: x @ x.T, in_shardings=P("data"), out_shardings=P("data"))
    for program, args, topology, slices, devices in (
        (attend, (heads,), "v5e-1", 1, 1),
        (spread, (X, experts, sizes), "v6e-8", 1, 8),
        (summed, (X,), "tpu7x-8", 1, 8),
        (summed, (X,), "v4-16", 1, 8),
        (summed, (X,), "v5e-16", 2, 32),
    ):
        where = {"topology": topology, "slices": slices, "mesh": {"data": devices}}
        estimate, whole = (preflight(program, *args, **where, estimate=e) for e in (True, False))
        assert estimate.is_estimate and without_code(estimate) == without_code(whole)


@pytest.mark.slow
def test_estimate_of_a_too_large_program_equals_its_preflight() -> None:
    x = jax.ShapeDtypeStruct((1 << 20, 1 << 16), jnp.bfloat16)
    large = xlashard.pjit(lambda x: jnp.sin(x).T + 1, in_shardings=P("data"), out_shardings=P())
    where = {"topology": "v5e-4", "mesh": {"data": 4}, "replicated_above": 2**30}
    found = preflight(large, x, **where)
    estimate = preflight(large, x, **where, estimate=True)
    assert estimate.is_estimate and without_code(estimate) == without_code(found)
    assert found.outcome == "out of memory"
    assert not found.fits and not found.memory.fits
    assert found.inputs[0].device_bytes == 2**35
    assert found.memory.total_bytes > found.memory.available_bytes
    assert found.time.seconds > 0
    assert [v.path for v in found.replicated] == ["result"]
    assert "too large" in str(found)


@pytest.mark.slow
def test_head_names_launches_and_lower_bounds() -> None:
    def tiny(x: jax.Array) -> jax.Array:
        return jnp.sort(jnp.cumsum(jnp.sort(x)) * 2)

    def until_large(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() < 1e9, lambda x: x * 2, x)

    x = jax.ShapeDtypeStruct((2048,), jnp.float32)
    how = {"topology": "v5e-1", "mesh": {"one": 1}, "estimate": True}
    small = preflight(tiny, x, **how)
    assert small.time.bound == max(small.time.shares, key=lambda share: share[1])[0] == "launch"
    assert small.time.above is not None
    loop = preflight(until_large, x, **how)
    assert (loop.time.unknown_loops, loop.time.above, loop.time.is_lower_bound) == (1, None, True)
    assert "takes     at least" in str(loop)
    assert PreflightReport.from_json(loop.to_json()) == loop


def test_compiler_options_are_used_and_reported() -> None:
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    options = {"xla_tpu_scoped_vmem_limit_kib": 16384}
    found = preflight(
        lambda x: x + 1, x, topology="v5e-4", mesh={"data": 4}, compiler_options=options
    )
    assert found.versions.flags[-1] == ("compiler_options", "xla_tpu_scoped_vmem_limit_kib=16384")
    for estimate in (False, True):
        with pytest.raises(CompileError, match="xla_no_such_flag"):
            preflight(
                lambda x: x + 1,
                x,
                topology="v5e-4",
                mesh={"data": 4},
                compiler_options={"xla_no_such_flag": True},
                estimate=estimate,
            )


@pytest.mark.slow
def test_preflight_parses_the_module_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, searched = [], []
    read, find = hlo_program.read_proto, hlo_program.find_collectives
    monkeypatch.setattr(
        hlo_program, "read_proto", lambda *proto: parsed.append(proto) or read(*proto)
    )
    monkeypatch.setattr(
        hlo_program, "find_collectives", lambda *args: searched.append(args) or find(*args)
    )
    preflight(PLACED, X, W, topology=POD, mesh=AXES)
    # The executable's module, with the buffer assignment of the dump.
    assert (len(parsed), len(searched)) == (1, 1)


WRONG = (
    *(("topology", value) for value in (8, b"v5e-8", ("v5e-8",), None)),
    *(("mesh", value) for value in (8, "data", ["data"], P("data"))),
    *(("workload", value) for value in (1, {"tokens": 1})),
    *(("replicated_above", value) for value in (None, "1 MiB")),
    *(("compiler_options", value) for value in ("xla_a", 1, [("xla_a", 1)])),
    *(("rates", value) for value in (1, b"rates.toml")),
    *(("title", value) for value in (None, 1)),
)
"""Arguments of `preflight` with values of wrong types."""


def test_invalid_arguments_fail_before_compilation() -> None:
    with pytest.raises(ArgumentError, match="price='cheap' is invalid"):
        preflight(layers, X, W, topology="v5e-99", price="cheap")
    with pytest.raises(TopologyError, match="v5e-99"):
        preflight(layers, X, W, topology="v5e-99")
    for name, value in WRONG:
        keywords: dict[str, Any] = {"topology": "v5e-8", name: value}
        with pytest.raises(ArgumentError, match=naming(name, type(value).__name__, "expected")):
            preflight(lambda x: x, X, **keywords)
    with pytest.raises(TopologyError, match=re.escape("data=3")):
        preflight(layers, X, W, topology=POD, mesh={"data": 3})


def test_arguments_on_meshes_of_one_order_keep_their_tiles() -> None:
    row = NamedSharding(Mesh(np.array(jax.devices()), ("all",)), P("all"))
    shapes = [
        jax.ShapeDtypeStruct((16, 8), np.float32, sharding=sharding)
        for sharding in (local("data"), row)
    ]
    fun = jax.jit(lambda x, y: (x @ y.T, y))
    with terminal_for_errors() as screen:
        report = preflight(fun, *shapes, topology="v5e-8", estimate=True)
        wait_for(lambda: "compiling <lambda> for v5e:2x4" in screen.read(), "progress")
    assert [dict((axis.name, axis.size) for axis in report.mesh)] == [{"data": 4, "model": 2}]
    assert [(v.path, v.copies) for v in report.inputs] == [("x", 2), ("y", 1)]
    compiled = explain(fun, *shapes)
    assert [v.spec for v in report.inputs] == [v.spec for v in compiled.inputs]


def test_inspections_of_shardings_are_left_out() -> None:
    def inspected(x: Any) -> Any:
        y = x @ x.T
        jax.debug.inspect_array_sharding(y, callback=print)
        return y * 2

    x = jax.ShapeDtypeStruct((16, 8), np.float32, sharding=local("data"))
    # A function of Python in the module ends the worker process that compiles it.
    reports = [
        preflight(fun, *args, topology="v5e-8", estimate=True)
        for fun, args in (
            (jax.jit(inspected), (x,)),
            (jax.jit(inspected).lower(x), ()),
            (xlashard.pjit(inspected), (x,)),
            (lambda x: x @ x.T * 2, (x,)),
        )
    ]
    assert len({report.memory.total_bytes for report in reports}) == 1
    assert {tuple((c.kind, c.count) for c in report.traffic) for report in reports} == {
        (("all-gather", 1),)
    }


def test_a_program_that_drops_its_arguments_is_refused_with_the_reason() -> None:
    x = jax.ShapeDtypeStruct((16, 8), np.float32, sharding=local("data"))
    for drop in (lambda x: None, jax.grad(lambda x: x.sum())):
        with pytest.raises(ArgumentError, match=naming("1 device", "data=4", "keep_unused=True")):
            preflight(jax.jit(drop), x, topology="v5e-8")
    kept = jax.jit(lambda x: 1.0, keep_unused=True)
    assert preflight(kept, x, topology="v5e-8", estimate=True).inputs[0].path == "x"


def test_exceptions_of_the_function_propagate() -> None:
    def fails(x: Any) -> Any:
        raise LookupError("no such layer")

    with pytest.raises(LookupError, match="no such layer"):
        preflight(fails, X, topology=POD, mesh=AXES)


LOCAL = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
SQUARE = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)


def local(*spec: Any) -> NamedSharding:
    return NamedSharding(LOCAL, P(*spec))


def gather_rows(x: Any, w: Any) -> Any:
    """Shard a product along both axes, then gather its columns: by specs alone."""
    y = jax.lax.with_sharding_constraint(x @ w, P("data", "model"))
    return jax.lax.with_sharding_constraint(jnp.tanh(y), P("data"))


def gather_rows_of_local_mesh(x: Any, w: Any) -> Any:
    y = jax.lax.with_sharding_constraint(x @ w, local("data", "model"))
    return jax.lax.with_sharding_constraint(jnp.tanh(y), local("data"))


def held_values(report: PreflightReport) -> list[tuple[Any, ...]]:
    return [(v.path, v.type, v.spec, v.device_bytes, v.aliased, v.donated) for v in report.inputs]


def figures(report: PreflightReport) -> dict[str, Any]:
    """Return the figures that two preflights of one program share."""
    return {
        "mesh": [(axis.name, axis.size) for axis in report.mesh],
        "inputs": held_values(report),
        "outputs": [(v.path, v.type, v.spec) for v in report.outputs],
        "donations": report.donations,
        "total": (report.memory.total_bytes, report.memory.argument_bytes),
        "sent": [(t.kind, t.along, t.origin) for t in report.traffic],
        "requested": [t.requested for t in report.traffic],
    }


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e-8", "v5e-16"])
def test_a_jitted_function_maps_to_the_topology(topology: str) -> None:
    sizes = {"data": 4 if topology == "v5e-8" else 8, "model": 2}
    ours = preflight(
        xlashard.pjit(gather_rows, in_shardings=(P("data"), P()), donate_argnums=0),
        SQUARE,
        SQUARE,
        topology=topology,
        mesh=sizes,
    )
    # Its own shardings and constraints are on a mesh of local devices.
    placed = (local("data"), local())
    for f in (gather_rows, gather_rows_of_local_mesh):
        jitted = jax.jit(f, in_shardings=placed, donate_argnums=0)
        if f is gather_rows_of_local_mesh and topology == "v5e-16":
            # A mesh of devices inside has its own sizes.
            with pytest.raises(ArgumentError, match=naming(f.__name__, "data=4", "data=8")):
                preflight(jitted, SQUARE, SQUARE, topology=topology, mesh=sizes)
            continue
        theirs = preflight(jitted, SQUARE, SQUARE, topology=topology, mesh=sizes)
        assert figures(theirs) == figures(ours)
        assert theirs.name == f.__name__
    assert ("all-gather", "model", "constraint") in figures(ours)["sent"]


@pytest.mark.slow
def test_mesh_of_a_jitted_function_with_unplaced_arguments_is_detected() -> None:
    meshes = []
    by_shardings = jax.jit(gather_rows_of_local_mesh, in_shardings=(local("data"), None))
    by_constraints = jax.jit(gather_rows_of_local_mesh)
    for f in (by_shardings, by_constraints, by_constraints.trace(SQUARE, SQUARE)):
        args = () if isinstance(f, jax.stages.Traced) else (SQUARE, SQUARE)
        meshes.append([(a.name, a.size) for a in preflight(f, *args, topology="v5e-8").mesh])
    with jax.set_mesh(LOCAL):
        in_force = preflight(jax.jit(gather_rows), SQUARE, SQUARE, topology="v5e-8")
    meshes.append([(axis.name, axis.size) for axis in in_force.mesh])
    assert meshes == [[("data", 4), ("model", 2)]] * 4


@pytest.mark.slow
def test_meshes_inside_a_jitted_function_map_to_the_topology() -> None:
    ring = Mesh(np.array(jax.devices()), ("ring",))

    def total(x: Any) -> Any:
        specs = {"in_specs": P("ring"), "out_specs": P()}
        return jax.shard_map(lambda x: jax.lax.psum(x, "ring"), mesh=ring, **specs)(x * 2)

    report = preflight(jax.jit(total, in_shardings=local("data")), SQUARE, topology="v5e-8")
    assert [t.kind for t in report.traffic if t.origin == "explicit"] == ["all-reduce"]
    table = jax.device_put(jnp.ones((512, 64)), local("data"))
    indices = jax.ShapeDtypeStruct((64,), jnp.int32, sharding=local("data"))
    report = preflight(jax.jit(lambda i: table[i]), indices, topology="v5e-8")
    # jax.jit embeds the table.
    assert [(v.path, v.spec) for v in report.inputs] == [("i", "P('data')")]
    report = preflight(xlashard.jit(lambda i: table[i]), indices, topology="v5e-8")
    assert [(v.path, v.spec) for v in report.inputs] == [
        ("i", "P('data')"),
        ("closed over [0]", "P('data')"),
    ]


ABSTRACT = jax.sharding.AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
CONSTRAINTS = {
    "a spec": lambda h: jax.lax.with_sharding_constraint(h, P("data", "model")),
    "an abstract mesh": lambda h: jax.lax.with_sharding_constraint(
        h, jax.NamedSharding(ABSTRACT, P("data", "model"))
    ),
    "the abstract mesh in force": lambda h: jax.lax.with_sharding_constraint(
        h, jax.NamedSharding(jax.sharding.get_abstract_mesh(), P("data", "model"))
    ),
    "ours": lambda h: xlashard.with_sharding_constraint(
        h, NamedSharding(ABSTRACT, P("data", "model"))
    ),
}
CONTEXTS = {
    "use_abstract_mesh": lambda: jax.sharding.use_abstract_mesh(ABSTRACT),
    "set_mesh": lambda: jax.set_mesh(LOCAL),
    "none": contextlib.nullcontext,
}


def training_step(constrain: Any) -> Any:
    def loss(params: Any, x: Any) -> Any:
        def body(h: Any, w: Any) -> tuple[Any, None]:
            return constrain(jnp.tanh(h @ w)), None

        return (jax.lax.scan(jax.checkpoint(body), x, params["w"])[0] ** 2).mean()

    def step(params: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, gradients)

    return step


@pytest.mark.slow
def test_constraints_on_abstract_meshes_in_a_scan() -> None:
    params = {"w": jax.ShapeDtypeStruct((3, 256, 256), jnp.float32)}
    x = jax.ShapeDtypeStruct((128, 256), jnp.float32)
    topology, texts = tpu.topology("v5e-8"), {}
    for (form, constrain), (name, context) in itertools.product(
        CONSTRAINTS.items(), CONTEXTS.items()
    ):
        # Without a mesh in force a spec, and the mesh in force, are no constraint.
        if name == "none" and form in ("a spec", "the abstract mesh in force"):
            continue
        for wrap in (jax.jit, xlashard.pjit):
            with context():
                step = wrap(training_step(constrain))
                mesh, lowered, _ = read_on_topology(step, (params, x), {}, topology, None)
            assert dict(mesh.shape) == {"data": 4, "model": 2}
            texts[form, name, wrap] = lowered.as_text()
    assert len(texts) == 20
    constraint = r'sdy.sharding_constraint .* <@mesh, \[{"data"}, {"model"}\]>'
    assert {bool(re.search(constraint, text)) for text in texts.values()} == {True}
    step = jax.jit(training_step(CONSTRAINTS["a spec"]))
    with jax.sharding.use_abstract_mesh(ABSTRACT):
        report = preflight(step, params, x, topology="v5e-8")
    assert "constraint" in {t.origin for t in report.traffic}
    assert [(axis.name, axis.size) for axis in report.mesh] == [("data", 4), ("model", 2)]


@pytest.mark.slow
def test_explicit_axes_stay_explicit() -> None:
    types = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=types)

    def apply(x: Any, w: Any) -> Any:
        y = jnp.matmul(x, w, out_sharding=P("data", "model"))
        return jax.sharding.reshard(y, P())

    x, w = (
        jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for spec in (P("data"), P(None, "model"))
    )
    report = preflight(jax.jit(apply), x, w, topology="v5e-8", replicated_above=0)
    assert [(v.spec, v.decided_by) for v in report.outputs] == [("P()", "caller")]
    assert report.unmet == report.replicated == ()
    gathers = [t for t in report.traffic if t.kind == "all-gather"]
    assert gathers and all(t.requested for t in gathers)


@pytest.mark.slow
def test_flax_and_equinox_functions_are_accepted() -> None:
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(model: Any, x: Any) -> Any:
        model.bias[...] += 1
        return jax.lax.with_sharding_constraint(model(x), P("data"))

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    report = preflight(step, model, x, topology="v5e-8", mesh={"data": 8})
    assert [v.path for v in report.inputs] == ["model.bias.value", "model.kernel.value", "x"]
    assert isinstance(model.bias[...], jax.Array) and not model.bias[...].any()
    dense = eqx.nn.Linear(64, 64, key=jax.random.key(0))
    apply = eqx.filter_jit(lambda model, x, times: jax.vmap(model)(x) * times)
    report = preflight(apply, dense, x, 3, topology="v5e-8", mesh={"data": 8})
    assert [v.path for v in report.inputs] == ["model.weight", "model.bias", "x"]


def advice_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield file and text of every string below a folder that is no docstring."""
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        statements = (n.value for n in ast.walk(tree) if isinstance(n, ast.Expr))
        documents = {id(value) for value in statements if isinstance(value, ast.Constant)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and id(node) not in documents:
                yield path.name, str(node.value)


@pytest.mark.slow
def test_no_suggestion_wraps_an_nnx_function_in_pjit() -> None:
    """`pjit` of an nnx function would drop its mutations."""
    package = Path(xlashard.__file__).parent
    rooms = ("analysis", "predict", "cli/commands", "pods/testing")
    texts = [text for room in rooms for text in advice_of(package / room)]
    assert len(texts) > 1000 and not [text for text in texts if "pjit(" in text]

    model = nnx.Linear(1024, 1024, rngs=nnx.Rngs(0))
    rows = NamedSharding(LOCAL, P("data"))

    @nnx.jit
    def step(model: Any, x: Any, table: Any) -> Any:
        model.bias[...] += 1
        y = jax.lax.with_sharding_constraint(model(x), jax.NamedSharding(LOCAL, P()))
        return y @ table, (table @ table.T).sum()

    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=rows)
    table = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    report = preflight(step, model, x, table, topology="v5e-8")
    assert report.traffic and report.replicated and report.repeated
    for text in (str(report), report.to_json(), report.to_html()):
        assert "pjit(" not in text
    with pytest.raises(ArgumentError, match=r"nnx\.jit\(fun\)") as caught:
        xlashard.explain_recompile(nnx.grad(lambda model: model.kernel.sum()))
    assert "pjit(" not in str(caught.value)


@pytest.mark.slow
def test_lowered_jax_stages_map_to_the_topology() -> None:
    placed = (local("data"), local())
    jitted = jax.jit(gather_rows_of_local_mesh, in_shardings=placed, donate_argnums=0)
    lowered = jitted.lower(SQUARE, SQUARE)
    for where in ({"topology": "v5e-8"}, {"topology": "v5e-8", "mesh": {"data": 4, "model": 2}}):
        whole, stage = preflight(jitted, SQUARE, SQUARE, **where), preflight(lowered, **where)
        assert not whole.forgotten and re.match(naming("constraints", "cpu"), stage.forgotten)
        assert stage.forgotten in " ".join(str(stage).split())
        assert stage.name == whole.name and stage.time.seconds == whole.time.seconds
        assert {v.decided_by for v in stage.inputs} == {"unknown"}
        same, other = figures(whole), figures(stage)
        for name in ("sent", "requested"):
            # A stage lacks the constraint that causes a collective.
            same[name] = [entry[:2] if name == "sent" else None for entry in same[name]]
            other[name] = [entry[:2] if name == "sent" else None for entry in other[name]]
        assert other == same
        lines = [line.source and (line.source.file, line.source.line) for line in stage.time.lines]
        assert (__file__, gather_rows_of_local_mesh.__code__.co_firstlineno + 1) in lines
        assert PreflightReport.from_json(stage.to_json()) == stage
    ours = xlashard.pjit(gather_rows, in_shardings=placed, donate_argnums=0)
    with jax.set_mesh(LOCAL):
        stages = (ours.trace(SQUARE, SQUARE), ours.lower(SQUARE, SQUARE))
    traced, own = (figures(preflight(stage, topology="v5e-8")) for stage in stages)
    assert own == traced and ("all-gather", "model", "constraint") in own["sent"]


@pytest.mark.slow
def test_a_lowered_shard_map_keeps_the_sizes_of_its_axes() -> None:
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=LOCAL, in_specs=P("data"), out_specs=P()
    )
    lowered = jax.jit(total).lower(SQUARE)
    report = preflight(lowered, topology="v5e-8")
    assert [t.origin for t in report.traffic] == ["explicit"]
    with pytest.raises(ArgumentError, match=naming("<lambda>", "data=4, model=2", "data=8")):
        preflight(lowered, topology="v5e-16", mesh={"data": 8, "model": 2})


@pytest.mark.slow
def test_a_compiled_stage_of_the_topology_reports_its_own_program() -> None:
    mesh = tpu.topology("v5e-8").mesh({"data": 4, "model": 2})
    args = [
        jax.ShapeDtypeStruct(SQUARE.shape, SQUARE.dtype, sharding=NamedSharding(mesh, spec))
        for spec in (P("data"), P(None, "model"))
    ]
    step = jax.jit(lambda x, w: (x @ w, w * 2), donate_argnums=1)
    whole = preflight(step, *args, topology="v5e-8")
    for compiled in (
        step.lower(*args).compile(),
        xlashard.pjit(lambda x, w: (x @ w, w * 2), donate_argnums=1).lower(*args).compile(),
    ):
        report = preflight(compiled, topology="v5e-8")
        assert re.match(naming("temporaries at the peak", "Compiled"), report.forgotten)
        assert report.time.seconds == whole.time.seconds
        assert [v.spec for v in report.inputs] == [v.spec for v in whole.inputs]
        memory, known = report.memory, whole.memory
        assert memory.argument_bytes == known.argument_bytes
        assert memory.alias_bytes == known.alias_bytes
        assert memory.code_bytes == known.code_bytes
        assert memory.result_bytes == known.result_bytes and not memory.temporaries
        assert memory.temporary_bytes == compiled.memory_analysis().temp_size_in_bytes
        assert "compiled before by libtpu" in str(report)
