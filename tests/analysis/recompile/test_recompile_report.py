"""Records and explanations of compilations, their text, and the lifetime of their objects."""

import functools
import gc
import io
import json
import logging
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console

from tests.core.pjit.helpers import f32, fresh, under
from tests.message_patterns import naming
from tests.waiting import wait_for
from xlashard import NamedSharding, P, device_put, explain_recompile, jit, pjit
from xlashard.core.pjit import compile_log
from xlashard.core.program.executables import EXECUTABLES
from xlashard.errors import ArgumentError


@pytest.fixture(autouse=True)
def nothing_known_yet(monkeypatch):
    EXECUTABLES.cache_clear()
    monkeypatch.setattr(compile_log, "SITES", compile_log.Sites())


def new_step():
    """Return a function of a tree and a number."""

    def step(state, scale):
        return {k: v * scale for k, v in state.items()}

    return step


def last(f):
    """Return the last explanation of a function."""
    return explain_recompile(f).explanations[-1]


def on(mesh, *spec):
    return NamedSharding(mesh, P(*spec))


def test_kinds_of_stages():
    f = pjit(fresh())
    f.eval_shape(f32(4))
    f.lower(f32(5))
    f(f32(5))
    f.lower(f32(6)).compile()
    f(f32(4))
    kinds = [(e.kind, e.reason, e.nearest) for e in explain_recompile(f).explanations]
    assert kinds == [
        ("tracing", "first", None),
        ("lowering", "differs", 1),
        ("compilation", "first", None),
        ("compilation", "differs", 3),
        ("compilation", "differs", 4),
    ]


def test_stages_of_one_call_share_one_record():
    f = pjit(fresh())
    lowered = f.trace(f32(4)).lower()
    assert last(f).kind == "lowering"
    lowered.compile()
    (made,) = explain_recompile(f).explanations
    assert made.kind == "compilation"
    assert None not in (made.trace_seconds, made.lower_seconds, made.compile_seconds)


@pytest.mark.slow
def test_transformed_calls_are_recorded_as_tracing():
    f = pjit(lambda x: x * x)
    gradient = jax.grad(lambda x: f(x).sum())
    gradient(f32(4))
    gradient(f32(4))
    gradient(f32(5))
    explained = explain_recompile(f).explanations
    assert [e.kind for e in explained] == ["tracing", "tracing"]
    assert str(explained[1].differences[0]) == "x: float32[4] → float32[5] (shape)"


def test_a_recreated_function():
    def use(n):
        f = pjit(lambda x: x + n)
        f(f32(4))
        return f

    assert not explain_recompile(use(0)).hints
    report = explain_recompile(use(1))
    assert report.explanations[0].reason == "recreated"
    assert re.search(r"\b2 jitted functions\b", report.hints[0])


def test_each_wrapper_of_one_function_has_a_first_compilation(mesh):
    def body(x):
        return x * 3

    f, g = pjit(body, in_shardings=on(mesh, "x")), pjit(body)
    f(f32(8))
    g(f32(8))
    assert last(f).reason == last(g).reason == "first"
    # Another function around it is another source.
    h = pjit(jax.vmap(body))
    h(f32(8))
    assert last(h).reason == "first"


def test_callables_of_every_kind():
    class Layer:
        def __call__(self, x):
            return x

        def apply(self, x):
            return x

    layer = Layer()
    for fun in (
        layer,
        layer.apply,
        functools.partial(Layer.apply, layer),
        jnp.sin,
        np.sin.__call__,
    ):
        f = pjit(fun)
        f.clear_cache()  # other tests may have called the functions of JAX and NumPy
        assert not explain_recompile(f).explanations
    f = pjit(functools.partial(Layer.apply, layer))
    f(f32(3))
    assert last(f).reason == "first"


