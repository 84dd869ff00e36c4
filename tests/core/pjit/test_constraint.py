"""`with_sharding_constraint` in every program and transformation, and on concrete arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from tests.core.pjit.helpers import f32, make_mesh, spec_of
from tests.message_patterns import naming
from xlashard import (
    AUTO,
    UNSPECIFIED,
    Array,
    GSPMDSharding,
    NamedSharding,
    P,
    Sharding,
    SingleDeviceSharding,
    device_put,
    pjit,
    with_sharding_constraint,
)
from xlashard.errors import (
    ArgumentError,
    DeletedError,
    DeviceMismatchError,
    IgnoredShardingWarning,
    MeshError,
    ResourceError,
    UnevenShardingWarning,
)

U = P.UNCONSTRAINED


def pinned(spec, mesh=None):
    sharding = spec if mesh is None else NamedSharding(mesh, spec)
    return lambda x: with_sharding_constraint(x * 2, sharding) + 1


def test_constraint_leaves_the_explicit_mesh_of_its_value_as_with_jax():
    """The axis `x` has other sizes in both meshes, so that the spec means other tiles."""
    types = (jax.sharding.AxisType.Explicit,) * 2
    explicit, flat = jax.make_mesh((2, 4), ("x", "y"), axis_types=types), make_mesh((8,), ("x",))
    x = device_put(f32(8, 4), NamedSharding(explicit, P("x")))
    f = pjit(lambda x: (x + 1, with_sharding_constraint(x * 2, NamedSharding(flat, P("x")))))
    kept, moved = f(x)
    assert kept.sharding.is_equivalent_to(x.sharding, 2)
    assert moved.sharding == NamedSharding(flat, P("x"))
    np.testing.assert_array_equal(moved, f32(8, 4) * 2)
    assert "all-gather" not in f.lower(x).compile().as_text()


@pytest.mark.parametrize("jit", [pjit, jax.jit])
def test_constraint_sets_the_sharding_inside_a_program(mesh, jit, partitioner):
    out = jit(pinned(P("x", "y"), mesh))(f32(8, 4))
    np.testing.assert_array_equal(out, f32(8, 4) * 2 + 1)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x", "y")), 2)


@pytest.mark.devices(8)
@pytest.mark.parametrize("enter", [lambda mesh: mesh, jax.set_mesh], ids=["with mesh", "set_mesh"])
def test_specs_with_a_mesh_in_force(mesh, enter):
    with enter(mesh):
        out = pjit(pinned(P("y")))(f32(8, 4))
    assert spec_of(out) == ("y",)
    with enter(mesh):
        out = pjit(pinned(None))(f32(8, 4))
    assert out.sharding.is_fully_replicated


@pytest.mark.devices(8)
def test_the_annotation_in_the_module(mesh, partitioner):
    text = pjit(pinned(P("x", U), mesh)).lower(f32(8, 4)).as_text()
    if partitioner == "shardy":
        assert 'sdy.sharding_constraint %1 <@mesh, [{"x"}, {?}]>' in text
    else:
        assert 'backend_config = "unspecified_dims=[1]"' in text
        assert 'mhlo.sharding = "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"' in text


@pytest.mark.devices(8)
def test_device_put_inside_moves_nothing_to_another_mesh(mesh):
    """It places memory kinds only, as in `jax.jit`, which can't name this result."""
    other = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    x = device_put(f32(8, 4), NamedSharding(mesh, P("x")))
    with pytest.warns(IgnoredShardingWarning, match=naming("P('y',)", "with_sharding_constraint")):
        out = pjit(lambda x: jax.device_put(x * 2, NamedSharding(other, P("y"))))(x)
    np.testing.assert_array_equal(out, f32(8, 4) * 2)
    assert out.sharding == x.sharding


