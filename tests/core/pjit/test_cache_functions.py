"""No program is compiled twice for a function that is jitted in an equivalent way."""

import functools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.pjit.helpers import Traces, f32, fresh, make_mesh, under
from xlashard import (
    NamedSharding,
    P,
    device_put,
    explain_recompile,
    pjit,
    with_sharding_constraint,
)
from xlashard.errors import ArgumentError, DeletedError, DonationError


def test_two_pjits_of_one_function_share_a_program(compilations):
    traces = Traces()
    f, g = pjit(traces.fun), pjit(traces.fun)
    f(f32(4))
    g(f32(4))
    pjit(traces.fun, keep_unused=True)(f32(4))
    assert (traces.count, compilations.count) == (1, 1)


def jitted_twice(fun, **options):
    return pjit(fun, **options), pjit(fun, **options)


@pytest.mark.devices(8)
def test_a_function_jitted_in_each_call_keeps_its_calls(mesh, compilations):
    traces, x = Traces(), device_put(f32(8), NamedSharding(mesh, P("x")))
    values = [f32(8), x, jax.device_put(f32(8), NamedSharding(mesh, P("y")))]
    for _ in range(3):
        for value in values:
            np.testing.assert_array_equal(pjit(traces.fun)(value), f32(8) * 2 + 1)
    f, g = jitted_twice(traces.fun)
    assert f is not g
    assert f._cache_size() == g._cache_size() == len(values)
    # The type of an array on a mesh holds the mesh.
    assert (traces.count, len(explain_recompile(g).explanations)) == (2, len(values))
    f.clear_cache()
    assert g._cache_size() == 0
    g(x)
    assert (traces.count, f._cache_size()) == (3, 1)
    jax.clear_caches()
    assert f._cache_size() == 0
    pjit(traces.fun)(x)
    assert traces.count == 4


def test_other_options_and_equal_options_of_other_types_share_no_calls():
    traces = Traces()
    made = [
        pjit(traces.fun, **options)
        for options in ({}, {"keep_unused": True}, {"donate_argnums": 0}, {"out_shardings": P()})
    ]
    assert len({id(f._function.calls) for f in made}) == len(made)
    with pytest.raises(ArgumentError, match="donate_argnums"):
        pjit(traces.fun, donate_argnums=False)  # equals 0
    for value in (1, True):
        option = {"xla_embed_ir_in_executable": value}
        made.append(pjit(traces.fun, compiler_options=option))
    assert len({id(f._function.calls) for f in made}) == len(made)


class WithoutHash:
    __hash__ = None

    def __call__(self, x):
        return x


def test_functions_without_a_hash_share_no_calls():
    f, g = jitted_twice(WithoutHash())
    assert f._function.calls is not g._function.calls


@pytest.mark.parametrize("make", [fresh, lambda: functools.partial(fresh())])
def test_a_function_is_freed_with_what_was_jitted_of_it(make):
    fun = make()
    alive = weakref.ref(fun)
    for options in ({}, {"keep_unused": True}, {"donate_argnums": 0}):
        pjit(fun, **options).trace(f32(3))
    del fun
    assert alive() is None


@pytest.mark.devices(8)
def test_a_function_jitted_again_checks_donated_and_deleted_arrays(mesh):
    rows = NamedSharding(mesh, P("x"))
    f, g = jitted_twice(lambda x, y: x + y, donate_argnums=0)
    f(device_put(f32(8), rows), device_put(f32(8), rows))
    x = device_put(f32(8), rows)
    with pytest.raises(DonationError):
        g(x, x)
    closed = device_put(f32(8), rows)

    def use(x):
        return x + closed

    f, g = jitted_twice(use)
    f(f32(8))
    np.testing.assert_array_equal(g(f32(8)), f32(8) * 2)
    closed.delete()
    with pytest.raises(DeletedError, match="closed"):
        pjit(use)(f32(8))


def test_threads_that_jit_one_function_get_its_results(mesh):
    traces, x = Traces(), device_put(f32(8), NamedSharding(mesh, P("x")))
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda _: pjit(traces.fun)(x), range(64)))
    assert traces.count == 1
    for result in results:
        np.testing.assert_array_equal(result, f32(8) * 2 + 1)


def test_equal_function_objects_share_a_program(mesh, compilations):
    """Unlike JAX, whose programs belong to one function object."""
    made = [pjit(fresh()) for _ in range(3)]
    for f in made:
        np.testing.assert_array_equal(f(f32(8)), f32(8) * 2 + 1)
    assert compilations.count == 1


@pytest.mark.slow
def test_only_closures_over_large_arrays_share_a_program(compilations):
    large = [np.full(1 << 15, i, np.float32) for i in range(3)]
    made = [pjit(lambda x, i=i, c=c: x * i + c) for i, c in enumerate(large)]
    for i, f in enumerate(made):
        np.testing.assert_array_equal(f(np.float32(1)), np.full(1 << 15, 2 * i))
    assert compilations.count == 3
    closed = [pjit(lambda x, c=c: x + c) for c in large]
    for i, f in enumerate(closed):
        np.testing.assert_array_equal(f(np.float32(1)), np.full(1 << 15, i + 1))
    # These take the value as an argument, and share one program.
    assert compilations.count == 4


