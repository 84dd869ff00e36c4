"""No program outlives its function, no cache grows without bound, and caches can be cleared."""

import functools
import gc
import sys
import weakref

import jax
import numpy as np
import pytest

from tests.core.pjit.helpers import Traces, f32, fresh, make_mesh
from tests.grouped_cases import sweep
from xlashard import NamedSharding, P, device_put, pjit, with_sharding_constraint
from xlashard.core.pjit.compile import PROGRAMS
from xlashard.core.program.executables import EXECUTABLES

LARGE = 1 << 15
LRU = type(functools.lru_cache(lambda: None))


def sharded():
    return NamedSharding(make_mesh((4, 2), ("x", "y")), P("x"))


def held():
    """Count live objects: executables in the client, programs and their shared parts, arrays."""
    gc.collect()
    client = jax.devices()[0].client
    return (
        len(client.live_executables()),
        *PROGRAMS.sizes(),
        len(EXECUTABLES),
        len(jax.live_arrays()),
    )


class Model:
    """Object with a compiled method."""

    def __init__(self, i):
        self.w = device_put(np.full(8, i, np.float32), sharded())

    def apply(self, x):
        return x * self.w


def plain(i):
    f = pjit(lambda x, n=3: x * n + i)
    f(f32(8))
    f(f32(8))
    f.lower(f32(8)).compile()(f32(8))
    return f


def with_options(i, **options):
    f = pjit(lambda x, n=2: x * n + i, **options)
    f(device_put(f32(8)), 2)
    return f


def over_devices(i):
    f = pjit(lambda x: x + i, in_shardings=sharded(), out_shardings=sharded())
    f(f32(8))
    return f


def differentiated(i):
    f = pjit(lambda x: x * x + i, in_shardings=sharded())
    jax.grad(lambda x: f(x).sum())(f32(8))
    return f


def batched(i):
    f = pjit(lambda x: x * x + i)
    jax.vmap(f)(f32(2, 8))
    return f


def over_an_array(i):
    w = device_put(np.full(LARGE, i, np.float32), sharded())
    f = pjit(lambda x: x.sum() + w)
    f(device_put(f32(8), sharded()))
    jax.grad(lambda x: f(x).sum())(device_put(f32(8), sharded()))
    return f


def over_a_host_array(i):
    w = np.full(LARGE, i, np.float32)
    f = pjit(lambda x: x.sum() + w)
    f(f32(8))
    return f


def of_a_method(i):
    f = pjit(Model(i).apply)
    f(device_put(f32(8), sharded()))
    return f


def of_a_partial(i):
    f = pjit(functools.partial(lambda n, x: x + n, i))
    f(f32(8))
    return f


def with_a_constraint(i):
    f = pjit(lambda x: with_sharding_constraint(x + i, sharded()))
    f(f32(8))
    return f


def inside_others(i):
    f = pjit(lambda x: x * i)
    pjit(lambda x: f(x) + 1)(f32(8))
    jax.jit(lambda x: f(x) + 2)(f32(8))
    pjit(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0])(f32(8))
    return f


def with_a_callback(i):
    def fun(x):
        jax.debug.callback(lambda v: None, x)
        return x + i

    f = pjit(fun)
    f(f32(8))
    jax.effects_barrier()
    return f


def as_a_step(i):
    f = pjit(lambda x: x + i, in_shardings=sharded(), out_shardings=sharded())
    step = f.lower(f32(8)).compile().bind(f32(8))
    step()
    return step


def that_fails(i):
    f = pjit(lambda x: x + i, in_shardings=sharded())
    with pytest.raises(ValueError, match="divide"):
        f(f32(7))
    return f


