"""Layouts compiled for a mesh: times, memory, collectives, and refusals."""

import sys

import jax
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.auto.examples import hand_layout, shapes, step
from tests.message_patterns import naming
from xlashard import P, pjit, preflight
from xlashard._jax.runtime.offline import PhaseInput
from xlashard._jax.trace.tracing import bodies
from xlashard.auto.auto_program import read_program
from xlashard.auto.problem import ConstraintSite, ProgramLayout, machine_of
from xlashard.auto.proof import Prover, measure, nominal_cost
from xlashard.core.pjit.shardings.resources import UNSPECIFIED
from xlashard.errors import CompileError
from xlashard.geometry.groups import ReplicaGroups, SourceTargetPairs
from xlashard.hlo.collectives import Collective
from xlashard.hlo.shapes import Shape

GIB = 2**30


def read(fun=None, **mesh):
    fun = pjit(step, donate_argnums=0) if fun is None else fun
    return read_program(fun, shapes(), {}, mesh or {"data": 4, "model": 2})


def prove(program, layouts, count=4, memory=GIB):
    prover = Prover(program, memory)
    return prover.prove(layouts, count)


@pytest.fixture(scope="module")
def program():
    return read()


@pytest.fixture(scope="module")
def proven(program):
    own = program.program
    layouts = [
        hand_layout(own, "data", batch=P(("data", "model"))),
        hand_layout(own, "fsdp", state=P("data"), batch=P(("data", "model"))),
        hand_layout(own, "again", batch=P(("data", "model"))),
        hand_layout(own, "refused", batch=P(None, ("data", "model"), "nowhere")),
    ]
    return {p.layout.name: p for p in prove(program, layouts)}


@pytest.mark.slow
def test_compiled_layout_reports_the_collectives_of_its_program(proven):
    # The gradients, and nothing else.
    kinds = {(total.kind, total.along) for total in proven["data"].collectives}
    assert kinds == {("all-reduce", "data, model")}
    assert "all-gather" in {total.kind for total in proven["fsdp"].collectives}


@pytest.mark.slow
def test_proof_reads_the_module_that_a_call_runs(program, proven):
    """A proof on CPUs leaves out LLVM's passes, which come later."""
    called = program.lower(proven["fsdp"].layout).stage.compile()
    (module,) = proven["fsdp"].compilation.executable.hlo_modules()
    assert module.to_string() == called.as_text()


@pytest.mark.slow
def test_sharded_state_takes_less_memory(proven):
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes()[0]))
    saved = proven["data"].memory_bytes - proven["fsdp"].memory_bytes
    assert state / 3 < saved < state
    assert proven["data"].fits
    assert proven["data"].seconds > 0
    assert sum(seconds for _, seconds in proven["data"].shares) > 0


@pytest.mark.slow
def test_equal_programs_are_compiled_once(proven):
    assert proven["again"].compilation is proven["data"].compilation
    assert proven["again"].seconds == proven["data"].seconds


@pytest.mark.slow
def test_rejected_layout_stores_the_reason(proven):
    assert proven["refused"].compilation is None
    assert "nowhere" in proven["refused"].reason
    assert max(proven.values(), key=lambda p: p.rank) is proven["refused"]


@pytest.mark.slow
def test_fitting_layouts_rank_before_layouts_over_the_memory_limit(program, proven):
    limit = proven["fsdp"].memory_bytes
    layouts = [proven["data"].layout, proven["fsdp"].layout]
    found = prove(program, layouts, memory=limit)
    assert [(p.layout.name, p.fits) for p in found] == [("fsdp", True), ("data", False)]


