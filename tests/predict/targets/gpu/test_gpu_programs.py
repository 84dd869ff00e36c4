"""Programs compiled for GPUs: modules, files and assertions on them."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.hlo.test_readers import check_alike
from tests.message_patterns import naming
from tests.predict.targets.gpu.plugin import needs_plugin
from xlashard import NamedSharding, P, auto_shard, explain, hlo, pjit, preflight
from xlashard.auto.auto_program import read_program
from xlashard.auto.problem import ProgramLayout
from xlashard.auto.proof import Prover
from xlashard.core.pjit.stages.compiled import Compiled
from xlashard.errors import CompileError, ExpectationError
from xlashard.gpu import topology
from xlashard.hlo import HloProgram
from xlashard.testing import assert_collectives, assert_memory

pytestmark = [needs_plugin, pytest.mark.slow]

LAYERS, WIDTH, BATCH = 4, 4096, 1024


@pytest.fixture(scope="module")
def step() -> Compiled:
    """The gradient of a scan over rematerialised layers, for four nodes of eight H100."""
    mesh = topology("h100-32").mesh({"data": 4, "fsdp": 8})
    weights = NamedSharding(mesh, P(None, "fsdp"))
    w = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16, sharding=weights)
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.bfloat16, sharding=rows)

    def loss(w: Any, x: Any) -> Any:
        y, _ = jax.lax.scan(jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None)), x, w)
        return y.astype("float32").sum()

    def update(w: Any, x: Any) -> Any:
        return w - jax.grad(loss)(w, x)

    return pjit(update, out_shardings=weights, donate_argnums=0).lower(w, x).compile()


@pytest.fixture(scope="module")
def program(step: Compiled) -> HloProgram:
    return hlo.read(step)


def test_hlo_proto_and_text_parse_to_equal_modules(step: Compiled, program: HloProgram) -> None:
    check_alike(program, hlo.read(step.as_text()))
    assert "is_scheduled=true" in step.as_text().partition("\n")[0]
    assert program.aliases == {0: 0}


def test_trip_counts_and_replica_groups_are_parsed(program: HloProgram) -> None:
    assert {site.times for site in program.call_sites.values()} >= {1, LAYERS}
    assert program.unknown_loops == ()
    mesh = topology("h100-32").mesh({"data": 4, "fsdp": 8})
    parts = [(c.kind, c.axes(mesh)) for c in program.collectives]
    assert all(axes for _, axes in parts)
    along = {(kind, *(part.name for part in axes or ())) for kind, axes in parts}
    assert along >= {("all-gather", "fsdp"), ("reduce-scatter", "fsdp"), ("all-reduce", "data")}
    gathers = [c for c in program.collectives if c.kind == "all-gather"]
    assert {c.times for c in gathers} == {LAYERS}
    # A collective between its start and its done is one.
    (started,) = [c for c in gathers if c.asynchronous]
    assert (started.name, started.results[0].dims) == ("all-gather-start", (WIDTH, WIDTH))


def test_matmuls_are_fusions_with_source_lines(program: HloProgram) -> None:
    instructions = [i for c in program.computations.values() for i in c.instructions.values()]
    triton = [i for i in instructions if "triton" in i.attributes.backend_config]
    assert triton
    assert {i.opcode for i in triton} == {"fusion"}
    assert any(f.file == __file__ for i in triton for f in i.frames)


def test_dump_includes_the_buffer_assignment(tmp_path: Path) -> None:
    x = jax.ShapeDtypeStruct(
        (256, 256), "float32", sharding=NamedSharding(topology("h100-8").mesh({"x": 8}), P("x"))
    )
    lowered = pjit(lambda x: jnp.sin(x @ x.T)).lower(x)
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_proto": True}
    compiled = lowered.compile(compiler_options=options)
    (file,) = tmp_path.glob("*after_optimizations.hlo.pb")
    program = hlo.read(file)
    sizes = compiled.memory_analysis()
    temporary = [a.size for a in program.allocations if a.is_temporary and not a.thread_local]
    assert sum(temporary) == sizes.temp_size_in_bytes
    assert program.buffers_at_peak()
    parameters = [a.size for a in program.allocations if a.parameter is not None]
    assert sum(parameters) == sizes.argument_size_in_bytes == 256 * 32 * 4


def test_assertions_accept_programs_for_gpus(step: Compiled) -> None:
    assert_collectives(step, (), along="data", all_reduce=1, others=0)
    with pytest.raises(ExpectationError, match="all-gather"):
        assert_collectives(step, (), along="fsdp", all_gather=0)
    assert_memory(step, at_most="1 GB")


def test_serialized_gpu_program_round_trips(step: Compiled) -> None:
    devices = topology("h100-32").devices
    loaded = Compiled.deserialize(step.serialize(), devices=devices)
    assert loaded.memory_analysis().temp_size_in_bytes == (
        step.memory_analysis().temp_size_in_bytes
    )
    assert hlo.read(loaded).collectives == hlo.read(step).collectives


@pytest.mark.skipif(not hasattr(jax.sharding, "AbstractDevice"), reason="JAX asks a real GPU")
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_pallas_kernels_make_the_time_a_lower_bound() -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def double(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    def run(x: Any) -> Any:
        spec = pl.BlockSpec((128, 128), lambda i: (i, 0))
        kernel = pl.pallas_call(
            double,
            x,
            grid=(8,),
            in_specs=[spec],
            out_specs=spec,
            compiler_params=triton.CompilerParams(num_warps=4),
            name="double",
        )
        return kernel(x) + 1

    x = jax.ShapeDtypeStruct((1024, 128), jnp.float32)
    time = preflight(pjit(run), x, topology="h100-1", mesh={"x": 1}).time
    assert time.unknown_kernels == (("double", 1),)
    assert time.above is None
    seconds = {"double": 1e-3}
    known = preflight(pjit(run), x, topology="h100-1", mesh={"x": 1}, kernel_costs=seconds).time
    assert not known.unknown_kernels
    assert known.seconds > 1e-3


def test_equinox_and_nnx_steps_compile_for_gpus() -> None:
    mesh = topology("8xh100").mesh({"data": 8})
    x = jax.ShapeDtypeStruct((64, 16), "float32", sharding=NamedSharding(mesh, P("data")))
    replicated = NamedSharding(mesh, P())

    def placed(tree: Any) -> Any:
        def one(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)

        return jax.tree.map(one, tree)

    @eqx.filter_jit
    def grads(model: Any, x: Any) -> Any:
        return eqx.filter_grad(lambda model: jax.vmap(model)(x).sum())(model)

    linear = eqx.nn.Linear(16, 16, key=jax.random.key(0))
    report = explain(grads, placed(linear), x)
    assert {(c.kind, c.along) for c in report.collectives} == {("all-reduce", "data")}

    graph, state = nnx.split(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))

    @jax.jit
    def of_nnx(state: Any, x: Any) -> Any:
        return jax.grad(lambda state: nnx.merge(graph, state)(x).sum())(state)

    report = explain(of_nnx, placed(state), x)
    assert {(c.kind, c.along) for c in report.collectives} == {("all-reduce", "data")}


# XLA's pass for products of this size aborts its process on the second product of a gram matrix.
CRASHING = {"xla_gpu_threshold_for_windowed_einsum_mib": 0}
ROWS = jax.ShapeDtypeStruct((512, 64), "float32")


def project(x: Any) -> Any:
    return (x @ x.T) @ x


def test_compiler_crash_raises_an_error() -> None:
    step = pjit(project, in_shardings=P("d"), out_shardings=P("d"), compiler_options=CRASHING)

    def report(**options: Any) -> Any:
        return preflight(step, ROWS, topology="h100-8", mesh={"d": 8}, compiler_options=options)

    remedy = "xla_disable_hlo_passes=windowed-einsum-handler"
    with pytest.raises(CompileError, match=naming("SIGABRT: Check failed: ", remedy)):
        report()
    found = report(xla_disable_hlo_passes="windowed-einsum-handler")
    assert found.fits and "collective-permute" in {t.kind for t in found.traffic}


def test_compiler_crash_rejects_only_the_crashing_layout() -> None:
    step = pjit(project, compiler_options=CRASHING)
    program = read_program(step, (ROWS,), {}, {"d": 8}, "h100-8")
    layouts = [ProgramLayout(str(s), (s,), (s,), (), 1.0, 1.0) for s in (P("d"), P(None, "d"))]
    with Prover(program, 2**30) as prover:
        whole, rows = prover.prove(layouts, 2)
    assert whole.fits and whole.compilation is not None and not whole.compilation.is_estimate
    assert rows.layout is layouts[0] and "Check failed: " in rows.reason and rows.cpu_seconds > 0


def test_compilation_timeout_is_reported_with_its_option() -> None:
    with pytest.raises(CompileError, match=naming("timed out after 0.001 s", "compile_timeout")):
        auto_shard(project, ROWS, mesh={"d": 8}, topology="h100-8", compile_timeout=0.001)


def test_program_with_debug_print_is_reported() -> None:
    def shown(x: Any) -> Any:
        jax.debug.print("rows {}", x.sum())
        return jax.lax.sort(x)

    report = preflight(pjit(shown, in_shardings=P("d")), ROWS, topology="h100-8", mesh={"d": 8})
    assert report.fits and report.outputs[0].type == "float32[512,64]"
