"""Computation follows data: devices of calls and of their results."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.lax import with_sharding_constraint as with_sharding_constraint_of_jax
from jax.sharding import AxisType

from tests.core.pjit.helpers import device_ids, f32, make_mesh, spec_of
from tests.grouped_cases import Together
from tests.message_patterns import naming
from xlashard import (
    Array,
    GSPMDSharding,
    NamedSharding,
    P,
    SingleDeviceSharding,
    device_put,
    jit,
    pjit,
    with_sharding_constraint,
)
from xlashard.errors import DeviceMismatchError, MeshError, ResourceError


@pytest.fixture
def add():
    return pjit(lambda x, y: x + y)


def on(device, value=None):
    """Return a value committed to one device, by number."""
    return device_put(f32(4) if value is None else value, jax.devices()[device])


def test_host_values_run_on_the_default_device_uncommitted(add):
    out = add(f32(4), np.float32(1))
    assert isinstance(out, Array)
    assert device_ids(out) == [jax.devices()[0].id]
    assert not out.committed


def test_committed_argument_determines_the_device(add):
    out = add(on(3), f32(4))
    assert device_ids(out) == [3] and out.committed
    assert isinstance(out.sharding, SingleDeviceSharding)


@pytest.mark.slow
def test_uncommitted_arrays_move_to_the_committed_device(add, mesh):
    loose = jnp.asarray(f32(4))
    assert not loose.committed
    assert device_ids(add(loose, on(5))) == [5]
    spread = device_put(f32(4), NamedSharding(mesh, P("x")))
    out = add(spread, loose)
    assert len(out.devices()) == 8
    np.testing.assert_array_equal(out, f32(4) * 2)
    assert device_ids(add(pjit(lambda: jnp.ones(4))(), on(2))) == [2]


def test_jax_and_xlashard_arrays_can_be_mixed(add, mesh):
    sharding = NamedSharding(mesh, P("x"))
    theirs = jax.device_put(f32(4), jax.sharding.NamedSharding(mesh, P("x")))
    out = add(theirs, device_put(f32(4), sharding))
    assert out.sharding == sharding
    assert isinstance(jnp.add(theirs, out), jax.Array)


def test_error_of_different_committed_devices_names_both_arguments(add):
    with pytest.raises(DeviceMismatchError) as caught:
        add(on(1), on(2))
    text = str(caught.value)
    assert "x (float32[4])" in text and "y (float32[4])" in text
    assert "device 1" in text and "device 2" in text and "device_put" in text


def test_device_mismatch_inside_a_tree_is_named_by_path():
    f = pjit(lambda state, batch: state["params"]["w"] + batch)
    with pytest.raises(
        DeviceMismatchError, match=r"state\['params'\]\['w'\].*batch \(float32\[4\]"
    ):
        f({"params": {"w": on(1), "b": f32(2)}}, on(0))


@pytest.mark.devices(8)
def test_argument_committed_off_the_mesh_is_refused(mesh):
    f = pjit(lambda x: x + 1)
    with mesh, pytest.raises(DeviceMismatchError, match=naming("mesh", "8 devices", "argument x")):
        f(on(0))
    sharding = NamedSharding(mesh, P("x"))
    with pytest.raises(ResourceError, match="in_shardings puts x.*device_put"):
        pjit(lambda x: x, in_shardings=sharding)(on(0))
    with pytest.raises(DeviceMismatchError, match="argument x.*out_shardings of result"):
        pjit(lambda x: x, out_shardings=sharding)(on(0))


@pytest.mark.devices(8)
def test_committed_arguments_with_different_device_orders_raise(add):
    forth = make_mesh((8,), ("x",))
    back = make_mesh((8,), ("x",), jax.devices()[::-1])
    x = device_put(f32(8), NamedSharding(forth, P("x")))
    y = device_put(f32(8), NamedSharding(back, P("x")))
    with pytest.raises(
        DeviceMismatchError,
        match=naming("argument x", "argument y", "[7, 6, 5, 4, 3, 2, 1, 0]", "order"),
    ):
        add(x, y)


@pytest.mark.devices(8)
def test_a_mesh_over_fewer_devices(add, mesh):
    x = device_put(f32(8), NamedSharding(mesh, P("x")))
    with (
        make_mesh((4,), ("x",)),
        pytest.raises(DeviceMismatchError, match=naming("mesh", "[0, 1, 2, 3]", "argument x")),
    ):
        add(x, 1.0)


@pytest.mark.devices(8)
def test_in_shardings_that_contradict_a_committed_argument_are_refused(mesh):
    x = device_put(f32(8, 4), NamedSharding(mesh, P("x")))
    f = pjit(lambda x: x, in_shardings=P("y"))
    with mesh, pytest.raises(ResourceError) as caught:
        f(x)
    text = str(caught.value)
    assert "in_shardings puts x (float32[8,4]) as NamedSharding(x=4, y=2; " in text
    assert "device_put(x, " in text and "UNSPECIFIED" in text
    assert caught.value.path == "x"


@pytest.mark.slow
def test_committed_argument_moves_to_a_requested_sharding_of_equal_tiles(mesh):
    """Replicated from one device, or from the same mesh in another order: as in jax.jit."""
    backwards = make_mesh((4, 2), ("x", "y"), jax.devices()[::-1])
    for there, spec in (
        (jax.devices()[3], P()),
        (NamedSharding(backwards, P("x")), P("x")),
        (NamedSharding(make_mesh((2,), ("z",)), P()), P()),
    ):
        place = NamedSharding(mesh, spec)
        # JAX's dispatcher fails at a second call, where the devices are in another order.
        for library, calls in ((jit, 2), (jax.jit, 1)):
            f = library(lambda x: x * 2, in_shardings=place)
            for _ in range(calls):
                out = f(device_put(f32(8, 4), there))
                assert out.sharding.is_equivalent_to(place, 2)
                np.testing.assert_array_equal(out, f32(8, 4) * 2)
    f = jit(lambda x: x * 2, in_shardings=NamedSharding(mesh, P("x")))
    with pytest.raises(ResourceError, match="in_shardings puts x"):
        f(device_put(f32(8, 4), jax.devices()[3]))


def test_an_equivalent_resource(mesh):
    tiles = GSPMDSharding(jax.devices(), "{devices=[4,1,2]<=[8] last_tile_dim_replicate}")
    other_mesh = make_mesh((4, 2), ("a", "b"))
    for sharding in (tiles, NamedSharding(other_mesh, P("a"))):
        x = device_put(f32(8, 4), sharding)
        with mesh:
            np.testing.assert_array_equal(pjit(jnp.sin, in_shardings=P("x"))(x), jnp.sin(f32(8, 4)))


def test_uncommitted_arrays_are_moved_to_in_shardings(mesh):
    f = pjit(lambda x: x * 1, in_shardings=P("x"))
    with mesh:
        assert spec_of(f(jnp.asarray(f32(8)))) == ("x",)


UNUSED = {
    "an unused argument": lambda x, y: x * 2,
    "dead code": lambda x, y: (jnp.sin(y), x * 2)[1],
    "a constant": lambda x, y: jnp.ones(8),
    "a constraint in dead code": lambda x, y: (constrained(y), x * 2)[1],
}


def constrained(y):
    mesh = make_mesh((4, 2), ("x", "y"))
    return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("x")))


@pytest.mark.slow
@pytest.mark.parametrize("function", UNUSED.values(), ids=list(UNUSED))
def test_unused_argument_does_not_determine_the_devices(mesh, function):
    """A committed argument that no result needs, or its in_shardings: as in jax.jit."""
    first, last = jax.devices()[1], jax.devices()[2]
    rows = NamedSharding(mesh, P("x"))
    for x in (f32(8), device_put(f32(8), first), device_put(f32(8), rows)):
        for y, options in (
            (device_put(f32(8), last), {}),
            (device_put(f32(8), rows), {}),
            (f32(8), {"in_shardings": (None, rows)}),
        ):
            out, wanted = jit(function, **options)(x, y), jax.jit(function, **options)(x, y)
            assert out.sharding == wanted.sharding and out.committed == wanted.committed
    with pytest.raises(ResourceError, match="in_shardings puts y"):
        jit(function, in_shardings=(None, rows))(f32(8), device_put(f32(8), last))


def test_kept_unused_argument_determines_the_devices():
    f = jit(UNUSED["an unused argument"], keep_unused=True)
    device = jax.devices()[2]
    assert f(f32(8), device_put(f32(8), device)).devices() == {device}


@pytest.mark.slow
@pytest.mark.parametrize("value", [2, 2.5, True, 1j, np.float32(2), np.int8(3)])
def test_python_numbers_keep_their_types(value):
    f = pjit(lambda x: x)
    out, wanted = f(value), jax.jit(lambda x: x)(value)
    assert (out.dtype, out.weak_type) == (wanted.dtype, wanted.weak_type)
    assert pjit(lambda x, y: x * y)(value, np.ones(2, np.float16)).dtype == (
        jax.jit(lambda x, y: x * y)(value, np.ones(2, np.float16)).dtype
    )


def test_scalars_are_replicated_over_a_mesh(mesh):
    with mesh:
        out = pjit(lambda x, s: x * s, in_shardings=(P("x"), None))(f32(8), 2.0)
        assert spec_of(out) == ("x",)
        assert pjit(lambda: 3.0)().sharding.is_fully_replicated


def test_default_device():
    f = pjit(lambda x: x + 1)
    with jax.default_device(jax.devices()[2]):
        out = f(f32(4))
    assert device_ids(out) == [2] and not out.committed
    assert device_ids(f(f32(4))) == [0]
    assert device_ids(f(out)) == [0]


def test_device_and_backend():
    device = jax.devices()[4]
    out = pjit(lambda x: x + 1, device=device)(f32(4))
    assert device_ids(out) == [4] and out.committed
    assert device_ids(pjit(lambda x: x + 1, backend="cpu")(f32(4))) == [0]


def test_committed_arguments_move_to_a_requested_device(mesh):
    device = jax.devices()[4]
    f = pjit(lambda x: x + 1, device=device)
    spread = device_put(f32(4), NamedSharding(mesh, P("x")))
    for x in (on(1), spread, spread, on(4)):
        np.testing.assert_array_equal(f(x), f32(4) + 1)
        assert f(x).devices() == {device}
    with mesh:
        assert f(spread).devices() == {device}
    inner = pjit(lambda x: with_sharding_constraint(x, spread.sharding), device=device)
    with pytest.raises(DeviceMismatchError, match=naming("device 4", "constraint", "8 devices")):
        inner(f32(4))


@pytest.mark.devices(8)
def test_outputs_are_named_on_the_mesh_of_the_arguments(mesh, partitioner):
    x = device_put(f32(8, 4), NamedSharding(mesh, P("x", "y")))
    out = pjit(lambda x: (x.T, x.sum(1), x @ x.T))(x)
    assert all(type(o.sharding) is NamedSharding and o.sharding.mesh == mesh for o in out)
    assert spec_of(out[0]) == ("y", "x") and spec_of(out[1]) == ("x",)


def test_outputs_without_a_mesh_have_gspmd_shardings(partitioner):
    tiles = GSPMDSharding(jax.devices()[:4], "{devices=[2,2]<=[4]}")
    out = pjit(lambda x: x.T)(device_put(f32(4, 8), tiles))
    assert out.sharding.is_equivalent_to(
        GSPMDSharding(jax.devices()[:4], "{devices=[2,2]<=[2,2]T(1,0)}"), 2
    )
    np.testing.assert_array_equal(out, f32(4, 8).T)


def test_results_feed_the_next_call(mesh):
    f = pjit(lambda x: x * 2, in_shardings=P("x"), out_shardings=P("x"))
    with mesh:
        out = f(f(f(f32(8))))
    np.testing.assert_array_equal(out, f32(8) * 8)


def test_memory_kinds_follow_the_data(mesh):
    host = NamedSharding(mesh, P("x"), memory_kind="pinned_host")
    x = device_put(f32(8), host)
    assert pjit(lambda x: x)(x).sharding.memory_kind in ("pinned_host", "device")
    np.testing.assert_array_equal(
        pjit(lambda x: jax.device_put(x, jax.memory.Space.Device) + 1, in_shardings=host)(x),
        f32(8) + 1,
    )


@pytest.mark.slow
@pytest.mark.parametrize("where", ["one device", "eight devices"])
def test_layouts_follow_the_data(mesh, where):
    place = SingleDeviceSharding(jax.devices()[0])
    if where == "eight devices":
        place = NamedSharding(mesh, P("x"))
    host = f32(8, 4)
    plain = device_put(host, place)
    turned = device_put(host, Format(Layout(major_to_minor=(1, 0)), place))
    f = pjit(lambda x: x * 2)
    compiled = f.lower(plain).compile()
    for x in (turned, turned, plain, plain, turned, plain):
        np.testing.assert_array_equal(f(x), host * 2)
        if x is plain:
            np.testing.assert_array_equal(compiled(x), host * 2)
        else:
            with pytest.raises(ResourceError, match="in the layout"):
                compiled(x)
        np.testing.assert_array_equal(jax.grad(lambda x: (f(x) * x).sum())(x), host * 4)
        np.testing.assert_array_equal(pjit(lambda x: x * 2, in_shardings=place)(x), host * 2)


def test_explicit_meshes(mesh):
    explicit = jax.make_mesh((4, 2), ("x", "y"))
    f = pjit(lambda x: jnp.sin(x) * 2, in_shardings=P("x"), out_shardings=P("x", "y"))
    with jax.set_mesh(explicit):
        out = f(f32(8, 4))
        again = f(f32(8, 4) + 1)
        inside = pjit(lambda x: jnp.sin(x))(out)
    np.testing.assert_allclose(out, np.sin(f32(8, 4)) * 2, rtol=1e-5)
    assert spec_of(out) == spec_of(again) == spec_of(inside) == ("x", "y")


@pytest.mark.parametrize("keyword", ["in_shardings", "out_shardings"])
@pytest.mark.parametrize("compiler", [pjit, jit])
def test_unconstrained_dimensions_at_the_boundary_are_refused(mesh, compiler, keyword):
    spec = P(P.UNCONSTRAINED, "y")
    for sharding in (spec, NamedSharding(mesh, spec), jax.sharding.NamedSharding(mesh, spec)):
        with pytest.raises(ValueError, match=rf"^{keyword}\[0\]\['w'\] is .*UNCONSTRAINED"):
            compiler(lambda x: x, **{keyword: ({"w": sharding},)})
        with pytest.raises(ValueError, match="Unconstrained"):
            jax.jit(lambda x: x, **{keyword: ({"w": jax.sharding.NamedSharding(mesh, spec)},)})


SPECS = [
    P("x", "y"),
    P("x", None),
    P("y"),
    P(("y", "x"), None),
    P(None, "x"),
    P(None, None),
    P(("x",)),
]


def shapes_of(x):
    """Return results of several shapes: equal, transposed, longer, shorter, and independent."""
    return x * 2, x.T, x[None], x.sum(1), x.sum(), x


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("sizes", [(2, 1), (4, 2), (1, 1)])
def test_results_have_the_specs_of_jax_jit(sizes, axis_type, partitioner):
    """Specs are equal axis by axis: axes of size 1 and trailing Nones are kept, also in types."""
    mesh = jax.make_mesh(sizes, ("x", "y"), axis_types=(axis_type,) * 2)
    f, theirs = jit(shapes_of), jax.jit(shapes_of)
    for spec in SPECS:
        x = device_put(f32(8, 8), NamedSharding(mesh, spec))
        for out, wanted in zip(f(x), theirs(x), strict=True):
            assert out.sharding == wanted.sharding, (spec, out.shape)
            assert jax.typeof(out) == jax.typeof(wanted)
            assert jax.typeof(out).sharding == jax.typeof(wanted).sharding


@pytest.mark.slow
def test_result_specs_are_written_like_the_first_argument(mesh, partitioner):
    """Also if the argument came from the host, and for results of another rank."""
    one, two = f32(8, 8), f32(8)
    spelled = NamedSharding(mesh, P("x", None))

    def f(*args):
        return (sum(args), args[0] * 2, args[-1] * 2)

    for args in (
        (one, device_put(one, spelled)),
        (two, device_put(one, spelled)),
        (np.float32(2), device_put(one, spelled)),
        (device_put(one, NamedSharding(mesh, P("x"))), device_put(one, spelled)),
        (device_put(one, spelled), device_put(one, NamedSharding(mesh, P(None, "y")))),
    ):
        for out, wanted in zip(jit(f)(*args), jax.jit(f)(*args), strict=True):
            assert out.sharding == wanted.sharding


def test_results_passed_to_jax_jit_cause_no_retrace(mesh):
    seen = []
    f = jax.jit(lambda x: seen.append(jax.typeof(x)) or x * 2)
    x = device_put(f32(8, 4), NamedSharding(mesh, P("x", None)))
    f(x)
    f(pjit(lambda x: x + 1)(x))
    assert len(seen) == f._cache_size() == 1


@pytest.mark.slow
def test_results_on_several_meshes_keep_their_mesh_types(mesh):
    explicit = jax.make_mesh((4, 2), ("x", "y"))
    a = device_put(f32(8, 4), NamedSharding(mesh, P("x", None)))
    b = device_put(f32(8, 4), NamedSharding(explicit, P("x", "y")))

    def f(a, b):
        return (a * 2, b * 2, a.T, b.T)

    for args in ((a, b), (b, a)):
        for out, wanted in zip(jit(f)(*args), jax.jit(f)(*args), strict=True):
            assert out.sharding == wanted.sharding and jax.typeof(out) == jax.typeof(wanted)
            assert out.sharding.mesh.axis_types == wanted.sharding.mesh.axis_types


def test_types_inside_a_function_have_the_mesh_of_the_argument(mesh):
    seen = []

    def f(x):
        seen.append(jax.typeof(x).sharding.mesh)
        return x * 2

    x = device_put(f32(8, 4), NamedSharding(mesh, P("x")))
    for M in (jit, jax.jit, pjit):
        M(lambda x: f(x))(x)
    assert seen == [mesh.abstract_mesh] * 3


@pytest.mark.slow
def test_types_of_constrained_values_name_the_mesh(mesh):
    sharding, seen = NamedSharding(mesh, P("x", "y")), []
    for M, constrain in (
        (jit, with_sharding_constraint),
        (jax.jit, with_sharding_constraint_of_jax),
    ):

        def f(x, constrain=constrain):
            x = constrain(x, sharding)
            seen.append(jax.typeof(x).sharding)
            return jax.lax.scan(lambda c, _: (constrain(c, sharding), None), x, length=2)[0]

        seen.append(M(f)(f32(8, 4)).sharding)
        seen.append(M(jax.grad(lambda x, f=f: f(x).sum()))(f32(8, 4)).sharding)
        seen.append(M(jax.vmap(f))(f32(2, 8, 4)).sharding)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


@pytest.mark.parametrize("types", ["Auto Auto", "Explicit Explicit", "Explicit Auto"])
@pytest.mark.devices(8)
def test_out_info_shardings_equal_jax(types):
    kinds = tuple(AxisType[name] for name in types.split())
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=kinds)
    x = device_put(f32(8, 4), NamedSharding(mesh, P("x")))
    for requested in (None, NamedSharding(mesh, P("x", "y"))):
        f, theirs = (M(lambda x: x * 2, out_shardings=requested).trace(x) for M in (jit, jax.jit))
        assert f.out_info.sharding == theirs.out_info.sharding
        assert f.lower().out_info.sharding == theirs.lower().out_info.sharding


@pytest.mark.slow
def test_programs_under_an_abstract_mesh_have_its_devices():
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    shape, value = jax.ShapeDtypeStruct((8, 2), np.float32), f32(8, 2)
    double = pjit(lambda x: x * 2)
    bare = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # names the platform
        lowered = double.lower(shape)
        assert "num_partitions = 2" in lowered.as_text()
        pinned = pjit(lambda x: x, in_shardings=P("x")).lower(value)
        text = pinned.as_text()
        assert "num_partitions = 2" in text and ('{"x"}' in text or "devices=[2,1]" in text)
    with jax.sharding.use_abstract_mesh(bare):
        for refused in (double.lower, double):
            with pytest.raises(MeshError, match=naming("the type of result", "'x': 2")):
                refused(shape if refused is double.lower else value)
        lowered = double.trace(shape).lower(lowering_platforms=("cpu",))
    compiled = lowered.compile(device_assignment=jax.devices()[:2])
    out = compiled(value)
    assert out.sharding == NamedSharding(mesh, P(None, None))
    np.testing.assert_array_equal(out, value * 2)


@pytest.mark.devices(8)
def test_specs_are_read_by_an_abstract_mesh_over_the_same_devices(mesh):
    other = mesh.abstract_mesh.update(axis_sizes=(2, 4), axis_names=("a", "b"))

    def function(jit, constrain):
        def inner(x):
            with jax.sharding.use_abstract_mesh(other):
                x = jit(lambda y: y + 1, out_shardings=jax.NamedSharding(other, P("a")))(x)
                return constrain(jnp.sin(x), P(("a", "b"), None)) * 2

        return jit(inner)

    with jax.set_mesh(mesh):
        x = device_put(f32(8, 4), P("x", "y"))
        out = function(jit, with_sharding_constraint)(x)
        wanted = function(jax.jit, with_sharding_constraint_of_jax)(x)
    assert out.sharding == wanted.sharding
    np.testing.assert_allclose(out, wanted, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("types", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_types_contain_the_requested_shardings(types):
    with jax.set_mesh(jax.make_mesh((2,), ("x",), axis_types=(types,))):
        for value in (f32(8), device_put(f32(8), P("x"))):
            for ins, outs in ((None, P("x")), (P("x"), None), (P("x"), P())):
                found = []
                for M in (jit, jax.jit):
                    options = {"in_shardings": ins} if ins is not None else {}
                    options |= {"out_shardings": outs} if outs is not None else {}
                    f = M(lambda x: x * 2, **options)
                    out, lowered = f(value), f.lower(value)
                    stages = lowered, lowered.compile()
                    found.append([out.aval, jax.typeof(out), *[s.in_avals for s in stages]])
                    assert out.aval.sharding == jax.typeof(out).sharding
                assert found[0] == found[1]


@pytest.mark.skipif(
    not hasattr(jax, "remove_size_one_mesh_axis_from_type"), reason="JAX lacks the setting"
)
@pytest.mark.devices(8)
def test_axes_of_size_one_may_be_missing_in_types():
    mesh = jax.make_mesh((2, 1), ("x", "y"))
    with jax.set_mesh(mesh), jax.remove_size_one_mesh_axis_from_type(True):
        x = device_put(f32(8, 2), P("x", "y"))
        out = jit(lambda x: with_sharding_constraint(x * 2, P("x", "y")))(x)
        wanted = jax.jit(lambda x: with_sharding_constraint_of_jax(x * 2, P("x", "y")))(x)
    assert out.sharding == wanted.sharding


def test_known_layouts_are_in_the_shapes_of_results(mesh):
    sharding = NamedSharding(mesh, P("x", "y"))
    for layout in (Layout((1, 0)), Layout((0, 1)), Layout.AUTO):
        found = [
            jax.eval_shape(M(lambda x: x * x, out_shardings=Format(layout, sharding)), f32(8, 4))
            for M in (jit, jax.jit)
        ]
        assert found[0].format == found[1].format


@pytest.mark.devices(8)
def test_default_layout_that_is_written_out_takes_donated_buffers(mesh):
    x = device_put(f32(8, 4), NamedSharding(mesh, P("x")))
    target = Format(x.format.layout, x.sharding)
    lowered = jit(lambda x: x * 2, out_shardings=target, donate_argnums=0).lower(x)
    assert "tf.aliasing_output" in lowered.as_text()
    assert lowered.compile().memory_analysis().alias_size_in_bytes == 32


HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
MOVES = {
    "to host": lambda x: jax.device_put(x, HOST),
    "to device": lambda x: jax.device_put(x, DEVICE),
    "and back": lambda x: jax.device_put(jax.device_put(x, HOST), DEVICE),
    "one of two": lambda x: (x, jax.device_put(x, HOST)),
    "of a constant": lambda x: (x, jax.device_put(np.ones(3), HOST)),
    "without use": lambda x: (jax.device_put(x, HOST), x)[1],
    "without space": jax.device_put,
    "in a scan": lambda x: jax.lax.scan(lambda c, _: (MOVES["and back"](c), None), x, None, 2)[0],
    "in a call": lambda x: jax.jit(MOVES["to host"])(x),
}


@pytest.mark.slow
def test_results_of_programs_that_name_memory_spaces_are_committed_as_by_jax():
    values = {
        "host array": f32(8),
        "number": 1.5,
        "uncommitted": jnp.ones(8),
        "committed": jax.device_put(f32(8), jax.devices()[1]),
        "key": jax.random.key(0),
    }

    def places(jit, fun, x, options):
        results = jax.tree.leaves(jit(fun, **options)(x))
        flags = [out.committed if hasattr(out, "committed") else out._committed for out in results]
        return flags, [(out.devices(), out.sharding.memory_kind) for out in results]

    with Together() as all_of:
        for (move, fun), (name, x) in itertools.product(MOVES.items(), values.items()):
            for options in ({}, {"keep_unused": True}):
                with all_of.case(f"{move}, {name}, {options}"):
                    assert places(pjit, fun, x, options) == places(jax.jit, fun, x, options)
        with all_of.case("a nested call does not name the devices of a program"):
            inner = pjit(MOVES["to host"])
            out = pjit(lambda x: inner(np.ones(8, np.float32)) + jax.device_put(x, HOST))
            assert out(values["committed"]).devices() == {jax.devices()[1]}
