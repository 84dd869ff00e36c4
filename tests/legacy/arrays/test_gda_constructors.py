"""Constructors of `GlobalDeviceArray`, and the checks of their arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.pjit.helpers import f32
from tests.message_patterns import naming
from xlashard import (
    Array,
    Mesh,
    NamedSharding,
    SingleDeviceSharding,
    device_put,
    make_array_from_callback,
    make_array_from_single_device_arrays,
)
from xlashard.errors import (
    ArgumentError,
    DeletedError,
    DivisibilityError,
    PlacementError,
    UnknownAxisError,
)
from xlashard.legacy import DeviceArray, GlobalDeviceArray
from xlashard.legacy.arrays.shards import get_shard_indices, get_shard_indices_replica_ids
from xlashard.legacy.modules.arrays import _GdaFastPathArgs
from xlashard.legacy.shardings.partition_spec import PartitionSpec as P

WHOLE = f32(8, 2)
SPECS = [
    P("x"),
    P("y"),
    P("x", "y"),
    P("y", "x"),
    P(("x", "y")),
    P(None, "y"),
    P(),
    P("x", None),
    ("x",),
    None,
]


@pytest.fixture(params=["forward", "turned"])
def order(request, mesh):
    """Meshes in the order of `jax.devices()`, and in a permuted order."""
    return mesh if request.param == "forward" else Mesh(mesh.devices[::-1, ::-1], ("x", "y"))


def shape_for(spec):
    return (8, 4) if spec == P("y", "x") else (8, 2)


class Calls:
    """Callback that records its arguments."""

    def __init__(self, whole):
        self.whole = whole
        self.asked = []

    def __call__(self, index):
        self.asked.append(index)
        return self.whole[index]

    def batched(self, indices):
        self.asked.append(indices)
        return [self.whole[index] for index in indices]

    def on_devices(self, asked):
        self.asked.append(asked)
        return [jax.device_put(self.whole[i], d) for i, devices in asked for d in devices]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_constructor_equals_make_array_from_callback(spec, order):
    whole = f32(*shape_for(spec))
    sharding = NamedSharding(order, P(*(spec or ())).today)
    reference = make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
    indices = get_shard_indices(whole.shape, order, spec)
    buffers = [device_put(whole[indices[d]], d) for d in order.local_devices]
    target = {"global_shape": whole.shape, "global_mesh": order, "mesh_axes": spec}
    for made in (
        GlobalDeviceArray(whole.shape, order, spec, buffers),
        GlobalDeviceArray.from_callback(**target, data_callback=Calls(whole)),
        GlobalDeviceArray.from_batched_callback(**target, data_callback=Calls(whole).batched),
        GlobalDeviceArray.from_batched_callback_with_devices(
            **target, data_callback=Calls(whole).on_devices
        ),
    ):
        assert type(made) is GlobalDeviceArray
        np.testing.assert_array_equal(made, whole)
        assert made.sharding == reference.sharding and made.sharding.mesh == order
        assert made.mesh_axes == tuple(spec or ())
        for mine, expected in zip(made.local_shards, reference.addressable_shards, strict=True):
            assert (mine.device, mine.index) == (expected.device, expected.index)
            assert mine.replica_id == expected.replica_id
            np.testing.assert_array_equal(mine.data, expected.data)


def test_a_callback_is_called_for_each_device_in_the_order_of_the_mesh(order):
    """Also for replicas: callbacks of the era relied on it."""
    calls = Calls(WHOLE)
    GlobalDeviceArray.from_callback((8, 2), order, P("y"), calls)
    indices = get_shard_indices((8, 2), order, P("y"))
    assert calls.asked == [indices[device] for device in order.local_devices]
    assert calls.asked[:3] == [
        (slice(0, 4), slice(None)),
        (slice(4, 8), slice(None)),
        (slice(0, 4), slice(None)),
    ]


@pytest.mark.slow
def test_stateful_callback_is_called_once_per_device(mesh):
    numbers = iter(range(8))
    made = GlobalDeviceArray.from_callback(
        (2,), mesh, P(), lambda index: np.full(2, next(numbers), np.int32)
    )
    assert [int(shard.data[0]) for shard in made.local_shards] == list(range(8))


def test_callback_may_reuse_its_buffer(mesh):
    buffer = np.empty((2, 2), np.float32)

    def fill(index):
        buffer[:] = WHOLE[index]
        return buffer

    np.testing.assert_array_equal(
        GlobalDeviceArray.from_callback((8, 2), mesh, P("x"), fill), WHOLE
    )


def test_a_batched_callback_is_called_once(order):
    calls = Calls(WHOLE)
    GlobalDeviceArray.from_batched_callback((8, 2), order, P("x"), calls.batched)
    indices = get_shard_indices((8, 2), order, P("x"))
    assert calls.asked == [[indices[device] for device in order.local_devices]]
    assert isinstance(calls.asked[0], list)


def test_pieces_of_a_batched_callback_are_not_committed(order):
    made = GlobalDeviceArray.from_batched_callback(
        (8, 2), order, P("x"), lambda indices: [WHOLE[index] for index in indices]
    )
    assert made.committed and not any(s.data.committed for s in made.local_shards)
    one = made.local_data(3)
    assert one.device == order.devices.flat[3]
    np.testing.assert_array_equal(one, WHOLE[made.local_shards[3].index])
    # Computations may take pieces of several devices together.
    assert (made.local_data(0) + one).shape == one.shape
    single = GlobalDeviceArray.from_callback((8, 2), order, P("x"), WHOLE.__getitem__)
    assert all(s.data.committed for s in single.local_shards)


def test_batched_callback_with_devices_receives_each_index_once(order):
    calls = Calls(WHOLE)
    made = GlobalDeviceArray.from_batched_callback_with_devices(
        (8, 2), order, P("y"), calls.on_devices
    )
    ((first, second),) = calls.asked
    devices = order.devices
    assert first == ((slice(0, 4), slice(None)), tuple(devices[:, 0]))
    assert second == ((slice(4, 8), slice(None)), tuple(devices[:, 1]))
    np.testing.assert_array_equal(made, WHOLE)


def test_callback_may_return_any_array_type(mesh):
    kinds = [
        lambda i: WHOLE[i],
        lambda i: jnp.asarray(WHOLE[i]),
        lambda i: device_put(WHOLE[i], jax.devices()[5]),
        lambda i: WHOLE[i].tolist(),
        lambda i: GlobalDeviceArray.from_array(device_put(WHOLE[i], jax.devices()[0])),
    ]
    for kind in kinds:
        np.testing.assert_array_equal(
            GlobalDeviceArray.from_callback((8, 2), mesh, P("x"), kind), WHOLE
        )
    scalar = GlobalDeviceArray.from_callback((), mesh, P(), lambda index: 3.5)
    assert float(scalar) == 3.5 and scalar.local_shards[0].index == ()
    empty = GlobalDeviceArray.from_callback((0, 4), mesh, P("x"), lambda index: np.zeros((0, 4)))
    assert empty.shape == (0, 4) and len(empty.local_shards) == 8


def test_constructor_accepts_buffers_of_any_array_type(mesh):
    indices = get_shard_indices((8, 2), mesh, P("x"))
    pieces = [(WHOLE[indices[d]], d) for d in mesh.local_devices]
    for put in (
        jax.device_put,
        device_put,
        lambda v, d: DeviceArray.from_jax(jax.device_put(v, d)),
    ):
        buffers = [put(piece, device) for piece, device in pieces]
        made = GlobalDeviceArray((8, 2), mesh, P("x"), buffers)
        np.testing.assert_array_equal(made, WHOLE)
        pointers = [buffer.unsafe_buffer_pointer() for buffer in buffers]
        assert [s.data.unsafe_buffer_pointer() for s in made.local_shards] == pointers
    spared = _GdaFastPathArgs(get_shard_indices_replica_ids((8, 2), mesh, P("x")), [])
    again = GlobalDeviceArray((8, 2), mesh, P("x"), made.to_array(), spared, _enable_checks=False)
    np.testing.assert_array_equal(again, WHOLE)
    shards = [shard.data for shard in made.local_shards]
    np.testing.assert_array_equal(GlobalDeviceArray((8, 2), mesh, P("x"), shards), WHOLE)


def test_buffers_are_checked(mesh):
    devices = mesh.local_devices
    good = [device_put(WHOLE[:2], d) for d in devices]

    def make(buffers, shape=(8, 2), axis="x"):
        return GlobalDeviceArray(shape, mesh, P(axis), buffers)

    turned = [good[1], good[0], *good[2:]]
    with pytest.raises(
        ValueError, match=naming("device_buffers[0]", "cpu:1", "local_devices[0]", "cpu:0")
    ):
        make(turned)
    with pytest.raises(
        PlacementError, match=naming("order", "jax.local_devices()", "global_mesh.local_devices]")
    ):
        GlobalDeviceArray((8, 2), mesh, P("x"), turned, _enable_checks=False)
    with pytest.raises(PlacementError, match=naming("7 arrays", "8 addressable devices", "cpu:7")):
        make(good[:7])
    with pytest.raises(
        PlacementError, match=naming("device_buffers[0]", "device_buffers[8]", "cpu:0")
    ):
        make([*good, good[0]])
    with pytest.raises(PlacementError, match=r"device_buffers\[0\] .* shape \(2, 2\).*\(8, 2\)"):
        make(good, axis=None)
    odd = [device_put(WHOLE[:2].astype(np.int32), devices[0]), *good[1:]]
    for kind in (PlacementError, AssertionError):
        with pytest.raises(kind, match=r"device_buffers\[1\].*float32.*int32.*astype"):
            make(odd)
        with pytest.raises(kind, match=r"device_buffers\[0\] .* shape \(2, 2\).*\(8, 2\)"):
            make(good, shape=(32, 2))
    with pytest.raises(
        ArgumentError, match=naming("device_buffers[0]", "ndarray", "device_put(value, device)")
    ):
        make([WHOLE[:2]] * 8)
    with pytest.raises(ArgumentError, match=naming("device_buffers[3]", "8 devices")):
        make([*good[:3], make(good), *good[4:]])
    with pytest.raises(ArgumentError, match=naming("device_buffers ", "ndarray", "[array]")):
        make(WHOLE)
    with pytest.raises(
        ArgumentError, match=naming("device_buffers[0]", "traced", "GlobalDeviceArray")
    ):
        jax.jit(lambda x: make([x, *good[1:]]))(WHOLE[:2])
    with pytest.raises(DivisibilityError, match="6"):
        make(good, shape=(6, 2))
    with pytest.raises(UnknownAxisError, match="'data'"):
        make(good, axis="data")
    with pytest.raises(TypeError, match="device_buffers"):
        GlobalDeviceArray((8, 2), mesh, P("x"))
    good[4].delete()
    with pytest.raises(DeletedError, match=r"device_buffers\[4\]"):
        make(good)


@pytest.mark.slow
def test_callbacks_are_checked(mesh):
    def make(data_callback, maker="from_callback"):
        return getattr(GlobalDeviceArray, maker)((8, 2), mesh, P("x"), data_callback)

    for kind in (PlacementError, AssertionError):
        with pytest.raises(kind, match=naming("index [0:2, :]", "shape (8, 2)", "shape (2, 2)")):
            make(lambda index: WHOLE)
    with pytest.raises(PlacementError, match=naming("[2:4, :]", "int32", "float32")):
        make(lambda i: WHOLE[i].astype(np.int32) if i[0].start else WHOLE[i])
    with pytest.raises(PlacementError, match=naming("4 shards", "8 indices")):
        make(lambda indices: [WHOLE[:2]] * 4, "from_batched_callback")
    with pytest.raises(PlacementError, match=naming("4 arrays", "8 addressable devices")):
        make(
            lambda asked: [device_put(WHOLE[i], devices[0]) for i, devices in asked],
            "from_batched_callback_with_devices",
        )
    with pytest.raises(
        ArgumentError, match=naming("data_callback", "ndarray", "lambda index: whole[index]")
    ):
        make(WHOLE)
    with pytest.raises(ArgumentError, match=naming("global_mesh", "Mesh", "list")):
        GlobalDeviceArray.from_callback((8, 2), jax.devices(), P("x"), lambda i: WHOLE[i])
    with pytest.raises(ArgumentError, match=r"keys.*jax\.random\.key_data"):
        keys = jax.random.split(jax.random.key(0), 8)
        GlobalDeviceArray.from_callback((8,), mesh, P("x"), lambda index: keys[index])


def test_conversion_to_and_from_an_array_copies_no_data(mesh):
    array = device_put(WHOLE, NamedSharding(mesh, P("x")))
    gda = GlobalDeviceArray.from_array(array)
    assert gda.to_jax() is array.to_jax() and gda.mesh_axes == ("x",)
    back = gda.to_array()
    assert type(back) is Array and back.to_jax() is array.to_jax()
    assert back.sharding == array.sharding
    of_jax = GlobalDeviceArray.from_array(jax.device_put(WHOLE, array.to_jax().sharding))
    assert of_jax.mesh == mesh
    made = GlobalDeviceArray.from_jax(array.to_jax())
    assert type(made) is GlobalDeviceArray and GlobalDeviceArray.from_jax(made) is made
    with pytest.raises(ArgumentError, match="ndarray"):
        GlobalDeviceArray.from_array(WHOLE)  # pyright: ignore
    array.delete()
    with pytest.raises(DeletedError):
        GlobalDeviceArray.from_array(array)


def test_from_array_accepts_an_equivalent_mesh_and_spec(mesh):
    other = Mesh(np.array(jax.devices()), ("d",))
    array = device_put(WHOLE, NamedSharding(other, P("d")))
    gda = GlobalDeviceArray.from_array(array, mesh, P(("x", "y")))
    assert gda.mesh == mesh and gda.mesh_axes == (("x", "y"),)
    pointers = [s.data.unsafe_buffer_pointer() for s in array.addressable_shards]
    assert [s.data.unsafe_buffer_pointer() for s in gda.local_shards] == pointers
    # The same tiles on the same devices, which the other mesh lists backwards.
    backwards = Mesh(np.array(jax.devices()[::-1]), ("d",))
    replicated = device_put(WHOLE, NamedSharding(backwards, P()))
    named = GlobalDeviceArray.from_array(replicated, mesh, P())
    assert [s.device for s in named.local_shards] == list(mesh.devices.flat)
    np.testing.assert_array_equal(named, WHOLE)
    one = Mesh(np.array(jax.devices()[:1]), ("d",))
    assert GlobalDeviceArray.from_array(jnp.asarray(WHOLE), one, P("d")).committed
    with pytest.raises(
        PlacementError, match=naming("float32[8,2]", "P('d')", "P('x')", "device_put(array, ")
    ):
        GlobalDeviceArray.from_array(array, mesh, P("x"))


def test_current_constructors_accept_a_gda_and_its_shards(mesh):
    gda = GlobalDeviceArray.from_callback((8, 2), mesh, P("x"), lambda i: WHOLE[i])
    shards = [shard.data for shard in gda.local_shards]
    again = make_array_from_single_device_arrays((8, 2), gda.sharding, shards)
    np.testing.assert_array_equal(again, WHOLE)
    moved = device_put(gda, SingleDeviceSharding(jax.devices()[2]))
    np.testing.assert_array_equal(moved, WHOLE)
