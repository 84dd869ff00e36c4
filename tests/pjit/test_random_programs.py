"""Random programs give under pjit what they give on one device; and the tests of them can fail.

`pytest tests/pjit/test_random_programs.py --random-programs 500` runs more of them, and
`python -m tests.pjit.random_programs` any number, makes what fails small, and outlives XLA.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import xlashard
from tests.pjit.random_programs import checking
from tests.pjit.random_programs.checking import find_failure
from tests.pjit.random_programs.environment import plain, xlashard_sharded
from tests.pjit.random_programs.generator import OPERATIONS, draw_program
from tests.pjit.random_programs.running import run
from tests.pjit.random_programs.shrinking import SIMPLE, shrink
from tests.pjit.random_programs.text import program_text

KEPT = sorted((Path(__file__).parent / "random_programs" / "kept").glob("*.txt"))
PER_TEST = 10


def pytest_generate_tests(metafunc):
    if "seeds" in metafunc.fixturenames:
        count = metafunc.config.getoption("--random-programs")
        chunks = [range(i, min(i + PER_TEST, count)) for i in range(0, count, PER_TEST)]
        metafunc.parametrize("seeds", chunks, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")


@pytest.mark.slow
def test_the_same_as_on_one_device(seeds):
    for seed in seeds:
        text = program_text(draw_program(seed))
        failure = find_failure(text)
        assert failure is None, (
            f"{failure}\n\npython -m tests.pjit.random_programs --seed {seed} makes it small:\n\n"
            f"{text}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_programs_that_failed_once(path, partitioner):
    """They give what they give on one device, or else what XLA makes of them for jax.jit too."""
    failure = find_failure(path.read_text(), partitioner)
    assert failure is None or failure.is_of_jax, failure


class TestDrawing:
    @pytest.mark.slow
    def test_a_seed_says_it_all(self):
        for seed in range(20):
            program = draw_program(seed)
            assert program == draw_program.__wrapped__(seed)
            assert program_text(program) == program_text(draw_program.__wrapped__(seed))

    @pytest.mark.slow
    def test_programs_differ(self):
        assert len({program_text(draw_program(seed)) for seed in range(20)}) == 20

    @pytest.mark.slow
    def test_the_operations_that_it_draws(self):
        drawn = {name for seed in range(100) for name in draw_program(seed).operations()}
        assert drawn <= set(OPERATIONS) and len(drawn) > 70
        assert {"scan", "while_loop", "constrain", "inner_pjit", "gradient", "vmap"} <= drawn

    @pytest.mark.slow
    def test_what_is_drawn_runs_by_itself(self):
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
    """Puts a pjit in place that is wrong in one way, and says what the comparison finds."""

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
def test_what_is_wrong_is_found(monkeypatch, kind, spoil):
    found = spoiled(monkeypatch, spoil)
    assert found is not None and found.kind == kind
    assert "right" in found.jax


def test_a_result_that_lies_elsewhere_than_asked_is_found(monkeypatch):
    asked = {"a": xlashard.P("y"), "b": [xlashard.UNSPECIFIED]}
    found = spoiled(monkeypatch, out_shardings=asked)
    assert found is not None and found.kind == "places"
    assert "(8, 8)" in found.message


def test_what_is_right_passes(monkeypatch):
    assert spoiled(monkeypatch) is None
    assert find_failure(PROGRAM, "gspmd") is None


def test_a_program_that_does_not_run_anywhere_is_a_failure():
    found = find_failure(PROGRAM.replace("v0 @ v0.T", "v0 @ v0"))
    assert found is not None and found.kind == "program"


def test_shrinking_keeps_what_fails():
    """Of a large program, only the operation that is found to fail is left."""
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
