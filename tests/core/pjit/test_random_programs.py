"""Random programs have equal results under pjit and on one device; the comparison finds faults.

`pytest tests/core/pjit/test_random_programs.py --random-programs 500` runs more of them, and
`python -m tests.core.pjit.random_programs` any number; it shrinks failures and survives crashes.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import xlashard
from tests.core.pjit.random_programs import against_jax, checking
from tests.core.pjit.random_programs.against_jax import find_difference
from tests.core.pjit.random_programs.checking import XLA, find_failure
from tests.core.pjit.random_programs.environment import plain, xlashard_sharded
from tests.core.pjit.random_programs.generator import OPERATIONS, draw_program
from tests.core.pjit.random_programs.invalid import draw_invalid
from tests.core.pjit.random_programs.running import run
from tests.core.pjit.random_programs.shrinking import SIMPLE, shrink
from tests.core.pjit.random_programs.text import program_text

KEPT = sorted((Path(__file__).parent / "random_programs" / "kept").glob("*.txt"))
PER_TEST = 10
# The partitioner before jaxlib 0.12 ends the process there, with jax.jit too: a gather in a batch
# over a mesh axis, of the result of a scatter.
ENDED_BY_XLA = frozenset({65}) if jax.__version_info__ < (0, 12) else frozenset()


def pytest_generate_tests(metafunc):
    if "seeds" in metafunc.fixturenames:
        count = metafunc.config.getoption("--random-programs")
        chunks = [
            [seed for seed in range(i, min(i + PER_TEST, count)) if seed not in ENDED_BY_XLA]
            for i in range(0, count, PER_TEST)
        ]
        metafunc.parametrize("seeds", chunks, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")


@pytest.mark.slow
@pytest.mark.own_partitioner
def test_random_programs_equal_a_single_device_run(seeds):
    for seed in seeds:
        text = program_text(draw_program(seed))
        failure = find_failure(text)
        assert failure is None or failure.kind == XLA, (
            f"{failure}\n\n"
            f"python -m tests.core.pjit.random_programs --seed {seed} makes it small:\n\n{text}"
        )


@pytest.mark.slow
@pytest.mark.own_partitioner
def test_random_programs_equal_jax_on_one_mesh(seeds):
    for seed in seeds:
        text = program_text(draw_program(seed))
        failure = find_difference(text)
        assert failure is None, (
            f"{failure}\n\n--seed {seed} --against-jax makes it small:\n\n{text}"
        )


@pytest.mark.slow
def test_invalid_programs_are_refused_where_jax_refuses_them(seeds):
    for seed in seeds:
        text = program_text(draw_invalid(seed))
        failure = find_difference(text, classes=True)
        assert failure is None, (
            f"{failure}\n\n--seed {seed} --against-jax --invalid makes it small:\n\n{text}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_earlier_failures_pass(path, partitioner):
    """Results equal a run on one device, or else the results of jax.jit."""
    failure = find_failure(path.read_text(), partitioner)
    assert failure is None or failure.is_of_jax, failure


class TestDrawing:
    @pytest.mark.slow
    def test_a_seed_determines_the_program(self):
        for seed in range(20):
            program = draw_program(seed)
            assert program == draw_program.__wrapped__(seed)
            assert program_text(program) == program_text(draw_program.__wrapped__(seed))

    @pytest.mark.slow
    def test_programs_of_different_seeds_differ(self):
        assert len({program_text(draw_program(seed)) for seed in range(20)}) == 20

    @pytest.mark.slow
    def test_drawn_operations_are_varied(self):
        drawn = {name for seed in range(100) for name in draw_program(seed).operations()}
        assert drawn <= {*OPERATIONS, "doubled", "reductions"} and len(drawn) > 70
        assert {"scan", "while_loop", "constrain", "inner_pjit", "gradient", "vmap"} <= drawn

    @pytest.mark.slow
    def test_drawn_meshes_and_shardings_are_varied(self):
        programs = [draw_program(seed) for seed in range(100)]
        texts = [program_text(p) for p in programs]
        assert any(p.explicit for p in programs) and any(p.first for p in programs)
        assert any(p.automatic for p in programs)
        assert any("reduced={" in str(a.placed) for p in programs for a in p.arguments)
        assert any(1 in dict(p.axes).values() for p in programs)
        assert any("'none': None" in text.split("def f")[0] for text in texts)
        assert any(a.resource == "None" for p in programs for a in p.arguments)
        assert any("out_shardings=None" in text for text in texts)
        assert any(p.call == "nested" for p in programs)

    @pytest.mark.slow
    def test_drawn_program_runs_standalone(self):
        text = program_text(draw_program(0))
        compile(text, "program", "exec")
        assert all(jax.tree.leaves(out) for out in run(text, plain()))


PROGRAM = """
axes = {"x": 4, "y": 2}
backwards = False
manner = "with"
call = "call"
partitioner = "shardy"
arguments = (numbers((8, 4), "float32"), 1.5)
placed = (None, None)
in_shardings = (place(P("x")), UNSPECIFIED)
out_shardings = {"a": place(P("x", "y")), "b": [UNSPECIFIED]}
donated = ()
options = {}


def f(v0, v1):
    v2 = constrain(jnp.tanh(v0 @ v0.T), place(P("y")))
    return {"a": v2, "b": [v1]}
