"""Every object that specifies the sharding of an argument or a result."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding as JaxNamedSharding
from jax.sharding import SingleDeviceSharding as JaxSingleDeviceSharding

from tests.core.pjit.helpers import device_ids, f32, make_mesh, spec_of
from tests.message_patterns import naming
from xlashard import (
    FROM_GDA,
    UNSPECIFIED,
    Array,
    GSPMDSharding,
    NamedSharding,
    P,
    Sharding,
    SingleDeviceSharding,
    jit,
    pjit,
)
from xlashard.errors import MeshError, ResourceError


def double(x):
    return x * 2


def test_spec_is_resolved_on_the_mesh_in_force_at_the_call(mesh, partitioner):
    f = pjit(double, in_shardings=P("x", "y"), out_shardings=P("y", "x"))
    with mesh:
        out = f(f32(8, 8))
    assert isinstance(out, Array)
    assert out.sharding == NamedSharding(mesh, P("y", "x"))
    np.testing.assert_array_equal(out, f32(8, 8) * 2)


@pytest.mark.devices(8)
def test_none_means_replicated(mesh, partitioner):
    with mesh:
        out = pjit(double, in_shardings=None, out_shardings=None)(f32(8))
    assert out.sharding.is_fully_replicated
    assert len(out.devices()) == 8


FOUR_LAST = make_mesh((4,), ("x",), jax.devices()[4:])
AROUND = {
    "nested": lambda g: pjit(lambda x: g(x) + 1),
    "jit": lambda g: jax.jit(lambda x: g(x) + 1),
    "grad": lambda g: jax.grad(lambda x: g(x).sum()),
    "nested grad": lambda g: pjit(jax.grad(lambda x: (x * g(x)).sum())),
    "jvp": lambda g: lambda x: jax.jvp(g, (x,), (x,)),
    "vmap": jax.vmap,
    "remat": lambda g: jax.grad(lambda x: jax.checkpoint(g)(x).sum()),
    "scan": lambda g: lambda x: jax.lax.scan(lambda c, _: (g(c), None), x, length=2)[0],
    "shard_map": lambda g: jax.shard_map(g, mesh=FOUR_LAST, in_specs=P("x"), out_specs=P("x")),
}


@pytest.mark.slow
@pytest.mark.parametrize("around", AROUND)
def test_none_uses_the_devices_of_the_enclosing_program(around, partitioner):
    """Inside another program or a transformation None means the enclosing program's devices."""
    x = jax.device_put(f32(8), JaxNamedSharding(FOUR_LAST, P("x")))
    for compiled in (jit(double, out_shardings=None), pjit(double, out_shardings=None)):
        out = AROUND[around](compiled)(x)
        wanted = AROUND[around](double)(f32(8)) if around != "shard_map" else f32(8) * 2
        jax.tree.map(np.testing.assert_array_equal, out, wanted)
        if around not in ("grad", "remat"):  # where JAX makes the first cotangent on device 0
            assert all(o.devices() == set(FOUR_LAST.devices.flat) for o in jax.tree.leaves(out))


@pytest.mark.slow
def test_none_in_a_nested_pjit_means_replicated(partitioner):
    g = pjit(double, out_shardings=None)
    x = jax.device_put(f32(8), JaxNamedSharding(FOUR_LAST, P("x")))
    assert pjit(lambda x: g(x))(x).sharding.is_fully_replicated
    assert jax.vmap(g)(x).sharding.is_fully_replicated
    # The buffers of keys have a dimension more than their type.
    draw = pjit(lambda key: jax.random.bits(key, (8,)), in_shardings=None, out_shardings=None)
    key = jax.device_put(jax.random.key(0), JaxNamedSharding(FOUR_LAST, P()))
    assert pjit(lambda key: draw(key))(key).sharding.is_fully_replicated


@pytest.mark.devices(8)
@pytest.mark.slow
def test_none_in_jit_means_unspecified(mesh, partitioner):
    x = jax.device_put(f32(8), JaxNamedSharding(mesh, P("x")))
    f = jit(double, in_shardings=(None,), out_shardings=None)
    theirs = jax.jit(double, in_shardings=(None,), out_shardings=None)
    for around in (mesh, jax.set_mesh(mesh)):
        with around:
            assert f(x).sharding == theirs(x).sharding == x.sharding
    with mesh, pytest.raises(ResourceError, match="committed"):
        pjit(double, in_shardings=None)(x)
    tree = jit(lambda t: t, in_shardings=({"a": None, "b": x.sharding, "c": None},))
    out = tree({"a": x, "b": x, "c": None})
    assert out["a"].sharding == x.sharding and out["c"] is None


def test_jit_has_the_parameters_of_pjit():
    assert inspect.signature(jit) == inspect.signature(pjit)
    assert jit(donate_argnums=0)(double)(jnp.ones(4)).shape == (4,)
    with pytest.raises(TypeError, match="donate"):
        jit(double, donate_argnum=0)  # pyright: ignore[reportCallIssue]


