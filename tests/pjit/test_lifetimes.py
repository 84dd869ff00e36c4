"""No program outlives its function, and caches can be cleared."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pjit.helpers import f32, fresh
from xlashard import NamedSharding, P, pjit
from xlashard.pjit import PROGRAMS


def test_clear_cache(compilations):
    f = pjit(fresh())
    f(f32(4))
    f.clear_cache()
    assert f._cache_size() == 0
    np.testing.assert_array_equal(f(f32(4)), f32(4) * 2 + 1)
    assert f._cache_size() == 1
    assert compilations.count == 2


def test_clear_cache_of_one_function_leaves_others(compilations):
    f, g = pjit(fresh()), pjit(lambda x: x - 1)
    f(f32(4)), g(f32(4))
    f.clear_cache()
    g(f32(4))
    assert compilations.count == 2


def test_clear_caches_of_jax(compilations):
    f = pjit(fresh())
    f(f32(4))
    jax.clear_caches()
    gc.collect()
    assert PROGRAMS.sizes() == (0, 0)
    np.testing.assert_array_equal(f(f32(4)), f32(4) * 2 + 1)
    assert compilations.count == 2


@pytest.mark.parametrize(
    "options",
    [{}, {"keep_unused": True}, {"static_argnums": 1}, {"donate_argnums": 0}, {"sharded": True}],
    ids=lambda o: next(iter(o), "plain"),
)
def test_functions_made_in_a_loop_are_freed(mesh, options):
    options = dict(options)
    if options.pop("sharded", False):
        options["out_shardings"] = NamedSharding(mesh, P("x"))
    gc.collect()
    before, alive = PROGRAMS.sizes(), []
    for i in range(4):
        big = np.full(8, i, np.float32)

        def fun(x, n=2, big=big):
            return x * n + big + jnp.asarray(big)

        f = pjit(fun, **options)
        f(f32(8))
        f(f32(8))
        f.lower(f32(8)).compile()(f32(8))
        alive += [weakref.ref(fun), weakref.ref(f)]
        del fun, f
    gc.collect()
    assert PROGRAMS.sizes() == before
    assert [ref() for ref in alive] == [None] * len(alive)


def test_transformed_functions_are_freed(mesh):
    sharding = NamedSharding(mesh, P("x"))
    gc.collect()
    before, alive = PROGRAMS.sizes(), []
    for _ in range(3):
        fun = fresh()
        f = pjit(fun, in_shardings=sharding)
        jax.grad(lambda x, f=f: f(x).sum())(f32(8))
        jax.vmap(f)(f32(2, 8))
        alive.append(weakref.ref(fun))
        del fun, f
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)
    assert PROGRAMS.sizes() == before
