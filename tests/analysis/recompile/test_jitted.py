"""`explain_recompile` of functions that `jax.jit` and libraries on it made."""

import dataclasses
import functools
import gc
import inspect
import json
import logging
import threading
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src import monitoring
from jax._src import pjit as jax_pjit

import xlashard
from tests.core.pjit.helpers import f32, make_mesh
from tests.jax_releases import since_jaxlib
from xlashard import auto_shard, explain, explain_recompile, pjit, preflight
from xlashard.analysis.recompile.explain_recompile import JIT_LOGS
from xlashard.config import RECOMPILE_LOGGER


@pytest.fixture(autouse=True)
def watch():
    with xlashard.watch() as stack:
        yield stack


def parts(f):
    """Return the differences of each cache miss except the first: part, path, before, after."""
    _, *later = explain_recompile(f).explanations
    return [[(d.part, d.path, d.before, d.after) for d in e.differences] for e in later]


@pytest.mark.slow
def test_each_cache_miss_lists_its_differences():
    @functools.partial(jax.jit, static_argnames="power", donate_argnames="bias")
    def step(state, bias, power=2):
        return jax.tree.map(lambda w: w**power, state), bias

    line = inspect.currentframe().f_lineno + 1
    step({"w": f32(8)}, f32(4))
    step({"w": f32(8)}, f32(4))
    step({"w": f32(9)}, f32(4))
    step({"w": f32(9)}, f32(4), power=3)
    step({"w": f32(9), "b": f32(9)}, f32(4), power=3)
    first, *_ = explain_recompile(step).explanations
    assert (first.number, first.kind, first.reason) == (1, "compilation", "first")
    assert (first.file, first.line, first.executable) == (__file__, line, "the compiler")
    assert first.trace_seconds > 0 and first.lower_seconds > 0 and first.compile_seconds > 0
    assert parts(step) == [
        [("shape", "state['w']", "float32[8]", "float32[9]")],
        [("static argument", "power", "its default", "3")],
        [("structure", "state['b']", "absent", "float32[9]")],
    ]
    assert any("dimension 0 of state['w']" in hint for hint in explain_recompile(step).hints)


def test_placement_and_mesh():
    mesh = make_mesh((8,), ("data",))
    step = jax.jit(lambda x: x * 2)
    step(f32(8))
    step(jax.device_put(f32(8), jax.NamedSharding(mesh, jax.P("data"))))
    with jax.set_mesh(mesh):
        step(f32(8))
    changes = [{part for part, *_ in miss} for miss in parts(step)]
    assert changes[0] & {"sharding", "commitment"}
    assert changes[1] == {"mesh in force"}


def test_ahead_of_time_and_numbers():
    step = jax.jit(lambda x: x * 2)
    step.lower(f32(4)).compile()
    step(1.0)
    step(1)
    step(jnp.float32(1))
    kinds = [e.kind for e in explain_recompile(step).explanations]
    assert kinds == ["compilation"] * 4
    assert parts(step)[1:] == [
        [("dtype", "x", "float32[]", "int32[]")],
        [("dtype", "x", "int32[]", "float32[]")],
    ]


def test_recreated_functions_in_a_loop():
    def make():
        return jax.jit(lambda x: x + 1)

    *_, last = [(f := make(), f(1.0))[0] for _ in range(3)]
    report = explain_recompile(last)
    assert [e.reason for e in report.explanations] == ["recreated"]
    assert "3 jitted functions" in report.hints[0]


@pytest.mark.slow
def test_nnx_and_equinox_name_the_line_of_the_user():
    linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    @nnx.jit
    def apply(model, x):
        return model(x)

    @eqx.filter_jit
    def call(model, x):
        return model(x)

    module = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    for dtype in (np.float32, np.float16):
        apply(linear, np.ones((2, 4), dtype))
        call(module, np.ones(4, dtype))
    for function in (apply, call):
        report = explain_recompile(function)
        assert len(report.explanations) == 2
        assert {e.file for e in report.explanations} == {__file__}
        (difference,) = report.explanations[1].differences
        assert (difference.part, difference.after[:7]) == ("dtype", "float16")
    assert difference.path == "x"