def test_functions_with_different_callbacks_share_no_program(compilations):
    heard = []

    def telling(name):
        def fun(x):
            jax.debug.callback(lambda v: heard.append((name, float(v))), x)
            return x

        return pjit(fun)

    made = [telling(name) for name in "ab"]
    for f in made:
        f(np.float32(1))
    jax.effects_barrier()
    assert heard == [("a", 1.0), ("b", 1.0)]
    assert compilations.count == 2


class Layer:
    """Callable object with a method, equal only to itself."""

    def __call__(self, x):
        return x - 3

    def apply(self, x):
        return x - 4


@pytest.mark.parametrize(
    "make",
    [
        lambda layer: layer,
        lambda layer: layer.apply,
        lambda layer: functools.partial(Layer.apply, layer),
    ],
    ids=["object", "method", "partial"],
)
def test_equal_callable_objects_share_a_program(make, compilations):
    layer = Layer()
    fun = make(layer)
    f = pjit(fun)
    for _ in range(2):
        f(f32(4))
    pjit(make(layer))(f32(4))
    f.lower(f32(4)).compile()
    assert compilations.count == 1


class Config:
    """Static argument compared by value."""

    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        return isinstance(other, Config) and self.n == other.n

    def __hash__(self):
        return hash(self.n)


def test_equal_static_arguments_share_a_program(compilations):
    f = pjit(lambda x, c: x * c.n, static_argnames="c")
    for _ in range(2):
        f(f32(4), Config(3))
        f.lower(f32(4), Config(3)).compile()
    assert compilations.count == 1
    np.testing.assert_array_equal(f(f32(4), Config(5)), f32(4) * 5)
    assert compilations.count == 2
    # Passed by name, it is another trace; the program is the same.
    f(f32(4), c=Config(3))
    assert compilations.count == 2


def test_equal_static_arguments_of_different_types_compile_separately(compilations):
    f = pjit(lambda x, n: x * n, static_argnums=1)
    assert f(np.int32(2), 3).dtype == np.int32
    assert f(np.int32(2), 3.0).dtype == np.float32
    assert f(np.int32(2), True).dtype == np.int32
    assert compilations.count == 3


def test_keyword_order_is_not_part_of_the_trace_key(compilations):
    traces = Traces(lambda tree: tree["a"] - tree["b"])
    f = pjit(lambda **kw: traces.fun(kw))
    f(a=f32(4), b=f32(4))
    f(b=f32(4), a=f32(4))
    pjit(traces.fun)({"b": f32(4), "a": f32(4)})
    pjit(traces.fun)({"a": f32(4), "b": f32(4)})
    assert traces.count == 2


def test_calls_from_two_threads_share_a_program(mesh, compilations):
    traces = Traces()
    f, x = pjit(traces.fun), device_put(f32(8), NamedSharding(mesh, P("x")))
    f(x)
    thread = threading.Thread(target=lambda: (f(x), f.lower(x).compile()))
    thread.start()
    thread.join()
    assert (traces.count, compilations.count) == (1, 1)


@pytest.mark.slow
def test_recreated_transformations_share_programs(mesh, compilations):
    traces = Traces(lambda x: jnp.tanh(x) ** 2)
    f = pjit(traces.fun, in_shardings=NamedSharding(mesh, P("x")))

    def use():
        jax.grad(lambda x: f(x).sum())(f32(8))
        jax.vmap(lambda x: f(x))(f32(2, 8))
        jax.jvp(f, (f32(8),), (f32(8),))
        jax.eval_shape(f, f32(8))
        jax.vmap(jax.grad(lambda x: f(x).sum()))(f32(2, 8))

    use()
    done = compilations.count
    use()
    assert (traces.count, compilations.count) == (1, done)


@pytest.mark.parametrize("first", ["eval_shape", "trace", "lower", "compile", "call"])
def test_stages_and_calls_share_a_program(mesh, first, compilations):
    traces, struct = Traces(), jax.ShapeDtypeStruct((8,), np.float32)
    f = pjit(traces.fun, out_shardings=NamedSharding(mesh, P("x")))
    stages = {
        "eval_shape": lambda: f.eval_shape(f32(8)),
        "trace": lambda: f.trace(struct),
        "lower": lambda: f.lower(f32(8)),
        "compile": lambda: f.lower(struct).compile()(f32(8)),
        "call": lambda: f(f32(8)),
    }
    stages[first]()
    assert compilations.count == (first in ("compile", "call"))
    for stage in stages.values():
        stage()
    assert (traces.count, compilations.count) == (1, 1)