@pytest.mark.slow
def test_derived_programs_of_transformed_calls(mesh):
    def cube(x):
        return x**3

    f = pjit(cube, in_shardings=on(mesh, "x"))
    gradient = jax.grad(lambda x: f(x).sum())
    for _ in range(2):
        gradient(f32(8))
    report = explain_recompile(f)
    assert [p.executable for p in report.derived_programs] == ["the compiler"] * 2
    assert report.derived_programs[0].arguments == ("float32[8]",)
    assert report.derived_programs[0].file == __file__
    derived = report.derived_programs[0]
    assert report.seconds > derived.seconds > derived.compile_seconds > 0
    assert re.match("cube: 0 compilations and 1 call .*, 2 derived programs,", report.headline)
    assert "derived program of a transformed call at test_recompile_report.py:" in str(report)
    screen = io.StringIO()
    Console(width=200, file=screen).print(report)
    assert "derived program of a transformed call" in screen.getvalue()
    jax.vmap(f)(f32(2, 8))
    assert explain_recompile(f).derived_programs[2].arguments == ("float32[2,8]",)
    f.clear_cache()
    assert explain_recompile(f).derived_programs == ()
    f(f32(8))
    assert explain_recompile(f).derived_programs == ()


@pytest.mark.slow
def test_recompile_after_jax_clear_caches_is_explained():
    f = pjit(fresh())
    f(f32(4))
    jax.clear_caches()
    f(f32(4))
    made = last(f)
    assert (made.reason, made.nearest, made.differences) == ("cleared", 1, ())
    assert "jax.clear_caches()" in made.because


@pytest.mark.slow
def test_clear_cache_drops_the_records():
    f = pjit(fresh())
    f(f32(4))
    f(f32(5))
    f.clear_cache()
    assert not explain_recompile(f).explanations
    f(f32(6))
    assert (last(f).number, last(f).reason) == (1, "first")


@pytest.mark.slow
def test_number_of_records_is_bounded():
    f = pjit(lambda x, n: x, static_argnums=1)
    for n in range(70):
        f.eval_shape(f32(2), n)
    report = explain_recompile(f)
    assert len(report.explanations) == 64
    assert report.dropped == 6
    assert report.explanations[0].number == 7
    assert "6 earlier cache misses" in str(report)
    assert "had 64 values (6, 7, 8, 9, 10, 11, ...)" in report.hints[0]


def test_log_keeps_no_argument_or_result_alive(mesh):
    class Static:
        pass

    f = pjit(lambda x, w, s: x + w, static_argnums=2)
    gc.collect()
    before = len(jax.live_arrays())
    x, w = device_put(f32(8), on(mesh, "x")), np.ones(8, np.float32)
    results = f(x, w, Static()), f.lower(x, w, Static()).compile()(x, w)
    # The devices read the host's memory asynchronously, and release it in their own thread.
    jax.block_until_ready(results)
    alive = weakref.ref(w)
    del x, w, results

    def is_released() -> bool:
        gc.collect()  # jaxlib drops what other threads release in calls of its own and here
        return alive() is None

    wait_for(is_released, "end of the host's array")
    assert len(jax.live_arrays()) == before
    assert len(explain_recompile(f).explanations) == 2


def test_the_persistent_cache_is_named(tmp_path):
    settings = {
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_compilation_cache_dir": str(tmp_path),
    }
    before = {name: getattr(jax.config, name) for name in settings}
    f = pjit(lambda x: x * 7 - 3)
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        f(f32(4))
        f.clear_cache()
        f(f32(4))
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    made = last(f)
    assert (made.kind, made.executable) == ("compilation", "the persistent cache")
    assert "executable from the persistent cache" in made.costs


def test_as_text_json_and_table():
    f = pjit(new_step())
    f({"w": f32(8, 8)}, 1.0)
    f({"w": f32(8, 9)}, 1.0)
    report = explain_recompile(f)
    lines = str(report).splitlines()
    assert lines[0].startswith("step: 2 compilations, ")
    assert lines[2].startswith("  compilation 2 of step at test_recompile_report.py:")
    assert lines[2].endswith("number 1 in state['w']: float32[8,8] → float32[8,9] (shape)")
    assert lines[3].startswith("  hint: dimension 1 of state['w'] had 2 sizes (8, 9)")
    plain = json.loads(report.to_json())
    assert plain == report.to_dict() and type(report).from_json(json.dumps(plain)) == report
    assert plain["explanations"][1]["differences"] == [
        {"part": "shape", "path": "state['w']", "before": "float32[8,8]", "after": "float32[8,9]"}
    ]
    for width in (40, 80, 200):
        screen = io.StringIO()
        Console(width=width, file=screen).print(report)
        shown = " ".join(screen.getvalue().split())
        assert shown.count("test_recompile_report.py:") == 2
    assert "state['w']: float32[8,8] → float32[8,9] (shape)" in shown
    assert "hint dimension 1 of state['w']" in shown