@pytest.mark.devices(8)
def test_open_dimensions(mesh, partitioner):
    x = device_put(f32(8, 4), NamedSharding(mesh, P(None, "y")))
    out = pjit(pinned(P("x", U), mesh))(x)
    np.testing.assert_array_equal(out, f32(8, 4) * 2 + 1)
    assert out.sharding.shard_shape((8, 4))[0] == 2


@pytest.mark.devices(8)
def test_uneven_dimensions(mesh, partitioner):
    with pytest.warns(
        UnevenShardingWarning, match=naming("x (float32[7])", "size 7", "to 8, 2 on")
    ):
        out = pjit(lambda x: with_sharding_constraint(x, NamedSharding(mesh, P("x"))).sum())(f32(7))
    np.testing.assert_allclose(out, f32(7).sum())
    with pytest.warns(UnevenShardingWarning) as issued:
        out = pjit(lambda x: with_sharding_constraint(x, NamedSharding(mesh, P("x"))) * 2)(f32(7))
    assert [w.filename for w in issued] == [__file__]
    np.testing.assert_array_equal(out, f32(7) * 2)


@pytest.mark.devices(8)
def test_pytrees_and_prefixes(mesh):
    tree = {"a": f32(8), "b": [f32(4), f32(8, 2)], "c": None}

    def fun(t):
        return with_sharding_constraint(t, {"a": P("x"), "b": P("y"), "c": None})

    with mesh:
        out = pjit(fun)(tree)
    assert spec_of(out["a"]) == ("x",) and [spec_of(x) for x in out["b"]] == [("y",)] * 2
    with mesh, pytest.raises(ResourceError, match=naming("x['b']", "1 entry", "2")):
        pjit(lambda t: with_sharding_constraint(t, {"a": None, "b": [None], "c": None}))(tree)


@pytest.mark.parametrize("unspecified", [UNSPECIFIED, AUTO])
def test_unspecified_shardings_constrain_nothing(unspecified):
    np.testing.assert_array_equal(with_sharding_constraint(f32(4), unspecified), f32(4))


@pytest.mark.slow
@pytest.mark.parametrize("jit", [pjit, jax.jit])
def test_constraint_works_under_transformations(mesh, jit, partitioner):
    f = pinned(P("x"), mesh)
    x = f32(8)
    np.testing.assert_array_equal(jit(jax.grad(lambda x: f(x).sum()))(x), np.full(8, 2))
    np.testing.assert_array_equal(jit(jax.vmap(f))(f32(3, 8)), f32(3, 8) * 2 + 1)
    np.testing.assert_array_equal(jit(jax.vmap(f, 1, 1))(f32(8, 3)), f32(8, 3) * 2 + 1)
    out, tangent = jit(lambda x: jax.jvp(f, (x,), (x,)))(x)
    np.testing.assert_array_equal(tangent, f32(8) * 2)
    out, _ = jit(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=3))(x)
    np.testing.assert_allclose(out, ((x * 2 + 1) * 2 + 1) * 2 + 1)
    remat = jax.grad(lambda x: (jax.checkpoint(f)(x) ** 2).sum())
    np.testing.assert_allclose(jit(remat)(x), 4 * (x * 2 + 1))
    loop = jit(lambda x: jax.lax.while_loop(lambda c: c.sum() < 100, f, x))
    assert loop(x).sum() >= 100
    np.testing.assert_array_equal(jit(lambda x: jax.lax.cond(True, f, lambda x: x, x))(x), f(x))


@pytest.mark.devices(8)
def test_gradient_of_a_constraint_has_its_sharding(mesh, partitioner):
    f = jax.value_and_grad(lambda x: pinned(P("x"), mesh)(x).sum())
    annotation = '[{"x"}]' if partitioner == "shardy" else "devices=[4,2]"
    assert pjit(f).lower(f32(8)).as_text().count(annotation) == 2