"""


def spoiled(monkeypatch, spoil=lambda out: out, **dropped):
    """Replace pjit by one with a single fault, and return the failure that is found."""

    def library(mesh, named):
        right = xlashard_sharded(mesh, named)

        def pjit(fun, **options):
            f = right.pjit(fun, **{**options, **dropped})
            return lambda *args: spoil(f(*args))

        return replace(right, pjit=pjit)

    monkeypatch.setattr(checking, "xlashard_sharded", library)
    return find_failure(PROGRAM)


def raise_an_error(_):
    raise ValueError("never")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        ("values", lambda out: {**out, "a": out["a"] * 1.01}),
        ("type", lambda out: {**out, "a": out["a"].astype(jnp.bfloat16)}),
        ("type", lambda out: {**out, "a": out["a"].to_jax()}),
        ("weak type", lambda out: {**out, "b": [xlashard.device_put(jnp.float32(1.5))]}),
        ("tree", lambda out: {**out, "b": tuple(out["b"])}),
        (
            "devices",
            lambda out: jax.tree.map(lambda x: xlashard.device_put(x, jax.devices()[0]), out),
        ),
        ("raises ValueError", raise_an_error),
    ],
)
def test_wrong_results_are_detected(monkeypatch, kind, spoil):
    found = spoiled(monkeypatch, spoil)
    assert found is not None and found.kind == kind
    assert "right" in found.jax


@pytest.mark.slow
@pytest.mark.parametrize(("jax_factor", "kind"), [(1.01, XLA), (1.02, "values")])
def test_wrong_values_shared_with_jax_are_attributed_to_xla(monkeypatch, jax_factor, kind):
    def wrong(factor):
        return lambda out: {**out, "a": out["a"] * factor}

    right = checking.jax_sharded

    def library(*args, **keywords):
        around = right(*args, **keywords)

        def jit(fun, **options):
            f = around.pjit(fun, **options)
            return lambda *args: wrong(jax_factor)(f(*args))

        return replace(around, pjit=jit)

    monkeypatch.setattr(checking, "jax_sharded", library)
    found = spoiled(monkeypatch, wrong(1.01))
    assert found is not None and found.kind == kind and found.jax.startswith("wrong too")


@pytest.mark.slow
def test_result_with_another_sharding_is_detected(monkeypatch):
    asked = {"a": xlashard.P("y"), "b": [xlashard.UNSPECIFIED]}
    found = spoiled(monkeypatch, out_shardings=asked)
    assert found is not None and found.kind == "places"
    assert "(8, 8)" in found.message


@pytest.mark.slow
def test_correct_program_passes(monkeypatch):
    assert spoiled(monkeypatch) is None
    assert find_failure(PROGRAM, "gspmd") is None


def spoiled_beside_jax(monkeypatch, wrap, text=PROGRAM):
    """Replace jit by one with a single fault, and return the difference to jax.jit."""

    def library(mesh, named, *, as_jax):
        right = xlashard_sharded(mesh, named, as_jax=as_jax)
        return replace(right, pjit=lambda fun, **options: wrap(right.pjit, fun, options))

    monkeypatch.setattr(against_jax, "xlashard_sharded", library)
    return find_difference(text)


def jit_unplaced(jit, fun, options):
    return jit(fun, **{**options, "out_shardings": xlashard.UNSPECIFIED})


def jit_that_refuses(jit, fun, options):
    return lambda *args: raise_an_error(args)


@pytest.mark.slow
def test_difference_from_jax_on_one_mesh_is_detected(monkeypatch):
    found = spoiled_beside_jax(monkeypatch, jit_unplaced)
    assert found is not None and found.kind == "shardings" and "result['a']" in found.message
    found = spoiled_beside_jax(monkeypatch, jit_that_refuses)
    assert found is not None and (found.kind, found.jax) == ("refused", "accepts it")
    uneven = PROGRAM.replace("(8, 4)", "(6, 4)")  # which is invalid for arguments
    found = spoiled_beside_jax(monkeypatch, lambda jit, fun, options: jax.jit(fun), uneven)
    assert found is not None and found.kind == "accepted" and "raises" in found.jax


@pytest.mark.slow
def test_behaviour_shared_with_jax_passes(monkeypatch):
    for text in (PROGRAM, PROGRAM.replace("(8, 4)", "(6, 4)")):
        assert spoiled_beside_jax(monkeypatch, lambda jit, fun, o: jit(fun, **o), text) is None


def test_program_that_fails_everywhere_is_a_failure():
    found = find_failure(PROGRAM.replace("v0 @ v0.T", "v0 @ v0"))
    assert found is not None and found.kind == "program"


@pytest.mark.slow
def test_shrinking_keeps_the_failing_operation():
    """A large program is reduced to the operation that is found to fail."""
    program = next(
        p
        for p in map(draw_program, range(1000))
        if "fori_loop" in p.operations() and len(list(p.operations())) > 6
    )

    def first_failing(programs):
        return next((i for i, p in enumerate(programs) if "fori_loop" in p.operations()), None)

    small = shrink(program, first_failing)
    assert [name for name in small.operations() if name != SIMPLE] == ["fori_loop"]
    assert len(small.results) == 1 and small.call == "call" and small.prefix is None
    assert not any(a.placed or a.donated for a in small.arguments)
    run(program_text(small), plain())
