"""Every kind of value as an argument, a result, or a closed-over constant."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from tests.core.pjit.helpers import f32, make_mesh, spec_of
from xlashard import Array, NamedSharding, P, device_put, pjit, with_sharding_constraint


@pytest.mark.parametrize(
    "dtype",
    [
        np.bool_,
        np.int8,
        np.uint16,
        np.int32,
        np.float16,
        ml_dtypes.bfloat16,
        np.float32,
        np.complex64,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        ml_dtypes.int4,
        ml_dtypes.uint4,
    ],
)
def test_dtypes(mesh, dtype, partitioner):
    x = np.arange(16).reshape(8, 2).astype(np.float32).clip(0, 3).astype(dtype)
    f = pjit(lambda x: x.T, in_shardings=P("x"), out_shardings=P(None, "x"))
    with mesh:
        for _ in range(2):
            out = f(x)
            assert out.dtype == dtype and spec_of(out) == (None, "x")
            np.testing.assert_array_equal(
                np.asarray(out).astype(np.complex64), x.T.astype(np.complex64)
            )


def test_complex_arithmetic(mesh):
    z = (f32(8) + 1j * f32(8)).astype(np.complex64)
    f = pjit(lambda z: (jnp.abs(z), z * z.conj()), in_shardings=NamedSharding(mesh, P("x")))
    np.testing.assert_allclose(f(z)[0], np.abs(z), rtol=1e-6)
    np.testing.assert_allclose(f(z)[1], z * z.conj(), rtol=1e-6)


def test_x64():
    with jax.enable_x64(True):
        out = pjit(lambda x: x / 3)(np.ones(3))
        assert out.dtype == np.float64
        assert pjit(lambda: 1)().dtype == np.int64
    assert pjit(lambda x: x / 3)(np.ones(3)).dtype == np.float32


IMAGES = f32(2, 1, 16, 8)
TAPS = np.ones((1, 1, 3, 3), np.float32)
# Functions of a dimension in which elements are inserted, and of which the first are removed: in a
# program over it XLA ends the process.
TRIMMED = {
    "pad": lambda x: jax.lax.pad(x, np.float32(7), [(0, 0, 0), (0, 0, 0), (-1, 0, 1), (-3, 2, 2)]),
    "pad of a sum": lambda x: jax.lax.pad(x.sum((0, 1)), 0.0, [(-7, -5, 3), (1, -1, 1)]),
    "convolution": lambda x: jax.lax.conv_general_dilated(
        x, TAPS, (1, 1), [(-1, 3), (-2, 1)], lhs_dilation=(3, 2), rhs_dilation=(2, 1)
    ),
    "maximum": lambda x: jax.lax.reduce_window(
        x,
        -jnp.inf,
        jax.lax.max,
        (1, 1, 3, 1),
        (1, 1, 2, 1),
        [(0, 0), (0, 0), (-1, 2), (0, 0)],
        base_dilation=(1, 1, 2, 1),
    ),
    "several operands": lambda x: jax.lax.reduce_window(
        (x, 2 * x),
        (0.0, 0.0),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        (1, 1, 3, 1),
        (1, 1, 2, 1),
        [(0, 0), (0, 0), (-3, 2), (0, 0)],
        base_dilation=(1, 1, 2, 1),
    )[1],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIMMED)
def test_dilated_dimensions_are_trimmed(mesh, name, partitioner):
    function = TRIMMED[name]
    for spec in (P(None, None, "x"), P(None, None, "y", "x"), P(None, None, ("x", "y"))):
        out = pjit(function)(device_put(IMAGES, NamedSharding(mesh, spec)))
        np.testing.assert_allclose(out, function(IMAGES), rtol=1e-5)


@pytest.mark.slow
def test_dilated_dimensions_of_explicit_axes_are_trimmed():
    explicit = jax.make_mesh((2, 4), ("x", "y"))
    pad = pjit(lambda x: jax.lax.pad(x, 0.0, [(-1, 0, 1), (0, 0, 0)]))
    with jax.set_mesh(explicit):
        out = pad(device_put(f32(8, 4), P("x")))
    assert out.sharding.spec == P("x", None)
    np.testing.assert_array_equal(np.asarray(out)[1::2], f32(8, 4)[1:])


@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (0, 4), (8, 0, 2)])
def test_empty_and_scalar_shapes(mesh, shape, partitioner):
    spec = P(*(("x",) if shape and shape[0] % 4 == 0 else ()))
    f = pjit(lambda x: (x + 1, x.sum()), in_shardings=spec, out_shardings=(spec, None))
    with mesh:
        for _ in range(2):
            out, total = f(np.zeros(shape, np.float32))
            assert out.shape == shape and float(total) == 0
    np.testing.assert_array_equal(out, np.ones(shape))


@pytest.mark.slow
def test_no_arguments_and_no_results(mesh):
    assert pjit(lambda: None)() is None
    assert pjit(lambda x: {}, in_shardings=NamedSharding(mesh, P("x")))(f32(8)) == {}
    with mesh:
        assert pjit(lambda: ())() == ()
        out = pjit(lambda: jnp.arange(8.0), out_shardings=P("x"))()
    assert spec_of(out) == ("x",)
    assert pjit(lambda x, y: (y, (), x))(1, None) == (None, (), 1)


def test_results_that_are_arguments_or_constants(mesh):
    x = device_put(f32(8), NamedSharding(mesh, P("x")))
    out = pjit(lambda x: (x, x, 3.0, np.ones(2), x))(x)
    np.testing.assert_array_equal(out[0], x)
    np.testing.assert_array_equal(out[4], f32(8))
    assert float(out[2]) == 3.0 and out[2].weak_type
    assert not x.is_deleted()


@pytest.mark.slow
def test_high_level_primitives(mesh):
    """`jnp.searchsorted` of JAX 0.12 is a high-level primitive without a lowering rule."""
    edges, x = jnp.arange(8.0), jnp.arange(8.0) + 0.5
    np.testing.assert_array_equal(pjit(jnp.searchsorted)(edges, x), np.arange(1, 9))
    in_scan = pjit(lambda v: jax.lax.scan(lambda c, x: (c, jnp.searchsorted(edges, x)), 0, v)[1])
    np.testing.assert_array_equal(in_scan(x), np.arange(1, 9))
    ref = jax.new_ref(jnp.zeros(8, int))

    def write(ref, x):
        ref[...] = jnp.searchsorted(edges, x)

    pjit(write)(ref, x)
    np.testing.assert_array_equal(ref[...], np.arange(1, 9))


def test_containers_of_any_kind():
    tree = {"b": [f32(1), (f32(2),)], "a": None}
    out = pjit(lambda t: t)(tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert all(isinstance(leaf, Array) for leaf in jax.tree.leaves(out))


@pytest.mark.slow
def test_many_leaves():
    xs = [np.float32(i) for i in range(300)]
    f = pjit(lambda xs: [x + 1 for x in xs])
    for _ in range(2):
        assert [float(x) for x in f(xs)] == [i + 1 for i in range(300)]


class TestClosedOver:
    def test_small_values(self, mesh):
        table = f32(8)
        f = pjit(lambda x: x + table, out_shardings=NamedSharding(mesh, P("x")))
        for _ in range(2):
            np.testing.assert_array_equal(f(f32(8)), f32(8) * 2)
        assert "dense<" in f.lower(f32(8)).as_text()

    @pytest.mark.parametrize("make", [device_put, jnp.asarray], ids=["xlashard", "jax"])
    def test_large_arrays_are_arguments_of_the_program(self, make, mesh):
        big = make(f32(256, 128))
        f = pjit(lambda x: (x @ big).sum())
        text = f.lower(f32(2, 256)).as_text()
        assert len(text) < 10_000
        assert "tensor<256x128xf32>" in text.split("func.func public @main")[1].split("->")[0]
        for _ in range(2):
            np.testing.assert_allclose(
                f(f32(2, 256)), (f32(2, 256) @ f32(256, 128)).sum(), rtol=1e-5
            )

    @pytest.mark.devices(8)
    def test_closed_over_sharded_array_keeps_its_sharding(self, mesh, partitioner):
        table = device_put(f32(8, 4), NamedSharding(mesh, P("x")))
        f = pjit(lambda x: x + table)
        for _ in range(2):
            out = f(f32(8, 4))
            np.testing.assert_array_equal(out, f32(8, 4) * 2)
            assert len(out.devices()) == 8
        text = f.lower(f32(8, 4)).as_text()
        assert ('[{"x"}, {}]' if partitioner == "shardy" else "devices=[4,1,2]") in text

    def test_single_device_arrays_in_a_multi_device_program(self, mesh):
        small, big = jnp.asarray(f32(4)), jnp.asarray(f32(256, 128))
        f = pjit(lambda x: x + small.sum() + big.sum(), in_shardings=NamedSharding(mesh, P("x")))
        for _ in range(2):
            np.testing.assert_allclose(
                f(f32(8)), f32(8) + f32(4).sum() + f32(256, 128).sum(), rtol=1e-5
            )

    def test_array_committed_to_another_device(self, mesh):
        far = device_put(f32(4), jax.devices()[5])
        f = pjit(lambda x: x + far, in_shardings=NamedSharding(mesh, P("x")))
        np.testing.assert_array_equal(f(f32(4)), f32(4) * 2)
        np.testing.assert_array_equal(pjit(lambda x: x + far)(f32(4)), f32(4) * 2)

    def test_a_deleted_array(self):
        from xlashard.errors import DeletedError

        gone = device_put(f32(256, 128))
        f = pjit(lambda x: x + gone)
        gone.delete()
        with pytest.raises((DeletedError, RuntimeError), match="delete"):
            f(1.0)

    @pytest.mark.slow
    def test_keys(self, mesh):
        key = jax.random.key(1)
        f = pjit(lambda: jax.random.uniform(key, (8,)), out_shardings=NamedSharding(mesh, P("x")))
        for _ in range(2):
            np.testing.assert_array_equal(f(), jax.random.uniform(key, (8,)))

    @pytest.mark.devices(8)
    @pytest.mark.slow
    def test_sharded_keys(self, mesh):
        keys = jax.random.split(jax.random.key(1), 8)
        spread = jax.device_put(keys, jax.sharding.NamedSharding(mesh, P("x")))
        f = pjit(lambda: jax.vmap(jax.random.uniform)(spread))
        for _ in range(2):
            np.testing.assert_array_equal(f(), jax.vmap(jax.random.uniform)(keys))
            assert spec_of(f()) == ("x",)

    def test_large_arrays_of_the_host(self, mesh):
        big = f32(256, 128)
        f = pjit(lambda x: x + big, out_shardings=NamedSharding(mesh, P("x", "y")))
        assert len(f.lower(1.0).as_text()) < 10_000
        for _ in range(2):
            np.testing.assert_array_equal(f(1.0), big + 1)

    @pytest.mark.slow
    def test_large_arrays_of_an_inner_function(self, mesh):
        big = device_put(f32(256, 128), NamedSharding(mesh, P("x")))
        inner = pjit(lambda x: (x * big).sum(), out_shardings=NamedSharding(mesh, P()))
        outer = pjit(lambda x: inner(x) + inner(x + 1))
        assert len(outer.lower(1.0).as_text()) < 10_000
        total = f32(256, 128).sum()
        np.testing.assert_allclose(outer(1.0), 3 * total, rtol=1e-5)
        np.testing.assert_allclose(jax.grad(inner)(1.0), total, rtol=1e-5)
        np.testing.assert_allclose(jax.grad(outer)(1.0), 2 * total, rtol=1e-5)
        np.testing.assert_allclose(jax.jit(outer)(1.0), 3 * total, rtol=1e-5)

    def test_layouts(self, mesh):
        turned = Format(Layout(major_to_minor=(1, 0)), NamedSharding(mesh, P("x")))
        big = device_put(f32(256, 128), turned)
        f = pjit(lambda x: x + big)
        for _ in range(2):
            np.testing.assert_array_equal(f(1.0), f32(256, 128) + 1)

    def test_values_under_a_transformation(self, mesh):
        table = device_put(f32(8, 4), NamedSharding(mesh, P("x")))
        f = pjit(lambda x: (x * table).sum())
        np.testing.assert_array_equal(jax.grad(f)(f32(8, 4)), f32(8, 4))
        np.testing.assert_allclose(jax.jit(f)(f32(8, 4)), (f32(8, 4) ** 2).sum(), rtol=1e-6)


class TestKeys:
    @pytest.mark.slow
    def test_keys_are_accepted_and_returned(self, partitioner):
        f = pjit(lambda key: jax.random.split(key, 4))
        for _ in range(2):
            out = f(jax.random.key(0))
            assert jnp.issubdtype(out.dtype, jax.dtypes.prng_key)
        wanted = jax.random.split(jax.random.key(0), 4)
        np.testing.assert_array_equal(jax.random.key_data(out), jax.random.key_data(wanted))

    @pytest.mark.devices(8)
    @pytest.mark.slow
    def test_key_arrays_can_be_sharded(self, mesh, partitioner):
        f = pjit(
            lambda key: jax.random.split(key, (8, 2)),
            in_shardings=None,
            out_shardings=P("x", "y"),
        )
        draw = pjit(
            jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (3,)))),
            in_shardings=P("x", "y"),
            out_shardings=P("x", "y"),
        )
        with mesh:
            for _ in range(2):
                keys = f(jax.random.key(3))
                assert keys.shape == (8, 2)
                assert keys.sharding.shard_shape(keys.shape) == (2, 1)
                out = draw(keys)
        assert spec_of(out) == ("x", "y")
        wanted = jax.random.split(jax.random.key(3), (8, 2))
        np.testing.assert_array_equal(jax.random.key_data(keys), jax.random.key_data(wanted))
        flat = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (3,))))(wanted)
        np.testing.assert_array_equal(out, flat)

    @pytest.mark.slow
    def test_partitioner_propagates_key_shardings(self, mesh):
        keys = jax.device_put(
            jax.random.split(jax.random.key(3), 8), jax.sharding.NamedSharding(mesh, P("x"))
        )
        out = pjit(lambda k: jax.vmap(jax.random.bits)(k))(keys)
        assert spec_of(out) == ("x",)
        np.testing.assert_array_equal(out, jax.vmap(jax.random.bits)(keys))

    @pytest.mark.slow
    def test_key_arrays_can_be_constrained(self, mesh):
        sharding = NamedSharding(mesh, P("x"))
        f = pjit(lambda k: with_sharding_constraint(jax.random.split(k, 8), sharding))
        out = f(jax.random.key(5))
        wanted = jax.random.split(jax.random.key(5), 8)
        np.testing.assert_array_equal(jax.random.key_data(out), jax.random.key_data(wanted))

    @pytest.mark.slow
    def test_raw_keys(self, mesh):
        f = pjit(lambda k: jax.random.normal(k, (4,)), in_shardings=NamedSharding(mesh, P()))
        np.testing.assert_array_equal(
            f(jax.random.PRNGKey(0)), jax.random.normal(jax.random.PRNGKey(0), (4,))
        )


@pytest.mark.devices(8)
def test_meshes_with_an_axis_of_size_one(partitioner):
    with make_mesh((8, 1), ("x", "one")):
        out = pjit(lambda x: x * 2, in_shardings=P(("x", "one")), out_shardings=P("one", "x"))(
            f32(8, 8)
        )
    np.testing.assert_array_equal(out, f32(8, 8) * 2)
    assert out.sharding.shard_shape((8, 8)) == (8, 1)


@pytest.mark.devices(8)
def test_shard_map_works_inside_pjit(mesh, partitioner):
    inner = jax.shard_map(
        lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x", "y"), out_specs=P(None, "y")
    )
    f = pjit(lambda x: inner(x * 2), in_shardings=NamedSharding(mesh, P("x", "y")))
    np.testing.assert_allclose(f(f32(4, 2)), (f32(4, 2) * 2).sum(0, keepdims=True))