@pytest.mark.devices(8)
def test_vmap_leaves_its_axis_open_or_uses_spmd_axis_name(mesh, partitioner):
    named = NamedSharding(mesh, P("x"))

    def f(x):
        return with_sharding_constraint(x, named)

    def lowered(*axes, **keywords):
        return pjit(jax.vmap(f, *axes, **keywords)).lower(f32(8, 8)).as_text()

    if partitioner == "shardy":
        assert '[{?}, {"x"}]' in lowered()
        assert '[{"y"}, {"x"}]' in lowered(spmd_axis_name="y")
        assert '[{"x"}, {?}]' in lowered(1, 1)
    else:
        assert "devices=[1,4,2]" in lowered() and "unspecified_dims=[0]" in lowered()
        assert "devices=[2,4]" in lowered(spmd_axis_name="y")
        assert "devices=[4,1,2]" in lowered(1, 1) and "unspecified_dims=[1]" in lowered(1, 1)
    with pytest.raises(ResourceError, match=naming("'x'", "spmd_axis_name")):
        lowered(spmd_axis_name="x")


def test_tiles_under_vmap(mesh):
    tiles = GSPMDSharding(jax.devices(), "{devices=[8]<=[8]}")
    out = pjit(jax.vmap(lambda x: with_sharding_constraint(x, tiles)))(f32(3, 8))
    np.testing.assert_array_equal(out, f32(3, 8))


class TestInsideShardMap:
    def mapped(self, mesh, spec, **keywords):
        def body(x):
            return with_sharding_constraint(x * 2, NamedSharding(mesh, spec))

        return jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), **keywords)

    @pytest.mark.parametrize("jit", [pjit, jax.jit])
    def test_constraint_over_a_remaining_auto_axis_keeps_values(self, mesh, jit, partitioner):
        f = self.mapped(mesh, P(None, "y"), axis_names={"x"})
        np.testing.assert_array_equal(jit(f)(f32(8, 4)), f32(8, 4) * 2)

    def test_a_spec_is_read_on_the_mesh_of_the_shard_map(self, mesh, partitioner):
        def mapped(constrain):
            def body(x):
                return constrain(x * 2, P(None, "y"))

            split = {"in_specs": P("x"), "out_specs": P("x"), "axis_names": {"x"}}
            return jax.shard_map(body, mesh=mesh, **split)

        ours = pjit(mapped(with_sharding_constraint))(f32(8, 4))
        theirs = jax.jit(mapped(jax.lax.with_sharding_constraint))(f32(8, 4))
        np.testing.assert_array_equal(ours, theirs)
        assert ours.sharding.is_equivalent_to(theirs.sharding, 2)

    def test_replicated_constraint_keeps_values_if_all_axes_are_manual(self, mesh, partitioner):
        f = self.mapped(mesh, P())
        np.testing.assert_array_equal(pjit(f)(f32(8, 4)), f32(8, 4) * 2)

    def test_a_manual_axis_is_refused(self, mesh, partitioner):
        for keywords in ({}, {"axis_names": {"x"}}):
            with pytest.raises(
                ResourceError, match=naming("sharding of x ", "P('x',)", "shard_map")
            ):
                pjit(self.mapped(mesh, P("x"), **keywords))(f32(8, 4))