class Model:
    @functools.partial(jax.jit, static_argnums=0)
    def apply(self, x):
        return x + 1


def test_methods_and_partials():
    model = Model()
    model.apply(f32(2))
    model.apply(f32(3))
    assert parts(Model.apply)[0][0][1] == "x"
    assert parts(model.apply) == parts(Model.apply)
    assert parts(functools.partial(model.apply)) == parts(Model.apply)


def test_inner_functions_are_part_of_the_outer_program():
    inner = jax.jit(lambda x: x + 1)
    jax.jit(lambda x: inner(x) * 2)(f32(4))
    pjit(lambda x: inner(x) * 3)(f32(5))
    assert explain_recompile(inner).explanations == ()


def test_pjit_calls_are_not_logged_for_jax_jit():
    def double(x):
        return x * 2

    function = pjit(double)
    function(f32(2))
    assert len(explain_recompile(function).explanations) == 1
    assert explain_recompile(jax.jit(double)).explanations == ()


def test_log_does_not_keep_a_function_alive():
    def make():
        function = jax.jit(lambda x: x - 1)
        function(f32(3))
        return len(JIT_LOGS._by_fun)

    before = len(JIT_LOGS._by_fun)
    assert make() >= 1
    gc.collect()
    assert len(JIT_LOGS._by_fun) <= before


@since_jaxlib("0.11.2", "it does not check for deleted buffers")
def test_failing_calls_raise_as_in_jax_and_are_not_recorded():
    step = jax.jit(lambda x: x * 2, donate_argnums=0)
    x = jnp.ones(3)
    step(x)
    with pytest.raises(RuntimeError, match="deleted"):
        step(x)
    with pytest.raises(TypeError):
        step("text")
    assert len(explain_recompile(step).explanations) == 1


