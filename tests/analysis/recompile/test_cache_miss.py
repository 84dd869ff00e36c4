"""`explain_recompile` names the new parts of the cache key of a call."""

import dataclasses
import inspect

import jax
import numpy as np
import pytest

from tests.core.pjit.helpers import by_set_mesh, by_with, f32, fresh, make_mesh, under
from xlashard import NamedSharding, P, device_put, explain_recompile, pjit
from xlashard.analysis.recompile.call_differences import CallDifference
from xlashard.core.pjit import compile_log
from xlashard.core.program.executables import EXECUTABLES


@pytest.fixture(autouse=True)
def nothing_known_yet(monkeypatch):
    EXECUTABLES.cache_clear()
    monkeypatch.setattr(compile_log, "SITES", compile_log.Sites())


def new_step():
    """Return a function with arguments of every kind."""

    def step(state, batch, scale, mode="train"):
        return {k: v + scale * batch["tokens"].sum() for k, v in state.items()}

    return step


def arguments():
    return {"w": f32(8, 8)}, {"tokens": np.ones((8, 4), np.int32)}


def last(f):
    """Return the last explanation of a function."""
    return explain_recompile(f).explanations[-1]


def on(mesh, *spec):
    return NamedSharding(mesh, P(*spec))


def test_report_before_the_first_call_is_empty():
    report = explain_recompile(pjit(new_step()))
    assert report.explanations == report.compilations == report.hints == ()
    assert str(report).startswith("step ")


def test_first_compilation_has_location_and_timings():
    f = pjit(new_step())
    line = inspect.currentframe().f_lineno + 1
    f(*arguments(), 1.0)
    (made,) = explain_recompile(f).explanations
    assert (made.number, made.kind, made.reason, made.nearest) == (1, "compilation", "first", None)
    assert (made.file, made.line) == (__file__, line)
    assert made.place == f"test_cache_miss.py:{line}"
    assert made.executable == "the compiler"
    assert 0 < made.trace_seconds < made.seconds
    assert made.seconds == made.trace_seconds + made.lower_seconds + made.compile_seconds


def test_repeated_calls_leave_no_record():
    f = pjit(new_step())
    for _ in range(3):
        f(*arguments(), 1.0)
        f(*map(device_put, arguments()), 2.0)
        f.lower(*arguments(), 3.0).compile()
    assert len(explain_recompile(f).explanations) == 1


CHANGES = {
    "shape": (
        lambda f, state, batch: f(state, {"tokens": np.ones((8, 5), np.int32)}, 1.0),
        "batch['tokens']: int32[8,4] → int32[8,5] (shape)",
        "dimension 1 of batch['tokens'] had 2 sizes (4, 5): pad it",
    ),
    "dtype": (
        lambda f, state, batch: f({"w": state["w"].astype(np.float16)}, batch, 1.0),
        "state['w']: float32[8,8] → float16[8,8] (dtype)",
        None,
    ),
    "weak type": (
        lambda f, state, batch: f(state, batch, np.float32(1)),
        "scale: float32[] weakly typed → float32[] not weakly typed (weak type)",
        "always pass the same type, such as np.float32(scale)",
    ),
    "type of a number": (
        lambda f, state, batch: f(state, batch, 1),
        "scale: float32[] → int32[] (dtype)",
        "scale is a Python number",
    ),
    "another leaf": (
        lambda f, state, batch: f({**state, "b": f32(3)}, batch, 1.0),
        "state['b']: absent → float32[3] (structure)",
        "state['b'] is absent",
    ),
    "one leaf less": (
        lambda f, state, batch: f({}, batch, 1.0),
        "state['w']: float32[8,8] → absent (structure)",
        "state['w'] is absent",
    ),
    "by name": (
        lambda f, state, batch: f(state, batch, scale=1.0),
        "scale: passed by position → passed by name (structure)",
        "position in some calls",
    ),
    "static": (
        lambda f, state, batch: f(state, batch, 1.0, mode="eval"),
        "mode: its default → 'eval' (static argument)",
        None,
    ),
    "committed": (
        lambda f, state, batch: f(device_put(state, on(make_mesh((8,), "x"), "x")), batch, 1.0),
        "state['w']: not committed → committed as NamedSharding(x=8; P('x',)) (commitment)",
        "device_put(x, sharding)",
    ),
    "setting": (
        lambda f, *rest: under("jax_default_matmul_precision", "high", lambda: f(*rest, 1.0)),
        "jax_default_matmul_precision: None → 'high' (setting)",
        "jax_default_matmul_precision changes between calls",
    ),
    "partitioner": (
        lambda f, *rest: under("jax_use_shardy_partitioner", other_shardy(), lambda: f(*rest, 1.0)),
        "jax_use_shardy_partitioner: ",
        None,
    ),
    "mesh in force": (
        lambda f, *rest: by_with(make_mesh((4, 2), ("x", "y")), lambda: f(*rest, 1.0)),
        "mesh in force: none → x=4 × y=2",
        "NamedSharding(mesh, P(...))",
    ),
    "compiler option": (
        lambda f, *rest: f.lower(*rest, 1.0).compile({"xla_cpu_enable_fast_math": True}),
        "xla_cpu_enable_fast_math: not set → True (compiler option)",
        None,
    ),
    "default device": (
        lambda f, *rest: under("jax_default_device", jax.devices()[1], lambda: f(*rest, 1.0)),
        "jax_default_device: None → ",
        None,
    ),
}


