"""Internals of `jax.interpreters.pxla` that programs use: shardings in the era's terms."""

import pickle
from collections import OrderedDict

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xlashard
from tests.core.pjit.helpers import f32, make_mesh
from tests.legacy.removed import maps, pxla, sharded_jit, xla
from tests.message_patterns import naming
from xlashard import NamedSharding, legacy
from xlashard._jax.runtime.shardings import HloSharding
from xlashard._jax.runtime.transfer import HandleType
from xlashard.errors import DivisibilityError, RefusedError, TilingError
from xlashard.legacy import installer as installing
from xlashard.legacy.modules import sharding
from xlashard.legacy.shardings.partition_spec import PartitionSpec as P

pytestmark = pytest.mark.partitioner


def test_modules_share_classes_and_thread_resources():
    assert pxla.Mesh is maps.Mesh and pxla.thread_resources is maps.thread_resources
    assert pxla.PartitionSpec is P is sharded_jit.PartitionSpec
    assert pxla.ResourceEnv is maps.ResourceEnv and pxla.EMPTY_ENV is maps.EMPTY_ENV


AXES = st.permutations("xyz").flatmap(
    lambda names: st.lists(st.integers(0, 2), max_size=3).map(
        lambda dims: OrderedDict(zip(names, dims, strict=False))
    )
)


@settings(max_examples=25)
@given(AXES)
def test_mesh_sharding_specs_equal_named_shardings(axes):
    """Equal indices for every device, by the spec and by the `ShardingSpec`."""
    mesh, shape = make_mesh((2, 2, 2), ("x", "y", "z")), (8, 16, 8)
    to_spec = pxla.mesh_sharding_specs(mesh.shape, mesh.axis_names)
    spec = to_spec(jax.core.ShapedArray(shape, np.float32), axes)
    assert isinstance(spec, pxla.ShardingSpec) and spec.mesh_shape == (2, 2, 2)
    pspec = pxla.array_mapping_to_axis_resources(axes)
    indices = NamedSharding(mesh, pspec).devices_indices_map(shape)
    assert pxla.spec_to_indices(shape, spec) == tuple(indices[d] for d in mesh.devices.flat)
    mapping = pxla._get_array_mapping(pspec)
    assert dict(mapping) == dict(axes) and isinstance(mapping, pxla.ArrayMapping)
    tile = pxla.tile_aval_nd(mesh.shape, axes, jax.core.ShapedArray(shape, np.float32))
    assert tile.shape == NamedSharding(mesh, pspec).shard_shape(shape)
    assert pxla.untile_aval_nd(mesh.shape, axes, tile).shape == shape


def test_sharding_spec_exposes_its_fields_and_is_picklable():
    spec = pxla.ShardingSpec(
        sharding=[pxla.Chunked([2, 2]), pxla.NoSharding(), pxla.Unstacked(2)],
        mesh_mapping=[pxla.ShardedAxis(1), pxla.ShardedAxis(0), pxla.ShardedAxis(2)],
    )
    chunked, whole, unstacked = spec.sharding
    assert isinstance(chunked, pxla.Chunked) and tuple(chunked.chunks) == (2, 2)
    assert isinstance(whole, pxla.NoSharding) and whole == pxla.NoSharding()
    assert unstacked.size == 2 and spec.mesh_mapping[0].axis == 1
    assert pxla.Replicated(4).replicas == 4
    assert pickle.loads(pickle.dumps(spec)) == spec and hash(spec) == hash(spec)
    indices = pxla.spec_to_indices((8, 3, 2), spec)
    assert indices[1] == (slice(0, 2), slice(None), 1) and len(set(map(str, indices))) == 8
    assert pxla._hashable_index(indices[1]) == ((0, 2), (None, None), 1)


