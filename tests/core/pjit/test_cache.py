"""No program is compiled twice for arguments and shardings with equal cache keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.pjit.helpers import Traces, by_set_mesh, by_with, f32, fresh, make_mesh
from xlashard import (
    UNSPECIFIED,
    GSPMDSharding,
    NamedSharding,
    P,
    SingleDeviceSharding,
    device_put,
    pjit,
)


def test_a_repeated_call(compilations):
    f = pjit(fresh())
    for _ in range(5):
        f(f32(4))
    assert compilations.count == 1
    f(f32(5))
    assert compilations.count == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "scalars",
    [
        # A Python number takes the other operand's dtype (it is weakly typed)...
        (1.0, 2.5, float("inf"), jnp.asarray(3.0)),
        (1, 2, -(2**31), jnp.asarray(3)),
        (True, False, np.bool_(1), jnp.asarray(False)),
        (1j, 2.0 + 1j),
        # ... a NumPy number doesn't, be it a scalar or an array, on the host or on a device.
        (np.float32(1), np.float64(2), np.array(3, np.float32), jnp.float32(4)),
        (np.int32(1), np.int64(2), np.array(3), jnp.int32(4)),
        (np.uint8(1), np.uint8(255), jnp.uint8(3)),
    ],
    ids=lambda s: str(s[0]),
)
def test_scalars_of_one_type_share_a_program(scalars, compilations):
    f = pjit(lambda x, s: x * s)
    for scalar in scalars:
        expected = jax.jit(lambda x, s: x * s)(f32(4), scalar)
        out = f(f32(4), scalar)
        assert out.dtype == expected.dtype and out.weak_type == expected.weak_type
        np.testing.assert_array_equal(out, expected)
        f(f32(4), device_put(scalar, jax.devices()[0]))
    assert compilations.count == 1


@pytest.mark.slow
def test_scalars_of_different_types_are_traced_separately(compilations):
    traces = Traces(lambda s: f32(4) * s)
    f = pjit(traces.fun)
    for done, scalar in enumerate((1.0, 1, True, 1j, np.float32(1), np.float16(1), np.int32(1)), 1):
        f(scalar)
        assert traces.count == done
    assert compilations.count <= traces.count


def test_weak_type_without_effect_causes_no_recompile(compilations):
    f = pjit(lambda x: -x)
    weak, strong = f(1), f(np.int32(1))
    assert weak.weak_type and not strong.weak_type
    assert compilations.count == 1


def test_host_and_device_arrays_of_every_kind_share_a_program(compilations):
    f, x, device = pjit(fresh()), f32(4, 6), jax.devices()[0]
    for value in (
        x,
        x.astype(np.float64),
        np.asfortranarray(x),
        x[::-1],
        jnp.asarray(x),
        jax.device_put(x, device),
        device_put(x),
        device_put(x, device),
        f(x),
    ):
        f(value)
    assert compilations.count == 1


@pytest.mark.devices(8)
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


def test_requested_and_committed_equal_shardings_share_a_program(mesh, compilations):
    fun, sharding = fresh(), NamedSharding(mesh, P("x"))
    pjit(fun, in_shardings=sharding)(f32(8))
    x = device_put(f32(8), sharding)
    pjit(fun, in_shardings=sharding)(x)
    pjit(fun)(x)
    pjit(fun, in_shardings=(UNSPECIFIED,))(x)
    pjit(fun, in_shardings=sharding)(jnp.asarray(f32(8)))
    for of in (by_with, by_set_mesh):
        of(mesh, lambda: pjit(fun, in_shardings=P("x"))(f32(8)))
        of(mesh, lambda: pjit(fun)(x))
    assert compilations.count == 1


def test_committed_and_uncommitted_arguments_share_a_program(compilations):
    fun, device = fresh(), jax.devices()[0]
    loose = pjit(fun)(f32(4))
    bound = pjit(fun)(device_put(f32(4), device))
    asked = pjit(fun, device=device)(f32(4))
    named = pjit(fun, in_shardings=NamedSharding(make_mesh((1,), ("x",)), P("x")))(f32(4))
    assert compilations.count == 1
    assert not loose.committed and bound.committed and asked.committed
    assert isinstance(bound.sharding, SingleDeviceSharding)
    assert isinstance(named.sharding, NamedSharding)


def test_results_of_shared_programs_keep_the_requested_spec(mesh, compilations):
    fun = fresh()
    one = pjit(fun, out_shardings=NamedSharding(mesh, P("x")))
    other = pjit(fun, out_shardings=NamedSharding(mesh, P("x", None)))
    for _ in range(2):
        assert one(f32(8, 2)).sharding.spec == P("x")
        assert other(f32(8, 2)).sharding.spec == P("x", None)
    assert compilations.count == 1


def test_unused_mesh_in_force_causes_no_recompile(mesh, compilations):
    traces = Traces()
    f, x = pjit(traces.fun), device_put(f32(8), NamedSharding(mesh, P("x")))
    first = f(x)
    for of in (by_with, by_set_mesh):
        for _ in range(2):
            again = of(make_mesh((4, 2), ("x", "y")), lambda: f(x))
            assert again.sharding == first.sharding
            np.testing.assert_array_equal(again, first)
    assert compilations.count == 1
    # Without a new trace it is unknown whether the function reads the mesh.
    assert traces.count == 3


def test_mesh_read_by_the_function_is_part_of_the_cache_key(mesh, compilations):
    f, x = pjit(lambda x: x * jax.sharding.get_abstract_mesh().axis_names.count("y")), f32(8)
    placed = device_put(x, NamedSharding(mesh, P("x")))
    np.testing.assert_array_equal(by_set_mesh(mesh, lambda: f(placed)), x)
    np.testing.assert_array_equal(f(placed), x * 0)
    assert compilations.count == 2


def test_equal_mesh_entered_at_each_call_compiles_once(compilations):
    traces = Traces()
    f = pjit(traces.fun, in_shardings=P("x"), out_shardings=P("x"))
    for _ in range(3):
        by_with(make_mesh((4, 2), ("x", "y")), lambda: f(f32(8)))
    for _ in range(3):
        by_set_mesh(make_mesh((4, 2), ("x", "y")), lambda: f(f32(8)))
    assert (traces.count, compilations.count) == (2, 1)


def test_tiles_and_an_equivalent_spec_both_work(mesh):
    fun = fresh()
    tiles = GSPMDSharding(jax.devices(), "{devices=[4,2]<=[8] last_tile_dim_replicate}")
    for sharding in (tiles, NamedSharding(mesh, P("x"))):
        out = pjit(fun, in_shardings=sharding, out_shardings=sharding)(f32(8))
        assert out.sharding is sharding or out.sharding == sharding