def test_set_mesh_puts_a_mesh_in_force(mesh):
    f = pjit(double, in_shardings=P("x"), out_shardings=P("x"))
    with jax.set_mesh(mesh):
        assert spec_of(f(f32(8))) == ("x",)


def test_a_mesh_as_a_decorator(mesh):
    f = pjit(double, out_shardings=P("y"))

    @mesh
    def program():
        return f(f32(8))

    assert spec_of(program()) == ("y",)


@pytest.mark.devices(8)
def test_innermost_mesh_is_in_force(mesh):
    inner = make_mesh((2, 2), ("a", "b"))
    f = pjit(double, out_shardings=P("a"))
    g = pjit(double, out_shardings=P("x"))
    with mesh:
        with inner:
            assert len(f(f32(8)).devices()) == 4
        assert len(g(f32(8)).devices()) == 8


@pytest.mark.devices(8)
@pytest.mark.slow
def test_mesh_in_force_may_change_between_calls():
    f = pjit(double, in_shardings=P("x"), out_shardings=P("x"))
    for count in (8, 4, 2, 1, 8):
        with make_mesh((count,), ("x",)) as one:
            out = f(f32(8))
        assert out.sharding.devices == tuple(one.devices.flat)
        assert out.sharding.shard_shape((8,)) == (8 // count,)


def test_meshes_of_equal_shape_on_different_devices_are_distinct():
    def constrained(x):
        from xlashard import with_sharding_constraint

        return with_sharding_constraint(x, P("x")) + 1

    f = pjit(constrained, out_shardings=P("x"))
    first = make_mesh((4,), ("x",))
    second = make_mesh((4,), ("x",), jax.devices()[4:])
    backwards = make_mesh((4,), ("x",), jax.devices()[3::-1])
    for one in (first, second, backwards, first):
        with one:
            out = f(f32(8))
        assert out.sharding.devices == tuple(one.devices.flat)
        np.testing.assert_array_equal(out, f32(8) + 1)


@pytest.mark.parametrize("kind", [NamedSharding, JaxNamedSharding])
def test_shardings_need_no_mesh_in_force(mesh, kind, partitioner):
    f = pjit(double, in_shardings=kind(mesh, P("x")), out_shardings=kind(mesh, P(None, "y")))
    out = f(f32(4, 4))
    assert out.sharding == NamedSharding(mesh, P(None, "y"))
    assert type(out.sharding) is NamedSharding


@pytest.mark.parametrize("kind", [SingleDeviceSharding, JaxSingleDeviceSharding])
def test_a_single_device(kind):
    device = jax.devices()[3]
    out = pjit(double, in_shardings=kind(device))(f32(4))
    assert device_ids(out) == [3]
    assert out.committed


def test_gspmd_sharding_as_a_resource(partitioner):
    tiles = GSPMDSharding(jax.devices(), "{devices=[2,1,4]<=[8] last_tile_dim_replicate}")
    out = pjit(double, in_shardings=tiles, out_shardings=tiles)(f32(4, 4))
    assert out.sharding.is_equivalent_to(tiles, 2)
    np.testing.assert_array_equal(out, f32(4, 4) * 2)


class Halves(Sharding):
    """Sharding with the first half of dimension 0 on one device, the second on another."""

    def __init__(self, devices):
        self._devices = tuple(devices)

    @property
    def devices(self):
        return self._devices

    def devices_indices_map(self, shape):
        half = shape[0] // 2
        first, second = self._devices
        return {first: (slice(0, half),), second: (slice(half, shape[0]),)}


def test_user_defined_sharding_is_accepted(partitioner):
    own = Halves(jax.devices()[:2])
    out = pjit(double, in_shardings=own, out_shardings=own)(f32(4, 2))
    assert [s.data.shape for s in out.addressable_shards] == [(2, 2), (2, 2)]
    np.testing.assert_array_equal(out, f32(4, 2) * 2)


def test_a_user_defined_sharding_that_xla_does_not_support():
    class Uneven(Halves):
        def devices_indices_map(self, shape):
            first, second = self._devices
            return {first: (slice(0, 1),), second: (slice(1, shape[0]),)}

    f = pjit(double, in_shardings=Uneven(jax.devices()[:2]))
    with pytest.raises(ResourceError, match=r"in_shardings of x.*float32\[4,2\]"):
        f(f32(4, 2))


@pytest.mark.devices(8)
def test_devices_indices_map_without_a_device_is_refused():
    class Forgetful(Halves):
        def devices_indices_map(self, shape):
            return {self._devices[0]: (slice(None),)}

    with pytest.raises(
        ResourceError,
        match=naming(
            "out_shardings of result (float32[4])", "Forgetful.devices_indices_map((4,))", "cpu:1"
        ),
    ):
        pjit(double, out_shardings=Forgetful(jax.devices()[:2]))(f32(4))


def test_partitioner_chooses_unspecified_out_shardings(mesh, partitioner):
    f = pjit(jnp.matmul, in_shardings=(P("x"), P(None, "y")), out_shardings=UNSPECIFIED)
    with mesh:
        out = f(f32(8, 4), f32(4, 8))
    assert type(out.sharding) is NamedSharding
    assert out.sharding.mesh == mesh
    np.testing.assert_allclose(out, f32(8, 4) @ f32(4, 8), rtol=1e-6)


def test_argument_with_unspecified_sharding_keeps_its_sharding(mesh):
    x = jax.device_put(f32(8, 4), JaxNamedSharding(mesh, P("y")))
    f = pjit(lambda x, y: (x + 1, y), in_shardings=(UNSPECIFIED, P("x")))
    with mesh:
        compiled = f.lower(x, f32(4)).compile()
    assert compiled.input_shardings[0][0].is_equivalent_to(NamedSharding(mesh, P("y")), 2)


def test_format_sets_layout_and_sharding(mesh):
    sharding = NamedSharding(mesh, P("x"))
    turned = Format(Layout(major_to_minor=(1, 0)), sharding)
    f = pjit(double, in_shardings=turned, out_shardings=turned)
    out = f(f32(8, 4))
    assert out.format.layout.major_to_minor == (1, 0)
    assert out.sharding == sharding
    np.testing.assert_array_equal(out, f32(8, 4) * 2)
    np.testing.assert_array_equal(f(out), f32(8, 4) * 4)


def test_axis_resources_are_aliases_of_shardings(mesh):
    f = pjit(double, in_axis_resources=P("x"), out_axis_resources=P("y"))
    with mesh:
        assert spec_of(f(f32(8))) == ("y",)


@pytest.mark.devices(8)
@pytest.mark.parametrize("resource", [P("z"), P("x"), P(None, None, "x"), FROM_GDA])
@pytest.mark.parametrize("name", ["in_shardings", "in_axis_resources"])
def test_argument_errors_use_the_keyword_of_the_caller(mesh, name, resource):
    with mesh, pytest.raises(ResourceError, match=rf"^{name} of x "):
        pjit(double, **{name: resource})(f32(7, 8))


@pytest.mark.devices(8)
@pytest.mark.parametrize("name", ["out_shardings", "out_axis_resources"])
def test_result_errors_use_the_keyword_of_the_caller(mesh, name):
    with mesh, pytest.raises(ResourceError, match=rf"^{name} of result "):
        pjit(double, **{name: P("x")})(f32(7, 8))


def test_in_shardings_with_in_axis_resources_is_refused():
    with pytest.raises(ResourceError, match=naming("in_shardings", "in_axis_resources")):
        pjit(double, in_shardings=None, in_axis_resources=None)


def test_error_of_a_spec_without_a_mesh_suggests_set_mesh():
    with pytest.raises(MeshError, match=r"in_shardings of x is .*P\('x',?\).*with jax.set_mesh"):
        pjit(double, in_shardings=P("x"))(f32(8))


@pytest.mark.devices(8)
def test_none_without_a_mesh_replicates_over_the_devices_of_the_program(mesh):
    f = pjit(lambda x, y: x + y, in_shardings=(None, NamedSharding(mesh, P("x"))))
    out = f(f32(8), f32(8))
    assert len(out.devices()) == 8
    assert pjit(double, in_shardings=None, out_shardings=None)(f32(8)).shape == (8,)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("x", r"P\('x'\)"),
        (jax.devices, "None \\(replicated\\)"),
        (3, "None \\(replicated\\)"),
        (np.arange(3), "None \\(replicated\\)"),
    ],
)
@pytest.mark.parametrize("keyword", ["in_shardings", "out_shardings"])
def test_invalid_resource_is_refused_with_its_path(wrong, hint, keyword):
    with pytest.raises(ResourceError, match=rf"{keyword}\[1\]\['a'\] is .*{hint}") as caught:
        pjit(double, **{keyword: (None, {"a": wrong})})
    assert caught.value.path == f"{keyword}[1]['a']"


def test_a_device_or_a_mesh_as_a_resource(mesh):
    with pytest.raises(ResourceError, match="SingleDeviceSharding"):
        pjit(double, in_shardings=jax.devices()[0])
    with pytest.raises(ResourceError, match="NamedSharding"):
        pjit(double, in_shardings=mesh)


def test_memory_kinds(mesh):
    host = NamedSharding(mesh, P("x"), memory_kind="pinned_host")
    out = pjit(lambda x: x, out_shardings=host)(f32(8))
    assert out.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(out, f32(8))


def test_single_device_mesh_gives_named_shardings():
    with make_mesh((1,), ("x",)):
        out = pjit(double)(f32(4))
    assert isinstance(out.sharding, NamedSharding)
