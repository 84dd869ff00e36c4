"""Programs have equal results under every layout, and the comparison detects faults.

`python -m tests.core.pjit.random_programs --layouts --count 1000` runs many, and shrinks failures.
"""

from dataclasses import replace

import pytest

import xlashard
from tests.auto import random_layouts
from tests.auto.random_layouts import find_layout_failure
from tests.core.pjit.random_programs.checking import XLA
from tests.core.pjit.random_programs.generator import draw_program
from tests.core.pjit.random_programs.text import program_text
from xlashard import P
from xlashard.auto.problem import site_value
from xlashard.auto.search import Search


@pytest.fixture(autouse=True)
def few_layouts(monkeypatch):
    monkeypatch.setattr(random_layouts, "ODD_LAYOUTS", 1)


@pytest.mark.slow
@pytest.mark.own_partitioner
@pytest.mark.parametrize("seed", [3, 871])
def test_random_programs_have_equal_values_under_all_layouts(seed):
    failure = find_layout_failure(program_text(draw_program(seed)))
    assert failure is None or failure.kind == XLA, failure


PROGRAM = '''"""Program 1."""
axes = {"x": 4}
backwards = False
manner = "named"
call = "call"
partitioner = "shardy"
arguments = (numbers((8, 16), "float32"), numbers((16, 16), "float32"), keys((4,)), 1.5)
placed = (None,) * 4
in_shardings = (UNSPECIFIED, place(P("x")), UNSPECIFIED, UNSPECIFIED)
out_shardings = (UNSPECIFIED, place(P(None, "x")), UNSPECIFIED, UNSPECIFIED, UNSPECIFIED)
donated = ()
options = {}
exact = (False, True, True, True, False)


def f(state, w, keys, scale):
    total = jax.new_ref(jnp.zeros_like(state))
    total[...] += jnp.tanh(state @ w)
    jax.debug.callback(lambda _: None, state[0, 0])
    table = jnp.asarray(numbers((16, 16), "float32", 3))
    empty = jnp.zeros((0, 16)) + state[:0]
    return total[...] * scale, w + table, jax.random.split(keys[0], 8), empty, jnp.sum(state)
'''


@pytest.mark.slow
def test_random_layouts_preserve_effects_keys_and_empty_arrays():
    assert find_layout_failure(PROGRAM) is None


SUMMED = '''"""Program 3."""
axes = {"x": 2, "y": 4}
backwards = False
manner = "named"
call = "grad"
partitioner = "shardy"
arguments = (numbers((6, 8, 8), "float32"), numbers((8, 8), "float32"), numbers((8,), "float32"))
placed = (None,) * 3
in_shardings = (UNSPECIFIED,) * 3
out_shardings = UNSPECIFIED
donated = ()
options = {}
exact = (False,)


def f(sequences, w, bias):
    def cell(carry, x):
        hidden, total = carry
        hidden = jnp.tanh(x @ w + hidden @ w.T + bias)
        return (hidden, total + x.T @ hidden), hidden

    carry, made = lax.scan(cell, (jnp.zeros((8, 8)), jnp.zeros((8, 8))), sequences)
    return carry, made
'''


@pytest.mark.slow
def test_layouts_with_partial_sums_in_loops_preserve_values(monkeypatch):
    found = []

    def run(self, run=Search.run):
        found.append(len(self.graph.accumulated))
        return run(self)

    monkeypatch.setattr(random_layouts, "ODD_LAYOUTS", 2)
    monkeypatch.setattr(Search, "run", run)
    assert find_layout_failure(SUMMED) is None
    assert min(found) > 0


PADDED = '''"""Program 2."""
axes = {"x": 4}
backwards = False
manner = "named"
call = "grad"
partitioner = "shardy"
arguments = (numbers((3, 14, 14, 6), "float32"), numbers((3, 3, 6, 6), "float32"))
placed = (None,) * 2
in_shardings = (UNSPECIFIED,) * 2
out_shardings = UNSPECIFIED
donated = ()
options = {}
exact = (False,)


def f(images, filters):
    def convolve(x, stride):
        layout = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, filters, (stride,) * 2, "SAME", dimension_numbers=layout)

    x = jax.nn.softplus(convolve(images, 1))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    x = jax.nn.softplus(convolve(x, 1))
    return jnp.square(x.reshape(3, 7, 42).mean(1) @ jnp.ones((42, 10)))
'''


@pytest.mark.slow
def test_layouts_with_padded_shards_preserve_values(monkeypatch):
    padded = set()

    def run(self, run=Search.run):
        layouts = run(self)
        for site, spec in (each for layout in layouts for each in layout.constraints):
            _, value = site_value(self.problem.jaxpr, site)
            pairs = zip(value.aval.shape, spec, strict=False)
            padded.update(n for n, axes in pairs if axes is not None and n % 4)
        return layouts

    monkeypatch.setattr(random_layouts, "ODD_LAYOUTS", 4)
    monkeypatch.setattr(Search, "run", run)
    assert find_layout_failure(PADDED) is None
    assert {7, 14} <= padded


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "kind"), [(1.01, "values"), (1.0, None)])
def test_wrong_values_are_detected(monkeypatch, factor, kind):
    def pjit(fun, **options):
        right = xlashard.jit(fun, **options)
        return lambda *args: [x * factor if k == 0 else x for k, x in enumerate(right(*args))]

    monkeypatch.setattr(random_layouts.xlashard, "pjit", pjit)
    monkeypatch.setattr(random_layouts, "ODD_LAYOUTS", 0)
    monkeypatch.setattr(Search, "run", lambda self, run=Search.run: run(self)[-1:])
    found = find_layout_failure(PROGRAM)
    assert (found and (found.kind, found.jax)) == (kind and (kind, "right"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("fixed", {"in_specs": (P(), P(), P(), P())}),
        ("uneven", {"in_specs": (P(), P("x"), P(), P("x"))}),
        ("tied", {"in_specs": (P("x"), P("x"), P(), P())}),
    ],
)
def test_wrong_specs_are_detected(monkeypatch, kind, changed):
    run = Search.run
    monkeypatch.setattr(Search, "run", lambda self: [replace(run(self)[0], **changed)])
    monkeypatch.setattr(random_layouts, "_ties", lambda *_: ((0, 0),))
    monkeypatch.setattr(random_layouts.Dice, "chance", lambda *_: True)
    found = find_layout_failure(PROGRAM)
    assert found is not None and found.kind == kind, found