class TestConcreteArrays:
    def test_concrete_arrays_are_moved_to_the_sharding(self, mesh):
        for x in (f32(8), jnp.asarray(f32(8)), device_put(f32(8), jax.devices()[3])):
            out = with_sharding_constraint(x, NamedSharding(mesh, P("x")))
            assert isinstance(out, Array)
            assert out.sharding == NamedSharding(mesh, P("x"))
            np.testing.assert_array_equal(out, f32(8))

    def test_concrete_array_is_resharded(self, mesh):
        x = device_put(f32(8, 8), NamedSharding(mesh, P("x", "y")))
        with mesh:
            assert spec_of(with_sharding_constraint(x, P("y", "x"))) == ("y", "x")
        out = with_sharding_constraint(x, SingleDeviceSharding(jax.devices()[1]))
        assert out.devices() == {jax.devices()[1]}

    @pytest.mark.parametrize("spec", [P("x", U), P(U), P(U, "y")])
    def test_open_dimensions(self, mesh, spec, partitioner):
        for x in (f32(8, 4), device_put(f32(8, 4), jax.devices()[3])):
            out = with_sharding_constraint(x, NamedSharding(mesh, spec))
            np.testing.assert_array_equal(out, f32(8, 4))
            assert len(out.devices()) == 8

    def test_uneven_dimensions(self, mesh):
        for x in (f32(7), device_put(f32(7), jax.devices()[3])):
            with pytest.warns(UnevenShardingWarning, match=naming("size 7", "P()", "28 B")):
                out = with_sharding_constraint(x, NamedSharding(mesh, P("x")))
            np.testing.assert_array_equal(out, f32(7))

    @pytest.mark.devices(8)
    @pytest.mark.parametrize(
        ("shape", "spec", "kept"),
        [
            ((7,), P("x"), ()),
            ((6, 2), P("x", "y"), (None, "y")),
            ((4, 3), P(("x", "y"), None), ("x",)),
            ((2, 8), P(("x", "y"), U), ()),
            ((3, 0), P("x", "y"), (None, "y")),
        ],
    )
    def test_indivisible_axes_are_dropped_from_the_spec(self, mesh, partitioner, shape, spec, kept):
        """XLA would shard some of these along a part of an axis, which JAX can't express."""
        with pytest.warns(UnevenShardingWarning):
            out = with_sharding_constraint(f32(*shape), NamedSharding(mesh, spec))
        np.testing.assert_array_equal(out, f32(*shape))
        assert spec_of(out) == kept and len(out.devices()) == 8

    @pytest.mark.devices(8)
    def test_uneven_dimensions_warn_under_jvp(self, partitioner):
        wide = make_mesh((6,), ("x",))
        f = pjit(lambda x: with_sharding_constraint(x, NamedSharding(wide, P("x"))), inline=True)
        with pytest.warns(UnevenShardingWarning):
            out, tangent = jax.jvp(f, (f32(4),), (f32(4),))
        np.testing.assert_array_equal(out, f32(4))
        np.testing.assert_array_equal(tangent, f32(4))

    @pytest.mark.slow
    def test_constraint_works_under_eager_transformations(self, mesh):
        f = pinned(P("x"), mesh)
        np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(f32(8)), np.full(8, 2))
        np.testing.assert_array_equal(jax.vmap(f)(f32(4, 8)), f32(4, 8) * 2 + 1)

    @pytest.mark.devices(8)
    def test_keys_and_numbers(self, mesh):
        keys = jax.random.split(jax.random.key(0), 8)
        out = with_sharding_constraint(keys, NamedSharding(mesh, P("x")))
        assert out.sharding.shard_shape((8,)) == (2,)
        assert float(with_sharding_constraint(3.0, NamedSharding(mesh, P()))) == 3.0


def test_a_layout(mesh):
    turned = Format(Layout(major_to_minor=(1, 0)), NamedSharding(mesh, P("x")))
    out = pjit(lambda x: with_sharding_constraint(x * 2, turned))(f32(8, 4))
    np.testing.assert_array_equal(out, f32(8, 4) * 2)
    text = pjit(lambda x: with_sharding_constraint(x * 2, turned) + 1).lower(f32(8, 4)).as_text()
    assert "LayoutConstraint" in text


def test_user_defined_sharding_is_applied_and_checked(mesh):
    class Halves(Sharding):
        devices = tuple(jax.devices()[:2])

        def devices_indices_map(self, shape):
            half = shape[0] // 2
            return {self.devices[0]: (slice(half),), self.devices[1]: (slice(half, shape[0]),)}

    out = pjit(lambda x: with_sharding_constraint(x * 2, Halves()))(f32(8))
    assert [s.data.shape for s in out.addressable_shards] == [(4,), (4,)]
    with pytest.raises(
        ResourceError, match=naming("x (float32[7])", "dimension 0", "size 7", "0..3", "3..7")
    ):
        pjit(lambda x: with_sharding_constraint(x * 2, Halves()))(f32(7))