KINDS = [
    plain,
    over_devices,
    differentiated,
    batched,
    over_an_array,
    over_a_host_array,
    of_a_method,
    of_a_partial,
    with_a_constraint,
    inside_others,
    with_a_callback,
    as_a_step,
    that_fails,
    functools.partial(with_options, keep_unused=True),
    functools.partial(with_options, static_argnums=1),
    functools.partial(with_options, donate_argnums=0),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    sweep(KINDS, quick=KINDS, several=[that_fails]),
    ids=lambda k: next(iter(getattr(k, "keywords", {})), None) or k.__name__,
)
def test_functions_made_in_a_loop_are_freed(make):
    """With their programs, executables and closed-over arrays."""
    make(0)
    before = held()
    made = [weakref.ref(make(i)) for i in range(1, 13)]
    assert held() == before
    assert [ref() for ref in made] == [None] * len(made)


@pytest.mark.slow
def test_closed_over_array_is_freed_with_its_function(mesh):
    def make():
        w = device_put(np.ones(LARGE, np.float32), sharded())
        return pjit(lambda x: x.sum() + w), weakref.ref(w)

    f, alive = make()
    x = device_put(f32(8), sharded())
    f(x)
    f.lower(x).compile()
    jax.vmap(f)(device_put(f32(8, 2), sharded()))
    gc.collect()
    assert alive() is not None
    del f
    gc.collect()
    assert alive() is None


USES = {
    "calls": lambda f, x: [f(x) for _ in range(3)],
    "lower": lambda f, x: f.lower(x),
    "compiled": lambda f, x: [f.lower(x).compile()(x) for _ in range(2)],
    "bound step": lambda f, x: f.lower(x).compile().bind(x)(),
    "gradient": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "eval_shape": lambda f, x: jax.eval_shape(f, x),
    "inside jax.jit": lambda f, x: jax.jit(lambda x: f(x))(x),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}, {"static_argnames": "n"}], ids=str)
@pytest.mark.parametrize("use", USES)
def test_closed_over_array_is_freed_without_a_collection(use, options):
    """No cycle holds it, as under jax.jit."""

    def make(put):
        w = put()
        return pjit(lambda x, n=1: x + w.sum(), **options), weakref.ref(w)

    puts = (
        lambda: device_put(f32(8), sharded()),
        lambda: jax.device_put(f32(8), sharded()),
        lambda: jax.device_put(f32(300, 300)),
    )
    USES[use](make(puts[0])[0], f32(8))  # imports of a first call leave cycles
    gc.collect()
    gc.disable()
    try:
        for put in puts:
            f, alive = make(put)
            USES[use](f, f32(8))
            del f
            assert alive() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_clear_cache_between_shapes_frees_earlier_programs(mesh):
    """Cleared between phases with other shapes, it keeps the programs of the last phase."""
    f = pjit(lambda x: x * 2, in_shardings=sharded())
    before = held()
    for n in (8, 16, 24):
        f.clear_cache()
        f(np.ones(n, np.float32))
        jax.vmap(f)(np.ones((2, n), np.float32))
    assert PROGRAMS.sizes()[1] == before[2] + 2
    f.clear_cache()
    assert held() == before


def test_caches_keyed_by_value_are_bounded():
    """Caches independent of functions: of shardings, layouts, exchanges, reshard programs."""
    modules = [m for name, m in sys.modules.items() if name.startswith("xlashard.")]
    # JAX's own caches by jaxpr, which drop entries with the jaxpr, are of another class.
    caches = [v for m in modules for v in vars(m).values() if type(v) is LRU]
    assert len(caches) > 8
    for cache in caches:
        assert cache.cache_info().maxsize <= 4096


def test_clear_cache(compilations):
    traces = Traces()
    f = pjit(traces.fun)
    f(f32(4))
    f.clear_cache()
    assert f._cache_size() == 0
    np.testing.assert_array_equal(f(f32(4)), f32(4) * 2 + 1)
    assert f._cache_size() == 1
    assert (traces.count, compilations.count) == (2, 2)


@pytest.mark.slow
def test_clear_cache_frees_transformed_programs(mesh):
    f = pjit(lambda x: x * x, in_shardings=sharded())
    jax.grad(lambda x: f(x).sum())(f32(8))
    before = held()
    f(f32(8))
    jax.grad(lambda x: f(x).sum())(f32(8))
    jax.vmap(f)(f32(2, 8))
    assert held() > before
    f.clear_cache()
    assert PROGRAMS.sizes() == (before[1] - 2, before[2] - 2)
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(f32(8)), 2 * f32(8))