@pytest.mark.slow
def test_calls_from_threads_are_logged_per_function():
    steps = [jax.jit(lambda x, i=i: x + i) for i in range(4)]
    threads = [
        threading.Thread(target=lambda s=s, n=n: [s(np.ones(n + k)) for k in range(3)])
        for n, s in enumerate(steps, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(explain_recompile(s).compilations) for s in steps] == [3] * 4


def test_reasons_are_logged(caplog):
    step = jax.jit(lambda x: x * 2)
    with caplog.at_level(logging.INFO, logger=RECOMPILE_LOGGER):
        step(f32(2))
        step(f32(3))
    (record,) = [r for r in caplog.records if r.name == RECOMPILE_LOGGER]
    assert "float32[2] → float32[3]" in record.getMessage()


@pytest.mark.parametrize("called", [False, True])
def test_function_that_was_not_watched_has_a_hint(watch, called):
    watch.close()
    step = jax.jit(lambda x: x * 2)
    if called:
        step(f32(2))
    report = explain_recompile(step)
    assert not report.watched and report.explanations == ()
    assert "was not watched" in report.headline
    assert "xlashard.watch()" in report.hints[0]
    assert json.loads(report.to_json())["watched"] is False


def test_function_that_was_compiled_before_the_watch_was_not_watched(watch):
    watch.close()
    step, other = jax.jit(lambda x: x * 2), jax.jit(lambda x: x * 2)
    step(f32(2))
    with xlashard.watch():
        step(f32(2))
        assert not explain_recompile(step).watched
        assert explain_recompile(other).watched
        step(f32(3))
    assert explain_recompile(step).watched
    assert len(explain_recompile(step).explanations) == 1


def test_each_call_is_recorded_once_however_many_watch(watch):
    step = jax.jit(lambda x: x * 2)
    with xlashard.watch():
        step(f32(2))
    step(f32(3))
    watch.close()
    step(f32(4))
    assert [e.kind for e in explain_recompile(step).explanations] == ["compilation"] * 2


def test_watch_ends_though_listeners_are_gone(watch, monkeypatch):
    for name in ("_event_listeners", "_event_duration_secs_listeners"):
        monkeypatch.setattr(monitoring, name, [])
    watch.close()


def test_function_that_another_library_replaced_stays_replaced(watch):
    step, ours = jax.jit(lambda x: x * 2), jax_pjit._infer_params
    jax_pjit._infer_params = theirs = lambda *args: ours(*args)
    try:
        watch.close()
        assert jax_pjit._infer_params is theirs
        step(f32(2))
        assert explain_recompile(step).explanations == ()
    finally:
        jax_pjit._infer_params = ours.__self__._infer


class Layer(eqx.Module):
    weight: jax.Array
    name: str = eqx.field(static=True)
    activation: Callable


@pytest.mark.slow
def test_static_parts_of_equinox_calls_are_named():
    @eqx.filter_jit
    def step(layer, config, x, *rest, **more):
        return layer.activation(layer.weight * x) * len(config["name"])

    layer, x = Layer(jnp.ones(3), "first", jax.nn.relu), jnp.ones(3)
    step(layer, {"name": "a", "k": 1.0}, x)
    step(layer, {"name": "bb", "k": 1.0}, x)
    step(dataclasses.replace(layer, name="second"), {"name": "bb", "k": 1.0}, x)
    step(dataclasses.replace(layer, activation=jax.nn.gelu), {"name": "bb", "k": 1.0}, x)
    step(layer, {"name": "bb", "k": 1.0}, x, 3, scale=2)
    changed = [[(part, path) for part, path, *_ in miss] for miss in parts(step)]
    assert changed == [
        [("static argument", "config['name']")],
        [("static argument", "layer.name")],
        [("static argument", "layer.activation")],
        [("static argument", "rest[0]"), ("static argument", "more['scale']")],
    ]
    assert parts(step)[0][0][2:] == ("'a'", "'bb'")
    assert "relu" in parts(step)[2][0][2] and "gelu" in parts(step)[2][0][3]
    assert explain_recompile(step).hints == ()


class Net(nnx.Module):
    def __init__(self, size, use_bias=True):
        self.linear = nnx.Linear(size, size, use_bias=use_bias, rngs=nnx.Rngs(0))
        self.scale = 2

    def __call__(self, x):
        return self.linear(x) * self.scale


@pytest.mark.slow
def test_states_of_nnx_modules_are_named():
    @nnx.jit
    def step(model, optimizer, x):
        return model(x)

    def call(model, x):
        step(model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param), x)

    model, other = Net(3), Net(3)
    other.scale = 5
    call(model, f32(2, 3))
    call(Net(4), f32(2, 4))
    found = {path for _, path, *_ in parts(step)[0]}
    assert {"model.linear.kernel.value", "model.linear.bias.value", "x"} <= found
    assert "optimizer.opt_state[0].trace['linear']['kernel'].value" in found
    assert not any("states" in path for path in found)

    @nnx.jit
    def apply(model, x):
        return model(x)

    apply(model, f32(2, 3))
    apply(other, f32(2, 3))
    apply(Net(3, use_bias=False), f32(2, 3))
    # A graph that is no tree has the paths that JAX sees.
    model.parent, model.linear.parent = nnx.data(other), nnx.data(model)
    apply(model, f32(2, 3))
    apply(model, f32(4, 3))
    assert "x" in {path for _, path, *_ in parts(apply)[-1]}
    assert parts(apply)[0] == [("static field", "model.scale", "2", "5")]
    lost = [miss for miss in parts(apply)[1] if miss[0] == "structure"]
    assert lost == [("structure", "model.linear.bias.value", "float32[3]", "absent")]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["kind", "tag"])
@dataclasses.dataclass
class State:
    w: jax.Array
    kind: str
    tag: Callable | None = None


@pytest.mark.parametrize("jit", [jax.jit, pjit])
def test_static_fields_of_dataclasses_are_named(jit):
    step = jit(lambda states, x: states["a"].w + x)
    step({"a": State(f32(2), "old")}, f32(2))
    step({"a": State(f32(2), "new")}, f32(2))
    step({"a": State(f32(2), "new", lambda: 1)}, f32(2))
    step({"a": State(f32(2), "new", lambda: 1)}, f32(2))
    assert parts(step)[0] == [("static field", "states['a'].kind", "'old'", "'new'")]
    assert parts(step)[2][0][:2] == ("static field", "states['a'].tag")
    (hint,) = explain_recompile(step).hints
    assert "states['a'].tag is a new function object" in hint


