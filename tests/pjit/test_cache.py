"""No program is compiled twice, and none outlives its function."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pjit.helpers import f32, make_mesh
from xlashard import (
    AUTO,
    UNSPECIFIED,
    GSPMDSharding,
    NamedSharding,
    P,
    SingleDeviceSharding,
    device_put,
    pjit,
    with_sharding_constraint,
)
from xlashard.pjit import PROGRAMS


def fresh():
    """A function that no other test has compiled."""
    return lambda x: x * 2 + 1


def test_a_repeated_call(compilations):
    f = pjit(fresh())
    for _ in range(5):
        f(f32(4))
    assert compilations.count == 1
    f(f32(5))
    assert compilations.count == 2


def test_uncommitted_scalars_of_any_value(compilations):
    f = pjit(lambda x, s: x * s)
    for scale in (1.0, 2.0, 3.5):
        f(f32(4), scale)
    assert compilations.count == 1
    f(f32(4), 2)
    f(f32(4), 3)
    assert compilations.count == 2


def test_equal_meshes_built_twice(compilations):
    f = pjit(fresh(), in_shardings=P("x"), out_shardings=P("x"))
    for _ in range(3):
        with make_mesh((4, 2), ("x", "y")):
            f(f32(8))
    g = pjit(f.__wrapped__, in_shardings=NamedSharding(make_mesh((4, 2), ("x", "y")), P("x")))
    assert compilations.count == 1
    g(f32(8))
    assert compilations.count == 2


@pytest.mark.parametrize(
    "writings",
    [
        [P("x"), P("x", None), P(("x",)), P(("x",), None)],
        [P(), P(None), P(None, None)],
        [P(None, ("x", "y")), P((), ("x", "y"))],
    ],
)
def test_equivalent_specs(mesh, writings, compilations):
    fun = fresh()
    for spec in writings:
        with mesh:
            out = pjit(fun, in_shardings=spec, out_shardings=spec)(f32(8, 8))
        assert out.sharding.spec == spec
    assert compilations.count == 1


def test_equivalent_specs_of_arguments(mesh, compilations):
    f = pjit(fresh())
    for spec in (P("x"), P("x", None), P(("x",))):
        f(device_put(f32(8, 8), NamedSharding(mesh, spec)))
    assert compilations.count == 1


def test_a_resource_and_an_equal_argument(mesh, compilations):
    fun, sharding = fresh(), NamedSharding(mesh, P("x"))
    pjit(fun, in_shardings=sharding)(f32(8))
    x = device_put(f32(8), sharding)
    pjit(fun, in_shardings=sharding)(x)
    pjit(fun)(x)
    pjit(fun, in_shardings=(UNSPECIFIED,))(x)
    pjit(fun, in_shardings=AUTO)(x)
    pjit(fun, in_shardings=sharding)(jnp.asarray(f32(8)))
    assert compilations.count == 1
    with mesh:
        pjit(fun, in_shardings=P("x"))(f32(8))
        pjit(fun)(x)
    assert compilations.count == 2


def test_committed_and_uncommitted_on_one_device(compilations):
    fun, device = fresh(), jax.devices()[0]
    loose = pjit(fun)(f32(4))
    bound = pjit(fun)(device_put(f32(4), device))
    asked = pjit(fun, device=device)(f32(4))
    named = pjit(fun, in_shardings=NamedSharding(make_mesh((1,), ("x",)), P("x")))(f32(4))
    assert compilations.count == 1
    assert not loose.committed and bound.committed and asked.committed
    assert isinstance(bound.sharding, SingleDeviceSharding)
    assert isinstance(named.sharding, NamedSharding)


def test_results_of_shared_programs_keep_their_own_writing(mesh, compilations):
    fun = fresh()
    one = pjit(fun, out_shardings=NamedSharding(mesh, P("x")))
    other = pjit(fun, out_shardings=NamedSharding(mesh, P("x", None)))
    for _ in range(2):
        assert one(f32(8, 2)).sharding.spec == P("x")
        assert other(f32(8, 2)).sharding.spec == P("x", None)
    assert compilations.count == 1


def test_two_pjits_of_one_function(compilations):
    fun = fresh()
    f, g = pjit(fun), pjit(fun)
    f(f32(4))
    g(f32(4))
    assert compilations.count == 1


def test_calling_and_lowering_share_a_program(mesh, compilations):
    f = pjit(fresh(), out_shardings=NamedSharding(mesh, P("x")))
    f.lower(f32(8)).compile()(f32(8))
    f.lower(jax.ShapeDtypeStruct((8,), np.float32)).compile()
    f(f32(8))
    assert compilations.count == 1


def test_what_matters_compiles_again(mesh, compilations):
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


def test_a_training_loop_compiles_once(mesh, compilations):
    """From host values over committed ones to the program's own results."""
    named = NamedSharding(mesh, P("x"))
    step = pjit(lambda state, x: state + x, in_shardings=(named, named), out_shardings=named)
    state = f32(8)
    for _ in range(3):
        state = step(state, f32(8))
    step(state, state)
    assert compilations.count == 1


def test_constraints_inside_share_what_is_equal(mesh, compilations):
    sharding = NamedSharding(make_mesh((4, 2), ("x", "y")), P("x"))

    def fun(x):
        return with_sharding_constraint(x + 3, sharding)

    pjit(fun)(f32(8))
    pjit(fun)(f32(8))
    assert compilations.count == 1


def test_tiles_and_the_spec_that_says_the_same_both_work(mesh):
    fun = fresh()
    tiles = GSPMDSharding(jax.devices(), "{devices=[4,2]<=[8] last_tile_dim_replicate}")
    for sharding in (tiles, NamedSharding(mesh, P("x"))):
        out = pjit(fun, in_shardings=sharding, out_shardings=sharding)(f32(8))
        assert out.sharding is sharding or out.sharding == sharding