def test_clear_cache_while_a_stage_still_holds_the_trace(compilations):
    f = pjit(fresh())
    traced = f.trace(f32(4))
    compiled = traced.lower().compile()
    f.clear_cache()
    f(f32(4))
    assert compilations.count == 2
    np.testing.assert_array_equal(compiled(f32(4)), f32(4) * 2 + 1)
    traced.lower().compile()
    assert compilations.count == 2


def test_clear_cache_of_one_function_keeps_other_programs(compilations):
    f, g = pjit(fresh()), pjit(lambda x: x - 1)
    f(f32(4)), g(f32(4))
    f.clear_cache()
    g(f32(4))
    assert compilations.count == 2


@pytest.mark.slow
def test_clear_caches_of_jax(compilations, mesh):
    traces = Traces(lambda x: x * x)
    f = pjit(traces.fun, in_shardings=sharded())
    gradient = jax.grad(lambda x: f(x).sum())
    inside = pjit(lambda x: f(x) + 1)
    calls = [lambda: f(f32(8)), lambda: gradient(f32(8)), lambda: inside(f32(8))]
    first = [np.asarray(call()) for call in calls]
    done = compilations.count
    jax.clear_caches()
    assert f._cache_size() == 0
    assert (*PROGRAMS.sizes(), len(EXECUTABLES)) == (0, 0, 0)
    for call, expected in zip(calls, first, strict=True):
        np.testing.assert_array_equal(call(), expected)
    assert (traces.count, compilations.count) == (2, 2 * done)


@pytest.mark.slow
def test_clear_caches_drops_programs_that_move_arrays(mesh):
    x = device_put(f32(8, 8), NamedSharding(mesh, P("x", "y")))
    jax.clear_caches()
    before = held()
    y = device_put(x, x.sharding, donate=True)
    assert held()[0] > before[0]
    jax.clear_caches()
    assert held() == before
    np.testing.assert_array_equal(y, f32(8, 8))


def test_stages_held_by_the_user_survive_clear_caches(mesh):
    f = pjit(lambda x: x + 1, in_shardings=sharded(), out_shardings=sharded())
    lowered = f.lower(f32(8))
    compiled = lowered.compile()
    step = compiled.bind(f32(8))
    jax.clear_caches()
    f.clear_cache()
    np.testing.assert_array_equal(compiled(f32(8)), f32(8) + 1)
    step()
    np.testing.assert_array_equal(step.state, f32(8) + 1)
    np.testing.assert_array_equal(lowered.compile()(f32(8)), f32(8) + 1)


def sizes(pjit_like, place, sharding):
    """Return `_cache_size` after each of some calls."""
    f, found = pjit_like(lambda x, n=1: x * n), []

    def use(call):
        call()
        found.append(f._cache_size())

    x, device = f32(8), jax.devices()[0]
    for value in (x, x + 1, f32(3), place(x), place(x, device), place(x, sharding), f(x)):
        use(lambda value=value: f(value))
    for n in (1, 2, 2.0, np.int32(2)):
        use(lambda n=n: f(x, n))
    use(lambda: f.lower(f32(5)).compile()(f32(5)))
    use(lambda: jax.grad(lambda x: f(x).sum())(x))
    use(lambda: jax.enable_x64(True)(f)(x))
    use(f.clear_cache)
    use(lambda: f(x))
    use(jax.clear_caches)
    g = pjit_like(f.__wrapped__)
    g(x)
    use(lambda: f(x))
    return found


@pytest.mark.slow
def test_cache_size_equals_jax(mesh):
    ours = NamedSharding(mesh, P("x"))
    assert sizes(pjit, device_put, ours) == sizes(jax.jit, jax.device_put, ours.jax_sharding())