def other_shardy():
    return not jax.config.jax_use_shardy_partitioner


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_part_is_reported(change):
    call, text, hint = CHANGES[change]
    f = pjit(new_step(), static_argnames="mode")
    f(*arguments(), 1.0)
    call(f, *arguments())
    report = explain_recompile(f)
    made = report.explanations[-1]
    assert (made.number, made.reason, made.nearest) == (2, "differs", 1)
    assert any(text in str(difference) for difference in made.differences), made.differences
    assert f"number 1 in {made.differences[0]}" in made.text("step")
    if hint is None:
        assert not any("pad" in advice for advice in report.hints)
    else:
        assert any(hint in advice for advice in report.hints), report.hints


def test_changed_sharding_or_device_order_is_explained(mesh):
    f = pjit(fresh())
    f(device_put(f32(8, 8), on(mesh, "x")))
    f(device_put(f32(8, 8), on(mesh, "y")))
    assert last(f).differences == (
        CallDifference(
            "sharding",
            "x",
            "NamedSharding(x=4, y=2; P('x',))",
            "NamedSharding(x=4, y=2; P('y',))",
        ),
    )
    other = make_mesh((4, 2), ("x", "y"), jax.devices()[::-1])
    f(device_put(f32(8, 8), on(other, "y")))
    assert "on cpu devices 7, 6, 5, 4, 3, 2, 1, 0 (sharding)" in str(last(f).differences[0])


def test_changed_mesh_in_force_is_explained():
    f = pjit(fresh(), in_shardings=P("x"))
    by_with(make_mesh((4, 2), ("x", "y")), lambda: f(f32(8)))
    by_with(make_mesh((8,), ("x",)), lambda: f(f32(8)))
    (found,) = last(f).differences
    assert str(found) == "mesh in force: x=4 × y=2 → x=8"
    by_with(make_mesh((8,), ("x",), jax.devices()[::-1]), lambda: f(f32(8)))
    (found,) = last(f).differences
    assert "x=8 on cpu devices 7" in found.after


def test_the_executable_of_an_equal_module_is_reused(mesh):
    f, x = pjit(fresh()), device_put(f32(8), on(mesh, "x"))
    f(x)
    by_set_mesh(mesh, lambda: f(x))
    made = last(f)
    assert (made.kind, made.executable) == ("lowering", "an equal program")
    assert "executable from an equal program" in made.costs
    assert [str(d) for d in made.differences] == ["mesh in force: none → x=4 × y=2"]
    assert len(explain_recompile(f).compilations) == 1


@pytest.mark.slow
def test_the_nearest_earlier_call_is_compared():
    f = pjit(lambda a, b: a.sum() + b.sum())
    f(f32(2), f32(2))
    f(f32(3), f32(3))
    f(f32(4), f32(4))
    f(f32(3), f32(5))
    made = last(f)
    assert made.nearest == 2
    assert [str(d) for d in made.differences] == ["b: float32[3] → float32[5] (shape)"]


class Config:
    """Static argument that is equal only to itself, without `__eq__`."""

    def __repr__(self):
        return "Config()"


@dataclasses.dataclass(frozen=True)
class Sized:
    """Static argument compared by value."""

    n: int


@pytest.mark.parametrize(
    ("values", "text", "hint"),
    [
        ((2, 3), "n: 2 → 3 (static argument)", "the static argument n had 2 values (2, 3), each"),
        ((Sized(2), Sized(3)), "n: Sized(n=2) → Sized(n=3)", None),
        ((1, True), "n: 1 → True", "had 2 values (1, True)"),
        ((Config(), Config()), "Config() → an unequal value", "@dataclass(frozen=True)"),
        ((object(), object()), "n: <object object at 0x", "__eq__ and __hash__ of object"),
        ((lambda: 0, lambda: 0), "<lambda> → another function of this name", "new function object"),
        (("a" * 500, "b" * 500), "n: '" + "a" * 116 + "... → 'b", None),
    ],
    ids=["int", "dataclass", "bool", "unequal", "object", "function", "long"],
)
def test_static_arguments(values, text, hint):
    f = pjit(lambda x, n: x + 1, static_argnums=1)
    for value in values:
        f(f32(4), value)
    report = explain_recompile(f)
    assert text in str(report.explanations[1].differences[0])
    assert report.explanations[1].differences[0].part == "static argument"
    assert [hint in advice for advice in report.hints] == ([True] if hint else [])


def test_static_argument_with_a_failing_repr_is_shown_by_type():
    class Broken:
        def __repr__(self):
            raise ZeroDivisionError

    f = pjit(lambda x, n: x, static_argnums=1)
    f(f32(4), Broken())
    f(f32(4), 3)
    assert last(f).differences[0].before == "<Broken>"


def test_pytrees_with_different_node_types_are_explained():
    f = pjit(lambda tree: tree[0] + tree[1])
    f((f32(2), f32(2)))
    f([f32(2), f32(2)])
    (found,) = last(f).differences
    assert found == CallDifference("structure", "", "PyTreeDef((*, *))", "PyTreeDef([*, *])")