def test_uneven_dimensions_are_refused_unless_allowed():
    aval, axes = jax.core.ShapedArray((6, 4), np.float32), {"x": 0}
    sizes = OrderedDict(x=4, y=2)
    with pytest.raises(
        DivisibilityError,
        match=naming("dimension 0 of shape (6, 4)", "4 tiles", "'x'=4", "allow_uneven_axes"),
    ):
        pxla.mesh_sharding_specs(sizes, ("x", "y"))(aval, axes)
    uneven = pxla.mesh_sharding_specs(sizes, ("x", "y"), allow_uneven_axes=True)(aval, axes)
    assert uneven.sharding == (pxla.Chunked((4,)), pxla.NoSharding())
    assert uneven.mesh_mapping == (pxla.ShardedAxis(0), pxla.Replicated(2))


@pytest.mark.devices(8)
def test_partitioned_and_pmap_sharding_specs():
    aval = pxla.ShapedArray((8, 4), np.dtype(np.float32))
    cut = pxla.partitioned_sharding_spec(8, (4, 2), aval)
    assert cut.tiling.shard_shape((8, 4)) == (2, 2) and cut.num_devices == 8
    assert pxla.partitioned_sharding_spec(8, None, aval).tiling.is_replicated
    with pytest.raises(
        TilingError, match=naming("partitions=", "product is 8", "2 numbers", "(4,)", "(8, 1)")
    ):
        pxla.partitioned_sharding_spec(8, (4,), aval)
    mapped = pxla.pmap_sharding_spec(8, 8, (3,), 1)
    assert mapped == xlashard.PmapSharding.default((3, 8), 1, unstacked=True).sharding_spec
    assert pxla.pmap_sharding_spec(8, 4, (3,), 0).mesh_shape == (4, 2)
    copies = pxla.pmap_sharding_spec(8, 4, (3,), None)
    assert copies.sharding == (pxla.NoSharding(),) and copies.mesh_shape == (4, 2)
    with pytest.raises(TilingError, match="nrep=8.*size=3"):
        pxla.pmap_sharding_spec(8, 3, (3,), 0)


def test_array_mappings_convert_to_specs_and_back():
    assert pxla.array_mapping_to_axis_resources(OrderedDict()) == P()
    assert pxla.array_mapping_to_axis_resources({"x": 0, "y": 1}) == (("x",), ("y",))
    back = pxla.array_mapping_to_axis_resources(OrderedDict(y=0, x=0, z=3))
    assert type(back) is P and back == (("y", "x"), None, None, ("z",))
    assert pxla._get_array_mapping(None) == {} == pxla._get_array_mapping(P(None))
    assert isinstance(pxla._get_array_mapping(P("x")), pxla.ArrayMappingOrAutoOrUnspecified)
    assert isinstance(pxla._get_array_mapping(pxla.AUTO), pxla.ArrayMappingOrAutoOrUnspecified)
    assert pxla.show_axes(["b", "a"]) == "`a`, `b`"


@pytest.mark.parametrize(
    ("text", "ways", "copies"),
    [
        ("{replicated}", [], 1),
        ("{devices=[4,1,2]<=[8] last_tile_dim_replicate}", [4, 1], 2),
        ("{devices=[2,4]0,4,1,5,2,6,3,7}", [2, 4], 1),
    ],
)
def test_helpers_of_op_shardings_return_ways_and_replicas(text, ways, copies):
    op = HloSharding.from_string(text).to_proto()
    assert pxla.get_num_ways_dim_sharded(op) == (ways, copies)
    assert pxla._get_num_ways_dim_sharded(op) == (ways, copies)
    assert pxla.is_op_sharding_replicated(op) is (not ways)
    same = HloSharding.from_proto(op)
    assert pxla.are_op_shardings_equal(op, same)
    assert not pxla.are_op_shardings_equal(op, HloSharding.from_string("{devices=[8,1]<=[8]}"))
    one = HloSharding.from_string("{maximal device=0}")
    assert pxla.are_op_shardings_equal(one, HloSharding.replicate())


