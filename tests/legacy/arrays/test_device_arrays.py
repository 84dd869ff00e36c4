"""`DeviceArray` and `ShardedDeviceArray`, and current arrays as their instances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
from tests.core.pjit.helpers import f32
from tests.message_patterns import naming
from xlashard import (
    Array,
    Chunked,
    GSPMDSharding,
    NamedSharding,
    NoSharding,
    Replicated,
    ShardedAxis,
    Unstacked,
    device_put,
    legacy,
    make_sharded_device_array,
)
from xlashard.core.array.array_class.handles import wrap_output
from xlashard.errors import DeletedError, TilingError
from xlashard.legacy import DeviceArray, GlobalDeviceArray, ShardedDeviceArray
from xlashard.legacy.arrays.device_arrays import device_array_class
from xlashard.legacy.shardings.partition_spec import PartitionSpec as P
from xlashard.legacy.shardings.pmap import DeviceRow, PmapSharding

pytestmark = pytest.mark.partitioner

WHOLE = f32(8, 2)


def sharded(mesh, *entries):
    return device_put(WHOLE, NamedSharding(mesh, P(*entries)))


def of_kind(kind, array):
    return kind.from_jax(array.to_jax())


def test_isinstance_depends_on_the_devices(mesh):
    """As in the migration guide: by addressability and the number of devices."""
    one, many = device_put(WHOLE, jax.devices()[1]), sharded(mesh, "x")
    for x in (
        one,
        one.to_jax(),
        jnp.ones(3),
        of_kind(DeviceArray, one),
        one + 1,
        many.addressable_data(3),
    ):
        assert isinstance(x, DeviceArray) and not isinstance(x, ShardedDeviceArray)
    for x in (many, many.to_jax(), of_kind(ShardedDeviceArray, many), many + 1):
        # It was one of the era's subclasses: programs check for DeviceArray to mean any array.
        assert isinstance(x, ShardedDeviceArray) and isinstance(x, DeviceArray)
    # In general an array on a single device is indistinguishable from any other.
    assert isinstance(of_kind(ShardedDeviceArray, one), DeviceArray)
    seen = []
    jax.jit(lambda x: seen.append(x) or x)(1.0)
    for other in (3, WHOLE, None, *seen, GlobalDeviceArray.from_array(many)):
        assert not isinstance(other, DeviceArray) and not isinstance(other, ShardedDeviceArray)
    many.delete()
    assert isinstance(many, ShardedDeviceArray)


def test_sharding_spec_has_an_entry_for_each_mesh_axis(mesh):
    with legacy.installed():
        x = jax.device_put(WHOLE, jax.sharding.NamedSharding(mesh, xlashard.P()))
        assert x.sharding_spec.mesh_mapping == (Replicated(4), Replicated(2))
    for x, expected in (
        (sharded(mesh), (Replicated(4), Replicated(2))),
        (sharded(mesh, "y"), (Replicated(4), ShardedAxis(0))),
        (sharded(mesh, ("y", "x")), (ShardedAxis(1), ShardedAxis(0))),
    ):
        spec = of_kind(ShardedDeviceArray, x).sharding_spec
        assert spec.mesh_mapping == expected
        assert tuple(spec.indices(x.shape).flat) == tuple(
            x.sharding.devices_indices_map(x.shape).values()
        )


def test_class_of_a_device_array_follows_its_sharding(mesh):
    handles = [device_put(WHOLE, jax.devices()[1]).to_jax(), sharded(mesh, "x").to_jax()]
    kinds = tuple(map(device_array_class, handles))
    assert kinds == (DeviceArray, ShardedDeviceArray)
    one, many = (wrap_output(device_array_class, (handle,)) for handle in handles)
    assert type(one) is DeviceArray and type(many) is ShardedDeviceArray
    assert repr(one).startswith("DeviceArray([[0.") and "ShardedDeviceArray([[" in repr(many)


@pytest.mark.slow
def test_jax_functions_accept_device_arrays(mesh):
    for x in (of_kind(DeviceArray, device_put(WHOLE)), of_kind(ShardedDeviceArray, sharded(mesh))):
        np.testing.assert_array_equal(jax.jit(lambda v: v * 2)(x), WHOLE * 2)
        np.testing.assert_array_equal(jax.jit(lambda v, x=x: v + x)(WHOLE), WHOLE * 2)
        np.testing.assert_array_equal(jnp.flip(x), WHOLE[::-1, ::-1])
        np.testing.assert_array_equal(xlashard.pjit(lambda v: v + 1)(x), WHOLE + 1)
        assert type(x + 1) is type(x) and bool((x == WHOLE).all())
    stacked = jax.pmap(lambda row: row * 2)(of_kind(DeviceArray, device_put(WHOLE)))
    np.testing.assert_array_equal(stacked, WHOLE * 2)


def test_attributes_of_a_single_device_array(mesh):
    device = jax.devices()[1]
    x = of_kind(DeviceArray, device_put(WHOLE, device))
    assert type(x.device_buffer) is DeviceArray and x.device == x.device_buffer.device == device
    assert x.device_buffer.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    assert len(x.device_buffers) == 1
    assert x.sharding_spec.sharding == (NoSharding(), NoSharding())
    assert x.indices == ((slice(None), slice(None)),) and x.one_replica_buffer_indices == [0]
    assert type(x.to_py()) is np.ndarray and x.to_py().tolist() == WHOLE.tolist()
    x.delete()
    for use in (lambda: x.device_buffer, lambda: x.device_buffers, x.to_py):
        with pytest.raises(DeletedError, match="deleted"):
            use()


def test_attributes_of_a_sharded_device_array(mesh):
    x = of_kind(ShardedDeviceArray, sharded(mesh, "y"))
    assert x.sharding_spec.sharding == (Chunked((2,)), NoSharding())
    assert x.sharding_spec.mesh_mapping == (Replicated(4), ShardedAxis(0))
    assert [b.device for b in x.device_buffers] == list(mesh.devices.flat)
    for buffer, index in zip(x.device_buffers, x.indices, strict=True):
        assert type(buffer) is DeviceArray
        np.testing.assert_array_equal(buffer, WHOLE[index])
    assert x.one_replica_buffer_indices == [0, 1]
    whole = np.concatenate([x.device_buffers[n].to_py() for n in x.one_replica_buffer_indices])
    np.testing.assert_array_equal(whole, WHOLE)
    with pytest.raises(
        AttributeError,
        match=naming("device_buffer ", "float32[8,2]", "8 devices", "x.device_buffers"),
    ):
        x.device_buffer  # noqa: B018
    assert not hasattr(x, "device_buffer")
    tiles = GSPMDSharding(tuple(mesh.devices.flat), "{devices=[8,1]0,2,1,3,4,5,6,7}")
    odd = of_kind(ShardedDeviceArray, device_put(WHOLE, tiles))
    with pytest.raises(TilingError, match=naming("8 devices", "(8, 1)")):
        odd.sharding_spec  # noqa: B018
    assert len(odd.device_buffers) == 8


def test_buffers_of_pmap_lack_the_unstacked_dimension():
    rows = [jax.device_put(row, d) for row, d in zip(WHOLE, jax.devices(), strict=True)]
    spec = PmapSharding.default((8, 2), unstacked=True).sharding_spec
    x = make_sharded_device_array(jax.ShapeDtypeStruct((8, 2), np.float32), spec, rows)
    made = ShardedDeviceArray.from_jax(x.to_jax())
    assert made.device_buffers[3].shape == (1, 2)  # the handle alone does not determine unstacked
    with legacy.installed():
        assert x.sharding_spec.sharding == (Unstacked(8), NoSharding())
        for number, buffer in enumerate(x.device_buffers):
            assert buffer.shape == (2,) and buffer.devices() == {jax.devices()[number]}
            np.testing.assert_array_equal(buffer, WHOLE[number])
        assert x.indices[3] == (3, slice(None))


def test_current_arrays_have_legacy_attributes_while_installed(mesh):
    ours, todays = sharded(mesh, "x"), sharded(mesh, "x").to_jax()
    one = jnp.arange(3)
    with legacy.installed():
        for x in (ours, todays):
            assert len(x.device_buffers) == 8
            assert x.device_buffers[0].device() == mesh.devices[0, 0]
            assert x.sharding_spec.sharding == (Chunked((4,)), NoSharding())
            assert x.indices[2] == (slice(2, 4), slice(None))
            assert x.one_replica_buffer_indices == [0, 2, 4, 6]
            assert x.to_py().tolist() == WHOLE.tolist()
            with pytest.raises(AttributeError, match="8 devices"):
                x.device_buffer  # noqa: B018
        assert one.device() == one.device == one.device_buffer.device() == jax.devices()[0]
        gda = GlobalDeviceArray.from_array(ours)
        assert gda.local_data(2).device() == mesh.devices[1, 0]
        from jax.numpy import DeviceArray as of_numpy

        assert of_numpy is DeviceArray
    for x in (ours, todays):
        with pytest.raises(AttributeError, match="deprecated"):
            x.device_buffers  # noqa: B018
        assert not hasattr(x, "sharding_spec") and not hasattr(x, "to_py")
    with pytest.raises(TypeError, match="not callable"):
        one.device()


@pytest.mark.devices(8)
def test_devices_of_a_pmap_sharding_are_a_tuple_with_array_methods():
    sharding = PmapSharding.default((8, 2))
    row = sharding.devices
    assert isinstance(row, tuple) and row == tuple(jax.devices())
    assert row.shape == (8,) and row.size == 8 and row.ndim == 1
    assert list(row.flat) == jax.devices() and row.reshape(4, 2)[1, 0] == jax.devices()[2]
    assert np.asarray(row).tolist() == jax.devices()
    with pytest.raises(AttributeError, match="no_such"):
        row.no_such  # noqa: B018
    x = device_put(WHOLE, sharding)
    assert type(x) is Array and x.sharding == sharding
    assert isinstance(sharding, xlashard.PmapSharding)
    np.testing.assert_array_equal(jax.pmap(lambda v: v + 1)(x), WHOLE + 1)
    np.testing.assert_array_equal(jax.jit(lambda v: v + 1)(x), WHOLE + 1)
    assert DeviceRow(jax.devices()[:2]).shape == (2,)