def test_array_that_stops_being_weakly_typed_is_named():
    @jax.jit
    def train_step(state, x):
        return {"step": jnp.asarray(state["step"] + 1, jnp.int32), "w": state["w"] - x.mean()}

    state = jax.jit(lambda: {"step": 0, "w": jnp.ones((4, 4))})()
    for _ in range(3):
        state = train_step(state, jnp.ones(8))
    weak, strong = "int32[] weakly typed", "int32[] not weakly typed"
    assert parts(train_step) == [[("weak type", "state['step']", weak, strong)]]
    (hint,) = explain_recompile(train_step).hints
    assert "jnp.asarray(value, jnp.int32) where it is made" in hint


@pytest.mark.parametrize(
    ("first", "second", "hint"),
    [
        (
            1.0,
            1,
            "is a Python number in some calls: always pass the same type, such as np.int32(x)",
        ),
        (1.0, np.float32(1), "always pass the same type, such as np.float32(x)"),
        (f32(3), np.ones(3, np.int32), "x.astype(np.int32)"),
        (jnp.ones(3), jnp.ones(3, jnp.bfloat16), "x.astype(jnp.bfloat16)"),
    ],
    ids=["numbers", "number and scalar", "NumPy", "arrays"],
)
@pytest.mark.parametrize("jit", [jax.jit, pjit])
def test_hint_is_of_the_type_of_the_argument(jit, first, second, hint):
    step = jit(lambda x: x * 2)
    step(first), step(second)
    assert any(hint in advice for advice in explain_recompile(step).hints)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated")
def test_context_that_enters_the_mesh_is_named():
    mesh = make_mesh((8,), ("d",))
    placed = jax.device_put(f32(8, 4), jax.NamedSharding(mesh, jax.P("d")))
    step = jax.jit(lambda x: x.sum())
    with jax.set_mesh(mesh), mesh:
        step.lower(placed).compile()
    with jax.set_mesh(mesh):
        step(placed)
    step(placed)
    assert parts(step) == [
        [("mesh in force", "", "d=8 by `with mesh:` and jax.set_mesh", "d=8 by jax.set_mesh")],
        [("mesh in force", "", "d=8", "none")],
    ]
    assert "`with jax.set_mesh(mesh):` around all" in explain_recompile(step).hints[0]


def test_functions_of_one_line_are_not_joined():
    made = [jax.jit(lambda x, i=i: x * i) for i in range(3)]
    for step in made:
        step(f32(3))
    for step in made:
        step(f32(4))
    reasons = [[e.reason for e in explain_recompile(step).explanations] for step in made]
    assert reasons == [["first", "differs"], ["recreated", "differs"], ["recreated", "differs"]]
    assert "a new function object" in explain_recompile(made[2]).explanations[0].because


@pytest.mark.slow
@pytest.mark.parametrize("jit", [jax.jit, pjit])
def test_what_reports_trace_is_not_listed(jit):
    mesh = make_mesh((8,), ("d",))
    w = jax.device_put(f32(8, 8), jax.NamedSharding(mesh, jax.P("d")))
    made = [jit(lambda w, x: (x @ w).sum()) for _ in range(2)]
    preflight(made[0], w, f32(4, 8), topology="v5e-8", estimate=True)
    auto_shard(made[1], w, f32(4, 8), mesh=mesh)
    assert [explain_recompile(step).explanations for step in made] == [()] * 2
    for step in made:
        step(w, f32(4, 8))
        (found,) = explain_recompile(step).explanations
        assert found.kind in ("compilation", "lowering") and found.reason in ("first", "recreated")
    # The call runs what explain has traced.
    explained = jit(lambda w, x: (x @ w).sum())
    explain(explained, w, f32(4, 8))
    explained(w, f32(4, 8))
    explained(w, f32(6, 8))
    reasons = [each.reason for each in explain_recompile(explained).explanations]
    assert reasons[0] != "differs" and reasons[1:] == ["differs"]