@pytest.mark.devices(8)
def test_abstract_mesh_uses_the_devices_of_the_mesh_in_force(mesh):
    sharding = NamedSharding(mesh.abstract_mesh, P("x"))
    with mesh:
        assert spec_of(pjit(lambda x: with_sharding_constraint(x, sharding))(f32(8))) == ("x",)
    with pytest.raises(MeshError, match=naming("AbstractMesh", "P('x',)", "host")):
        with_sharding_constraint(f32(8), sharding)
    with (
        make_mesh((8,), ("x",)),
        pytest.raises(
            MeshError, match=naming("of x ", "AbstractMesh", "Mesh('x': 8", "jax.set_mesh(mesh)")
        ),
    ):
        with_sharding_constraint(f32(8), sharding)


@pytest.mark.devices(8)
@pytest.mark.slow
def test_abstract_mesh_uses_the_devices_of_the_program(mesh, partitioner):
    """Without a mesh in force the arguments determine the devices, in any transformation."""
    sharding = NamedSharding(mesh.abstract_mesh, P("x", "y"))
    x = device_put(f32(8, 4), NamedSharding(mesh, P("x")))
    f = pjit(lambda x: with_sharding_constraint(x * 2, sharding))
    wanted = NamedSharding(mesh, P("x", "y"))
    assert f(x).sharding == jax.jit(f)(x).sharding == wanted
    assert with_sharding_constraint(x, sharding).sharding == wanted
    assert pjit(lambda x: x * 2, out_shardings=sharding)(x).sharding == wanted
    inner = pjit(lambda x: x * 2, out_shardings=sharding)
    assert pjit(lambda x: inner(x) * 1)(x).sharding == wanted
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(x), np.full((8, 4), 2))
    np.testing.assert_array_equal(jax.vmap(f)(jnp.stack([x, x]))[1], f32(8, 4) * 2)
    np.testing.assert_array_equal(f(f32(8, 4)), f32(8, 4) * 2)  # on one device


def test_refusals(mesh):
    tree = {"w": f32(8, 4)}
    with pytest.raises(
        MeshError, match=naming("sharding of x['w']", "P('x',)", "jax.set_mesh(mesh)")
    ):
        with_sharding_constraint(tree, P("x"))
    with pytest.raises(MeshError, match=r"x\['w'\] is None \(replicated\).*with jax.set_mesh"):
        with_sharding_constraint(tree, None)
    with mesh:
        with pytest.raises(ResourceError, match=r"x\['w'\] is P\('z',?\).*'z'.*'x'"):
            with_sharding_constraint(tree, P("z"))
        with pytest.raises(ResourceError, match=r"x\['w'\] .*'x'"):
            with_sharding_constraint(tree, P("x", "x"))
        with pytest.raises(ResourceError, match=r"x\['w'\] \(float32\[8,4\]\).*3 dimensions"):
            with_sharding_constraint(tree, P(None, None, "x"))
        with pytest.raises(ResourceError, match=r"shardings\['w'\] is 'x'.*P\('x'\)"):
            with_sharding_constraint(tree, {"w": "x"})
        with pytest.raises(ArgumentError, match=r"x\['w'\] is 'text'"):
            with_sharding_constraint({"w": "text"}, P())
        x = device_put(f32(8))
        x.delete()
        with pytest.raises(DeletedError, match="x .*delete"):
            with_sharding_constraint(x, P("x"))