@pytest.mark.parametrize("given", [abs, 3, jax.vmap(jnp.sin), None], ids=lambda g: type(g).__name__)
def test_value_without_a_jitted_function_is_refused(given):
    with pytest.raises(
        ArgumentError, match=naming("explain_recompile", "f = jax.jit(fun)", "nnx.jit")
    ):
        explain_recompile(given)


def test_functions_with_static_and_donated_arguments_are_explained():
    f = jit(lambda x, n: x * n, static_argnums=1, donate_argnums=0)
    f(f32(4), 2)
    assert len(explain_recompile(f).explanations) == 1


@pytest.fixture
def logged(caplog):
    """Log of recompilations."""
    logger = logging.getLogger("xlashard.recompile")
    before = logger.level
    yield caplog
    logger.setLevel(before)


def test_reasons_are_logged(logged):
    logging.getLogger("xlashard.recompile").setLevel(logging.INFO)
    f = pjit(new_step())
    f({"w": f32(8, 8)}, 1.0)
    assert not logged.records
    for _ in range(2):
        f({"w": f32(8, 8)}, 2)
    (record,) = logged.records
    # It is requested explicitly, so it is shown without any handler.
    assert record.levelno == logging.WARNING
    assert "compilation 2 of step at test_recompile_report.py:" in record.message
    assert "differs from number 1 in scale: float32[] → int32[] (dtype)" in record.message
    assert "\n  hint: scale is a Python number" in record.message


@pytest.mark.slow
def test_reasons_of_transformations_and_stages_are_logged(logged):
    logging.getLogger("xlashard.recompile").setLevel(logging.INFO)
    f = pjit(fresh())
    for n in (4, 5):
        jax.grad(lambda x: f(x).sum())(f32(n))
    assert [r.message.split(" of ")[0] for r in logged.records] == ["tracing 2"]
    f.lower(f32(6)).compile()
    f.lower(f32(7)).compile()
    assert [r.message.split(" of ")[0] for r in logged.records[1:]] == [
        "compilation 3",
        "compilation 4",
    ]


def test_nothing_is_logged_by_default(logged):
    f = pjit(fresh())
    f(f32(4))
    f(f32(5))
    assert not logged.records


@pytest.mark.filterwarnings("ignore")
def test_reasons_are_logged_where_jax_explains_cache_misses(logged):
    f = pjit(fresh())
    f(f32(4))
    under("jax_explain_cache_misses", True, lambda: f(f32(5)))
    ours = [r for r in logged.records if r.name == "xlashard.recompile"]
    assert [r.levelno for r in ours] == [logging.WARNING]


def test_recompiles_are_logged_at_info_level(logged):
    with logged.at_level(logging.INFO):
        f = pjit(fresh())
        f(f32(4))
        f(f32(5))
    ours = [r for r in logged.records if r.name == "xlashard.recompile"]
    assert [r.levelno for r in ours] == [logging.INFO]


def test_many_functions_of_one_source_log_few_messages(logged):
    with logged.at_level(logging.INFO):
        for _ in range(9):
            pjit(lambda x: x + 1)(f32(3))
    ours = [r.message for r in logged.records if r.name == "xlashard.recompile"]
    made = [re.search(r"(\d+) jitted functions", message) for message in ours]
    assert [int(found[1]) for found in made if found] == [2, 3, 5, 9]


def test_types_with_different_meshes_are_explained():
    devices = np.array(jax.devices()).reshape(4, 2)
    f = pjit(lambda x: x * 2)
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        place = NamedSharding(jax.sharding.Mesh(devices, ("x", "y"), axis_types=(kind,) * 2), P())
        f(device_put(f32(8), place))
    (difference, *_) = explain_recompile(f).explanations[1].differences
    assert difference.part == "type" and difference.before != difference.after
    assert "x=4 explicit, y=2 explicit" in difference.after