@pytest.mark.slow
def test_persistent_cache_does_not_hide_the_memory(proven, tmp_path):
    """A program that is read from the cache leaves no buffer assignment."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), "float32")).compile()
        assert list(tmp_path.iterdir())
        for read_again in (read(), read(step)):
            layouts = [proven["fsdp"].layout]
            first, second = (prove(read_again, layouts)[0].memory_bytes for _ in range(2))
            assert first == second > 0
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.mark.slow
def test_count_limits_the_number_of_compiled_programs(program, proven):
    layouts = [proven[name].layout for name in ("data", "fsdp", "again")]
    assert {p.layout.name for p in prove(program, layouts, count=1)} == {"data", "again"}


@pytest.mark.slow
def test_measure_runs_each_program_on_the_devices(program, proven):
    layouts = [proven["data"].layout, proven["fsdp"].layout]
    seconds = measure(program, layouts, program.mesh)
    assert len(seconds) == 2
    assert all(0 < value < 60 for value in seconds)


@pytest.mark.devices(8)
def test_a_collective_is_costed_on_the_links_of_its_axes(program):
    machine = machine_of(program.mesh)
    data, model = machine.axes
    shape = Shape("f32", (1024,))

    def cost(kind, groups):
        found = Collective(kind, "c", "main", (shape,), (shape,), groups)
        return nominal_cost(found, machine, program.mesh)

    along_model = ReplicaGroups.of_list([[0, 1], [2, 3], [4, 5], [6, 7]])
    gather = cost("all-gather", along_model)
    assert gather.dimensions == ("model",)
    assert gather.sent_bytes == 2048
    assert gather.expected_seconds == 2048 / model.bytes_per_second + model.latency
    everywhere = cost("all-reduce", ReplicaGroups.everyone(8))
    assert everywhere.dimensions == ("data", "model")
    both = data.bytes_per_second + model.bytes_per_second
    assert everywhere.seconds == pytest.approx(2 * 4096 * 7 / 8 / both, rel=0.01)
    ring = SourceTargetPairs(tuple((n, (n + 1) % 8) for n in range(8)))
    slowest = min(data.bytes_per_second, model.bytes_per_second)
    assert cost("collective-permute", ring).seconds == 4096 / slowest
    assert cost("all-reduce", ReplicaGroups.of_list([[n] for n in range(8)])).sent_bytes == 0


@pytest.mark.devices(8)
def test_feedback_is_detected_by_structure_and_types():
    tied = dict(read().problem().tied)
    program = read().program
    names, results = (
        [value.path for value in side] for side in (program.arguments, program.results)
    )
    assert {names[a]: results[r] for a, r in tied.items()} == {
        name: name.replace("state", "result[0]") for name in names if name.startswith("state")
    }


@pytest.mark.devices(8)
def test_feedback_of_single_arrays_requires_donation():
    x = jax.ShapeDtypeStruct((8, 8), "float32")

    def tied(fun, *args):
        return read_program(fun, args, {}, {"data": 8}).problem().tied

    def turn(cache, x):
        return x @ x, cache + 1

    assert tied(turn, x, x) == ()
    assert tied(pjit(turn, donate_argnums=0), x, x) == ((0, 0),)
    assert tied(turn, {"k": x, "v": x}["k"], x) == ()
    assert tied(lambda c, x: (x, {n: v + x for n, v in c.items()}), {"k": x, "v": x}, x) == (
        (0, 1),
        (1, 2),
    )


@pytest.mark.devices(8)
def test_shardings_of_the_function_are_fixed():
    fun = pjit(step, in_shardings=(UNSPECIFIED, P("data")), out_shardings=(UNSPECIFIED, None))
    problem = read(fun).problem()
    assert problem.in_specs[-2:] == (P("data"), P("data"))
    assert set(problem.in_specs[:-2]) == {None}
    assert problem.out_specs[-1] == P()


@pytest.mark.devices(8)
def test_fixed_specs_match_paths_by_pattern(program):
    found = program.problem(fixed={r"\['up'\]$": P(None, "model"), "^batch": P("data")})
    names = [value.path for value in program.program.arguments]
    specs = dict(zip(names, found.in_specs, strict=True))
    assert specs["batch['x']"] == P("data")
    assert specs["state['opt'][0].mu[1]['up']"] == P(None, "model")
    assert specs["state['params'][0]['down']"] is None
    with pytest.raises(ValueError, match=naming("fixed['^btach']", "state['opt'][0].count")):
        program.problem(fixed={"^btach": P("data")})


EVERYWHERE = P(("data", "model"))


def losses(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@pytest.fixture(scope="module")
def lookup():
    args = jax.ShapeDtypeStruct((2048, 1000), "float32"), jax.ShapeDtypeStruct((2048,), "int32")
    return read_program(losses, args, {}, {"data": 16, "model": 4}, "v6e-64")


def lookup_layout(name, spec, *inside):
    return ProgramLayout(name, (spec, spec), (P(),), inside, 1.0, 1.0)


def prove_lookup(lookup, *layouts):
    with Prover(lookup, GIB) as prover:
        return {p.layout.name: p for p in prover.prove(layouts, len(layouts))}


def gather_path(jaxpr, path=()):
    for number, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name == "gather":
            return (*path, number)
        for inner, body in enumerate(bodies(eqn)):
            if found := gather_path(body, (*path, number, inner)):
                return found
    return None


@pytest.mark.slow
def test_compiler_crash_rejects_only_the_crashing_layout(lookup):
    # XLA's partitioner aborts on a lookup of labels whose result is resharded.
    site = ConstraintSite(gather_path(lookup.jaxpr), "result", 0)
    inside = (site, EVERYWHERE), (site, P("data"))
    found = prove_lookup(
        lookup,
        lookup_layout("crash", EVERYWHERE, *inside),
        lookup_layout("rows", EVERYWHERE),
        lookup_layout("refused", P(None, "nowhere")),
    )
    assert next(iter(found)) == "rows" and found["rows"].fits and found["rows"].cpu_seconds > 0
    crash = found["crash"]
    assert crash.compilation is None and crash.rank == found["refused"].rank
    assert crash.reason.startswith("compiling losses failed: the worker process ended with SIGABRT")
    assert "Check failed: grouped_sharding" in crash.reason and "\n" not in crash.reason
    # One program alone is compiled by a worker process, too.
    lowered = lookup.lower(crash.layout).stage
    for estimate in (True, False):
        with pytest.raises(CompileError, match=naming("SIGABRT", "Check failed", "fault of XLA")):
            preflight(lowered, topology="v6e-64", estimate=estimate)


@pytest.mark.slow
def test_layouts_compile_in_process_if_no_worker_can(lookup, monkeypatch):
    rows = lookup_layout("rows", EVERYWHERE)
    expected = prove_lookup(lookup, rows)["rows"]
    monkeypatch.setattr(sys, "executable", "")
    without = prove_lookup(lookup, rows, lookup_layout("whole", P()))
    monkeypatch.undo()
    monkeypatch.setattr(PhaseInput, "runner", "tests.auto:nothing")
    elsewhere = prove_lookup(lookup, rows)
    for proven in (without["rows"], elsewhere["rows"]):
        assert proven.fits and proven.cpu_seconds > 0
        assert (proven.seconds, proven.memory_bytes) == (expected.seconds, expected.memory_bytes)
    assert without["whole"].memory_bytes > expected.memory_bytes