@pytest.mark.devices(8)
@pytest.mark.slow
def test_each_part_of_the_cache_key_causes_a_recompile(mesh, compilations):
    fun, x = fresh(), f32(8, 8)
    calls = [
        lambda: pjit(fun)(x),
        lambda: pjit(fun)(x.astype(np.float16)),
        lambda: pjit(fun, in_shardings=NamedSharding(mesh, P("x")))(x),
        lambda: pjit(fun, in_shardings=NamedSharding(mesh, P("y")))(x),
        lambda: pjit(fun, out_shardings=NamedSharding(mesh, P("y")))(x),
        lambda: pjit(fun, donate_argnums=0)(x),
        lambda: pjit(fun, compiler_options={"xla_embed_ir_in_executable": True})(x),
        lambda: pjit(fun, device=jax.devices()[1])(x),
    ]
    for done, call in enumerate(calls, 1):
        call()
        assert compilations.count == done
    for call in calls:
        call()
    assert compilations.count == len(calls)


def test_settings_of_jax_are_part_of_the_key(compilations):
    f = pjit(lambda x: x @ x)
    f(f32(4, 4))
    with jax.default_matmul_precision("highest"):
        f(f32(4, 4))
    assert compilations.count == 2
    f(f32(4, 4))
    assert compilations.count == 2
    with jax.enable_x64(True):
        assert f(np.ones((4, 4))).dtype == np.float64


@pytest.mark.parametrize(
    ("name", "value", "traced"),
    [
        ("jax_log_compiles", True, False),
        ("jax_debug_nans", True, False),
        ("jax_traceback_filtering", "off", False),
        ("jax_transfer_guard", "allow", False),
        # Rules and promotion may read these; this function doesn't.
        ("jax_default_matmul_precision", "highest", True),
        ("jax_numpy_rank_promotion", "warn", True),
        ("jax_default_device", jax.devices("cpu")[0], True),
    ],
    ids=lambda v: str(v),
)
def test_settings_without_effect_on_the_program_cause_no_recompile(
    name, value, traced, compilations
):
    traces = Traces()
    f = pjit(traces.fun)
    expected = f(f32(4))
    np.testing.assert_array_equal(under(name, value, lambda: f(f32(4))), expected)
    assert (traces.count, compilations.count) == (1 + traced, 1)


def test_changed_default_device_causes_a_recompile(compilations):
    f, other = pjit(fresh()), jax.devices()[1]
    f(f32(4))
    assert under("jax_default_device", other, lambda: f(f32(4))).devices() == {other}
    assert compilations.count == 2


@pytest.mark.devices(8)
def test_the_partitioner_is_part_of_the_key(mesh, compilations):
    f = pjit(fresh(), in_shardings=NamedSharding(mesh, P("x")))
    before = jax.config.jax_use_shardy_partitioner
    try:
        for shardy in (True, False, True, False):
            jax.config.update("jax_use_shardy_partitioner", shardy)
            f(f32(8))
            assert ("sdy.sharding" in f.lower(f32(8)).as_text()) == shardy
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
    assert compilations.count == 2


def test_a_training_loop_compiles_once(mesh, compilations):
    """Arguments are host values, then committed arrays, then the program's own results."""
    named = NamedSharding(mesh, P("x"))
    step = pjit(lambda state, x: state + x, in_shardings=(named, named), out_shardings=named)
    state = f32(8)
    for _ in range(3):
        state = step(state, f32(8))
    step(state, state)
    assert compilations.count == 1


def test_functions_with_equal_constraints_share_a_program(mesh, compilations):
    sharding = NamedSharding(make_mesh((4, 2), ("x", "y")), P("x"))

    def fun(x):
        return with_sharding_constraint(x + 3, sharding)

    pjit(fun)(f32(8))
    pjit(fun)(f32(8))
    assert compilations.count == 1


def test_a_known_inner_function_returns_the_trees_of_each_call():
    inner = pjit(lambda tree, *rest, **named: (tree, rest, named))

    @jax.jit
    def outer(x):
        trees = {"a": x}, {"b": x}, [x], (x,)
        return [inner(tree) for tree in trees * 2], inner(x, x), inner(x, y=x), inner(x, z=x)

    expected = [({"a": 2}, (), {}), ({"b": 2}, (), {}), ([2], (), {}), ((2,), (), {})] * 2
    last = (2, (2,), {}), (2, (), {"y": 2}), (2, (), {"z": 2})
    assert jax.tree.map(int, outer(2)) == (expected, *last)
    inner.clear_cache()
    jax.clear_caches()
    assert jax.tree.map(int, outer(2)) == (expected, *last)


def test_arguments_of_equal_attributes_keep_their_own_results(mesh):
    """Lowering makes the attributes of values that are alike once."""
    rows = NamedSharding(mesh, P("x"))
    values = [device_put(f32(8) + i, rows) for i in range(12)]
    kept = pjit(lambda s, t: (s[::-1], t), in_shardings=(rows, None), donate_argnums=1)
    results, donated = kept(values, {"k": f32(8)})
    for result, value in zip(results, values[::-1], strict=True):
        np.testing.assert_array_equal(result, value)
        assert result.sharding.spec == P("x")
    np.testing.assert_array_equal(donated["k"], f32(8))
    text = kept.lower(values, {"k": f32(8)}).as_text()
    assert all(f'"result[0][{i}]"' in text for i in range(12))