def test_tuple_op_shardings_are_compared_elementwise():
    cut, whole = "devices=[4,2]<=[8]", "replicated"
    texts = {
        name: "{" + ", ".join("{" + part + "}" for part in parts) + "}"
        for name, parts in {
            "a": [cut, whole],
            "b": [cut, cut],
            "c": [cut],
            "w": [whole] * 2,
        }.items()
    }
    ops = {name: HloSharding.from_string(text).to_proto() for name, text in texts.items()}
    one = HloSharding.from_string("{" + cut + "}").to_proto()
    for name, op in ops.items():
        assert pxla.are_op_shardings_equal(op, HloSharding.from_string(texts[name]))
        assert pxla.is_op_sharding_replicated(op) is (name == "w")
        for other in ops.keys() - {name}:
            assert not pxla.are_op_shardings_equal(op, ops[other])
        assert not pxla.are_op_shardings_equal(op, one)
        assert not pxla.are_op_shardings_equal(one, op)


def test_device_put_and_make_sharded_device_array():
    devices = jax.devices()[:4]
    buffers = pxla.device_put(list(f32(4, 1, 3)), devices)
    assert [b.devices() for b in buffers] == [{d} for d in devices]
    copies = pxla.device_put(f32(2), devices, replicate=True)
    assert len(copies) == 4 and all(np.array_equal(copy, f32(2)) for copy in copies)
    spec = pxla.ShardingSpec([pxla.Chunked([4]), pxla.NoSharding()], [pxla.ShardedAxis(0)])
    made = pxla.make_sharded_device_array(jax.core.ShapedArray((4, 3), np.float32), spec, buffers)
    np.testing.assert_array_equal(made, f32(4, 3))


def test_array_makers_return_the_class_of_the_array_mode():
    devices = jax.devices()[:2]
    buffers = pxla.device_put(list(f32(2, 1, 3)), devices)
    aval = jax.core.ShapedArray((2, 3), np.dtype(np.float32))
    spec = pxla.ShardingSpec([pxla.Chunked([2]), pxla.NoSharding()], [pxla.ShardedAxis(0)])
    assert type(pxla.make_sharded_device_array(aval, spec, buffers)) is xlashard.Array
    one = jax.core.ShapedArray((1, 3), np.dtype(np.float32))
    assert type(xla.make_device_array(one, devices[0], buffers[0])) is HandleType
    with legacy.jax_array(False):
        made = pxla.make_sharded_device_array(aval, spec, buffers)
        single = xla.make_device_array(one, devices[0], buffers[0])
    assert type(made) is pxla.ShardedDeviceArray is pxla._ShardedDeviceArray
    assert made.sharding_spec == spec and len(made.device_buffers) == 2
    assert isinstance(made.sharding, sharding.PmapSharding)
    assert type(single) is xla.DeviceArray is xla._DeviceArray and single.device_buffer is not None
    np.testing.assert_array_equal(made, f32(2, 3))
    assert isinstance(single, xla.DeviceArray) and isinstance(made, xla.DeviceArray)
    assert isinstance(made, pxla.ShardedDeviceArray)
    assert not isinstance(single, pxla.ShardedDeviceArray)
    assert isinstance(xla.abstractify(made), xla.ShapedArray)
    assert xla.abstractify(made).shape == (2, 3)
    assert isinstance(devices[0], xla.Device)
    assert xlashard.Array in xla.pytype_aval_mappings


def test_create_mesh_pspec_sharding_equals_named_sharding(mesh):
    assert pxla._create_mesh_pspec_sharding(mesh, P("x")) == NamedSharding(mesh, P("x"))
    assert pxla._create_mesh_pspec_sharding(mesh, None, object()) == NamedSharding(mesh, P())