@pytest.mark.devices(8)
def test_constraint_on_other_devices_is_refused(mesh):
    from xlashard.errors import DeviceMismatchError

    small = NamedSharding(make_mesh((2,), ("x",)), P("x"))
    f = pjit(lambda x: with_sharding_constraint(x, small), in_shardings=NamedSharding(mesh, P()))
    with pytest.raises(
        DeviceMismatchError,
        match=naming("in_shardings of x (float32[8])", "constraint", "2 devices [0, 1]"),
    ):
        f(f32(8))


def test_memory_kinds(mesh):
    host = NamedSharding(mesh, P("x"), memory_kind="pinned_host")
    out = with_sharding_constraint(f32(8), host)
    assert out.sharding.memory_kind == "pinned_host"


@pytest.mark.devices(8)
@pytest.mark.slow
def test_memory_kinds_inside_a_program(mesh, partitioner):
    host = NamedSharding(mesh, P("x"), memory_kind="pinned_host")

    def offloaded(x):
        there = with_sharding_constraint(x * 2, host)
        assert "<host>" in str(jax.typeof(there))
        return jnp.sin(jax.device_put(there, jax.memory.Space.Device))

    end = pjit(lambda x: with_sharding_constraint(x * 2, host))(f32(8))
    assert end.sharding.memory_kind == "pinned_host" and spec_of(end) == ("x",)
    np.testing.assert_array_equal(end, f32(8) * 2)
    for jit in (pjit, jax.jit):
        np.testing.assert_allclose(jit(offloaded)(f32(8)), np.sin(f32(8) * 2), rtol=1e-6)
    gradient = jax.grad(lambda x: pjit(offloaded)(x).sum())(f32(8))
    np.testing.assert_allclose(gradient, 2 * np.cos(f32(8) * 2), rtol=1e-5)


@pytest.mark.devices(8)
def test_mismatch_of_devices_names_the_line_of_the_constraint(mesh):
    turned = make_mesh((8,), ("x",), mesh.devices.ravel()[::-1])
    x = device_put(f32(8, 4), NamedSharding(turned, P("x")))
    sharding = NamedSharding(mesh, P("x"))
    bodies = [
        lambda x: with_sharding_constraint(x, sharding),
        lambda x: jax.lax.with_sharding_constraint(x, sharding),
        lambda x: pjit(lambda x: x * 2, out_shardings=sharding)(x),
        lambda x: jax.lax.cond(True, lambda: with_sharding_constraint(x, sharding), lambda: x),
    ]
    for body in bodies:
        line = body.__code__.co_firstlineno
        for f in (pjit(body), jax.grad(lambda x, body=body: pjit(body)(x).sum())):
            with pytest.raises(
                DeviceMismatchError, match=rf"inside at \S*test_constraint.py:{line} "
            ):
                f(x)


@pytest.mark.devices(8)
def test_replicated_arguments_join_the_device_order_of_the_others():
    forward, backward = (make_mesh((8,), ("x",), jax.devices()[::step]) for step in (1, -1))
    whole, other = (device_put(f32(8), NamedSharding(m, P())) for m in (forward, backward))
    rows = device_put(f32(8), NamedSharding(backward, P("x")))
    f = pjit(lambda a, b: a * 2 + b)
    for a, b, mesh in ((whole, other, forward), (whole, rows, backward), (rows, whole, backward)):
        for _ in range(2):
            out = f(a, b)
            np.testing.assert_array_equal(out, f32(8) * 3)
            assert tuple(out.sharding.mesh.devices) == tuple(mesh.devices)
        np.testing.assert_array_equal(f.lower(a, b).compile()(a, b), f32(8) * 3)
        np.testing.assert_array_equal(jax.grad(lambda a, b: f(a, b).sum())(a, b), 2)
    # Sharded ones would have to move.
    for a in (device_put(f32(8), NamedSharding(forward, P("x"))), whole):
        with pytest.raises(DeviceMismatchError, match=r"\[0, 1, 2, .* \[7, 6, 5"):
            pjit(lambda a, b: a + b, out_shardings=NamedSharding(forward, P("x")))(a, rows)