@pytest.mark.parametrize(
    "use",
    [
        lambda: pxla.shard_arg_handlers.__setitem__(int, len),
        lambda: pxla.global_result_handlers[int],
        lambda: pxla.OutputType.GlobalDeviceArray,
        lambda: sharded_jit.sharded_jit(len, in_parts=None, out_parts=None),
        lambda: xla.translations[jax.lax.sin_p](None),
        lambda: xla.xla_call_p.bind(1),
        lambda: maps.xmap(len, in_axes=["i"], out_axes=["i"]),
        lambda: maps.serial_loop("l", 2),
        lambda: maps.SerialLoop(2),
    ],
)
def test_removed_names_raise_with_a_suggestion(use):
    with pytest.raises(RefusedError, match=r"was removed from JAX: .*\. Write: (jax|with)"):
        use()
    with pytest.raises(NotImplementedError):
        use()


def test_error_of_xmap_suggests_shard_map():
    with pytest.raises(RefusedError, match=r"jax\.shard_map\(f, mesh=mesh, in_specs=P\('x'\)"):
        maps.xmap(len)


def test_internals_are_importable_by_their_legacy_names():
    with installing.installed():
        import jax.interpreters.pxla
        import jax.interpreters.xla
        from jax.experimental.maps import Mesh, thread_resources
        from jax.interpreters.pxla import PartitionSpec
        from jax.sharding import MeshPspecSharding

        assert jax.pxla.Mesh is Mesh is jax.interpreters.pxla.Mesh is jax.sharding.Mesh
        assert jax.experimental.maps.thread_resources.env is not None
        assert jax.interpreters.pxla.thread_resources is thread_resources
        assert jax.experimental.PartitionSpec is PartitionSpec is jax.sharding.PartitionSpec is P
        assert jax.experimental.sharding.MeshPspecSharding is MeshPspecSharding
        assert jax._src.sharding.MeshPspecSharding is jax.sharding.NamedSharding
        assert jax.sharding.OpShardingSharding is xlashard.GSPMDSharding
        assert jax.sharding.PmapSharding.default((8, 2)).devices.shape == (8,)
        assert isinstance(jax.numpy.zeros(3), jax.interpreters.xla.DeviceArray)
        assert jax.xla.DeviceArray is jax.interpreters.xla._DeviceArray
        assert jax.pxla.ShardedDeviceArray is jax.interpreters.pxla._ShardedDeviceArray
        assert jax.interpreters.xla.canonicalize_dtype_handlers is not None
        assert jax._src.sharding_impls.AUTO == jax.experimental.pjit.AUTO
    assert jax.sharding.Mesh is xlashard.Mesh and jax.sharding.PartitionSpec is xlashard.P
    assert not hasattr(jax, "pxla") and not hasattr(jax.sharding, "MeshPspecSharding")


def test_legacy_pickles_are_readable():
    spec = b"cjax.interpreters.pxla\nPartitionSpec\n(Vx\nNtR."
    marker = b"\x80\x02cjax.experimental.pjit\n_FromGdaSingleton\n)\x81."
    with installing.installed():
        assert pickle.loads(spec) == P("x", None) and type(pickle.loads(spec)) is P
        assert pickle.loads(marker) == xlashard.FROM_GDA
    with pytest.raises(AttributeError):
        pickle.loads(spec)


@pytest.mark.slow
def test_jax_works_while_legacy_names_are_installed(mesh):
    with installing.installed():
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        x = jax.device_put(f32(8, 4), sharding)
        assert jax.jit(lambda v: v + 1)(x).sharding.is_equivalent_to(sharding, 2)
        total = jax.shard_map(
            lambda v: jax.lax.psum(v, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
        )(x)
        assert total.shape == (2, 4)
        made = jax.make_mesh((4, 2), ("x", "y"))
        assert isinstance(made, jax.sharding.Mesh)
        grads = jax.grad(lambda v: jax.lax.with_sharding_constraint(v, sharding).sum())(x)
        assert grads.shape == (8, 4)
