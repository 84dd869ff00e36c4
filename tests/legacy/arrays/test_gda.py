"""`GlobalDeviceArray`: its properties, and the functions that accept it."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
from tests.core.pjit.helpers import f32
from tests.message_patterns import naming
from xlashard import (
    FROM_GDA,
    Array,
    GSPMDSharding,
    Mesh,
    NamedSharding,
    device_put,
    pjit,
    with_sharding_constraint,
)
from xlashard import multihost as xmultihost
from xlashard._jax import legacy_api as jax_pmap
from xlashard._jax.private import pmap_lib, replace_name
from xlashard.core.array.array_class.handles import wrap_output
from xlashard.errors import (
    DeletedError,
    MeshError,
    RefusedError,
    ResourceError,
    ShardingError,
    XlashardError,
)
from xlashard.legacy import GlobalDeviceArray
from xlashard.legacy.arrays.device_arrays import DeviceArray, ShardedDeviceArray
from xlashard.legacy.arrays.gda import check_gda_mesh, gda_class
from xlashard.legacy.arrays.shards import Shard
from xlashard.legacy.shardings.partition_spec import PartitionSpec as P

pytestmark = pytest.mark.partitioner

WHOLE = f32(8, 2)


@pytest.fixture
def gda(mesh):
    """Rows sharded over `x`, replicated over `y`."""
    return GlobalDeviceArray.from_callback((8, 2), mesh, P("x"), lambda index: WHOLE[index])


def test_attributes_and_repr(gda, mesh):
    assert gda.shape == (8, 2) and gda.dtype == np.float32 and gda.ndim == 2 and gda.size == 16
    assert gda.mesh is mesh and gda.mesh_axes == P("x") == ("x",)
    assert isinstance(gda.mesh_axes, tuple)
    assert gda.sharding == NamedSharding(mesh, P("x"))
    assert not gda.is_fully_replicated and gda.is_fully_addressable and gda.committed
    assert isinstance(gda, jax.Array) and isinstance(gda, Array) and len(gda) == 8
    everywhere = GlobalDeviceArray.from_callback((8, 2), mesh, P(), lambda index: WHOLE[index])
    assert everywhere.is_fully_replicated
    np.testing.assert_array_equal(everywhere._value, WHOLE)


def test_str_repr_and_format_of_a_gda(gda, mesh):
    assert str(gda) == "GlobalDeviceArray(shape=(8, 2), dtype=float32)" == f"{gda}"
    shown = repr(gda)
    assert shown.startswith("GlobalDeviceArray(shape=(8, 2), dtype=float32, ")
    assert "global_mesh_shape={'x': 4, 'y': 2}" in shown
    assert "mesh_axes=PartitionSpec('x',)" in shown
    assert f"{gda.sum():.1f}" == f"{WHOLE.sum():.1f}"
    tiles = GSPMDSharding(tuple(mesh.devices.flat), "{devices=[8,1]<=[2,4]T(1,0)}")
    unnamed = GlobalDeviceArray.from_array(device_put(WHOLE, tiles))
    assert "sharding={devices=[8,1]<=[2,4]T(1,0)} on 8 devices" in repr(unnamed)


def test_shards_have_device_index_replica_id_and_data(gda, mesh):
    assert gda.local_shards == gda.addressable_shards == gda.global_shards
    for number, (shard, device) in enumerate(
        zip(gda.local_shards, mesh.local_devices, strict=True)
    ):
        assert isinstance(shard, Shard) and shard.device == device
        row = 2 * (number // 2)
        assert shard.index == (slice(row, row + 2), slice(None))
        assert shard.replica_id == number % 2
        assert isinstance(shard.data, DeviceArray) and shard.data.device == device
        np.testing.assert_array_equal(shard.data, WHOLE[shard.index])
        np.testing.assert_array_equal(gda.local_data(number), WHOLE[shard.index])
    assert gda.addressable_data(-1).devices() == {mesh.devices[3, 1]}
    assert sum(s.data.nbytes for s in gda.addressable_shards if s.replica_id == 0) == gda.nbytes
    with pytest.raises(IndexError, match=naming("addressable_data(8)", "from 0 to 7")):
        gda.local_data(8)


def test_conversion_to_numpy(gda):
    np.testing.assert_array_equal(gda, WHOLE)
    assert np.asarray(gda, np.float16).dtype == np.float16
    assert np.array(gda).flags.writeable and gda._value.tolist() == WHOLE.tolist()
    assert gda.block_until_ready() is gda
    np.testing.assert_array_equal(xlashard.device_get({"w": gda})["w"], WHOLE)
    np.testing.assert_array_equal(xmultihost.process_allgather(gda, tiled=True), WHOLE)


def test_access_after_delete_raises(gda):
    assert not gda.is_deleted()
    piece = gda.local_data(3)
    gda.delete()
    gda.delete()
    assert gda.is_deleted() and piece.is_deleted()
    for use in (
        lambda: gda.local_shards,
        lambda: gda.global_shards,
        lambda: gda.addressable_shards,
        lambda: gda.local_data(0),
        lambda: gda._value,
        lambda: np.asarray(gda),
        gda.block_until_ready,
    ):
        with pytest.raises(RuntimeError, match=r"float32\[8,2\].*delete\(\)"):
            use()
    assert gda.shape == (8, 2) and "GlobalDeviceArray" in repr(gda)


def test_deleting_every_shard_deletes_the_gda(gda):
    for number in range(8):
        gda.addressable_shards[number].data.delete()
    with pytest.raises(DeletedError, match=r"float32\[8,2\].*delete\(\)"):
        gda.addressable_shards  # noqa: B018
    assert gda.is_deleted()


def test_comparison_operators_are_refused(gda):
    for compare in (
        lambda: gda == gda,
        lambda: gda != gda,
        lambda: gda == 3,
        lambda: gda == WHOLE,
        lambda: gda.to_array() == gda,
        lambda: gda in [gda.to_array()],
    ):
        with pytest.raises(NotImplementedError, match=r"x\.to_array\(\) [=!]= y\.to_array\(\)"):
            compare()
    with pytest.raises(RefusedError) as error:
        gda == WHOLE  # noqa: B015
    assert isinstance(error.value, XlashardError) and isinstance(error.value, RuntimeError)
    assert error.value.name == "GlobalDeviceArray.__eq__"
    assert bool((gda.to_array() == WHOLE).all())
    with pytest.raises(TypeError, match="unhashable"):
        hash(gda)


def test_gda_is_one_pytree_leaf(gda):
    leaves, treedef = jax.tree.flatten({"w": gda, "b": [gda]})
    assert len(leaves) == 2 and all(leaf is gda for leaf in leaves)
    assert jax.tree.structure(gda) == jax.tree.structure(0)
    assert treedef.unflatten(leaves)["w"] is gda


@pytest.mark.slow
def test_jax_functions_accept_a_gda(gda):
    assert jax.typeof(gda).shape == (8, 2)
    np.testing.assert_allclose(jnp.sin(gda), np.sin(WHOLE), rtol=1e-6)
    np.testing.assert_array_equal(jax.jit(lambda x: x * 2)(gda), WHOLE * 2)
    np.testing.assert_array_equal(jax.vmap(lambda row: row.sum())(gda), WHOLE.sum(1))
    np.testing.assert_allclose(jax.grad(lambda x: (x**2).sum())(gda), 2 * WHOLE)
    shape = jax.eval_shape(lambda x: x.T, gda)
    assert shape.shape == (2, 8)
    ones = jnp.ones((8, 2))
    np.testing.assert_array_equal(jax.jit(lambda x: x + gda)(ones), WHOLE + 1)
    np.testing.assert_array_equal(
        jax.lax.scan(lambda total, row: (total + row, total), jnp.zeros(2), gda)[0], WHOLE.sum(0)
    )
    # JAX caches compilations of its own functions by devices, and would return these results on the
    # mesh of another test, which has equal devices in a different shape.
    jax.clear_caches()
    # These compare their arguments outside of any program.
    assert bool(jnp.array_equal(gda, gda)) and not bool(jnp.array_equal(gda, gda + 1))
    np.testing.assert_array_equal(jnp.nonzero(gda), np.nonzero(WHOLE))
    np.testing.assert_array_equal(jnp.where(gda)[0], np.where(WHOLE)[0])
    moved = jax.device_put(gda, jax.devices()[0])
    assert moved.devices() == {jax.devices()[0]}


@pytest.mark.slow
def test_operations_on_a_gda_return_a_gda(gda):
    for made in (gda + 1, 1 + gda, gda * gda, -gda, gda[2], gda.sum(), gda.T, gda.copy()):
        assert type(made) is GlobalDeviceArray
    np.testing.assert_array_equal(gda @ gda.T, WHOLE @ WHOLE.T)
    assert type(copy.deepcopy(gda)) is GlobalDeviceArray
    assert type(gda.to_array() + gda) is Array
    assert (gda + 1).mesh_axes == ("x",)


def test_pjit_accepts_a_gda_under_each_partitioner(gda, mesh, partitioner):
    def double(x):
        return with_sharding_constraint(x * 2, P(None, "y"))

    with mesh:
        for resources in (P("x"), FROM_GDA, P("x", None)):
            out = pjit(double, in_axis_resources=resources, out_axis_resources=P("x", "y"))(gda)
            np.testing.assert_array_equal(out, WHOLE * 2)
            assert type(out) is Array and out.sharding.spec == P("x", "y")
        both = pjit(
            lambda state, batch: {"w": state["w"] + batch},
            in_axis_resources=({"w": FROM_GDA}, P("x")),
            out_axis_resources=P("x"),
        )({"w": gda}, WHOLE)
        np.testing.assert_array_equal(both["w"], WHOLE * 2)
        constant = pjit(lambda x: x - gda, in_axis_resources=P(), out_axis_resources=P("y"))
        np.testing.assert_array_equal(constant(WHOLE), np.zeros((8, 2)))
        with pytest.raises(ResourceError, match=r"x.*P.*y"):
            pjit(double, in_axis_resources=P("y"), out_axis_resources=None)(gda)


def test_pjit_donates_a_gda(gda, mesh):
    step = pjit(lambda x: x + 1, in_axis_resources=P("x"), out_axis_resources=P("x"),
                donate_argnums=0)  # fmt: skip
    with mesh:
        once = step(gda)
        twice = step(GlobalDeviceArray.from_array(once))
    assert gda.is_deleted() and once.is_deleted()
    np.testing.assert_array_equal(twice, WHOLE + 2)
    with pytest.raises(RuntimeError, match=r"float32\[8,2\].*donated.* <lambda>, as x"):
        gda.local_data(0)


def test_results_are_wrapped_in_a_gda(gda, mesh):
    handle = device_put(WHOLE, NamedSharding(mesh, P("x", "y"))).to_jax()
    one = wrap_output(gda_class, (handle,))
    assert type(one) is GlobalDeviceArray
    assert one.mesh == mesh and one.mesh_axes == ("x", "y")


def test_pmap_refuses_a_gda(gda):
    for call in (
        lambda: jax.pmap(lambda row: row * 2)(gda),
        lambda: jax.pmap(lambda a, b: a["w"] + b)({"w": WHOLE}, gda),
        lambda: jax.pmap(lambda a, b: a + b, in_axes=(0, None))(WHOLE, gda),
        lambda: jax.pmap(lambda row: row).lower(gda),
    ):
        with pytest.raises(RuntimeError, match=r"pmap.*float32\[8,2\].*in_axis_resources=FROM_GDA"):
            call()
    np.testing.assert_array_equal(jax.pmap(lambda row: row * 2)(WHOLE), WHOLE * 2)


@pytest.mark.devices(8)
def test_pmap_refuses_only_the_registered_type():
    class Odd:
        shape = (8,)

    def refuse(_):
        raise ValueError("refused")

    before = pmap_lib._mapped_axis_size
    jax_pmap.refuse_in_pmap(Odd, refuse)
    try:
        with pytest.raises(ValueError, match="refused"):
            jax.pmap(lambda x: x)(Odd())
        np.testing.assert_array_equal(jax.pmap(lambda row: row + 1)(WHOLE), WHOLE + 1)
    finally:
        replace_name(pmap_lib, "_mapped_axis_size", before)


def test_without_a_mesh_mesh_and_mesh_axes_raise(mesh):
    single = GlobalDeviceArray.from_array(device_put(WHOLE, jax.devices()[0]))
    for ask in (lambda: single.mesh, lambda: single.mesh_axes):
        with pytest.raises(MeshError, match=naming("float32[8,2]", "device 0", "x.sharding")):
            ask()
    assert single.local_shards[0].index == (slice(None), slice(None))
    assert single.is_fully_replicated


def test_pickle_round_trip_keeps_the_mesh(gda, mesh, monkeypatch):
    text = pickle.dumps(gda)
    again = pickle.loads(text)
    assert type(again) is GlobalDeviceArray
    assert again.mesh == mesh and again.mesh_axes == ("x",)
    np.testing.assert_array_equal(again, WHOLE)
    single = pickle.loads(
        pickle.dumps(GlobalDeviceArray.from_array(device_put(WHOLE, jax.devices()[3])))
    )
    assert type(single) is GlobalDeviceArray
    np.testing.assert_array_equal(single, WHOLE)
    fewer = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *_: fewer)
    with pytest.raises(ShardingError, match=naming("8 devices", "cpu:4, cpu:5, cpu:6, cpu:7")):
        pickle.loads(text)


def test_check_gda_mesh_refuses_a_different_mesh(gda, mesh):
    turned = Mesh(mesh.devices[::-1], ("x", "y"))
    check_gda_mesh([gda, WHOLE, gda.to_array()], ["x", "y", "z"], Mesh(mesh.devices, ("x", "y")))
    check_gda_mesh([gda.to_array()], ["x"], turned)
    single = GlobalDeviceArray.from_array(device_put(WHOLE, jax.devices()[0]))
    check_gda_mesh([single], ["x"], turned)
    with pytest.raises(
        ValueError, match=naming("state['w'] ", "0, 1, 2", "6, 7, 4", "`with state['w'].mesh:`")
    ):
        check_gda_mesh([WHOLE, gda], ["batch", "state['w']"], turned)


def test_gda_is_not_an_instance_of_other_array_classes(gda):
    assert not isinstance(gda, DeviceArray) and not isinstance(gda, ShardedDeviceArray)
    assert not isinstance(gda.to_array(), GlobalDeviceArray)
    assert not isinstance(jnp.ones(3), GlobalDeviceArray)
    with pytest.raises(TypeError, match=r"Array\(\)"):
        GlobalDeviceArray().shape  # noqa: B018


def test_error_of_a_missing_attribute_names_the_attribute(gda):
    with pytest.raises(AttributeError, match=naming("GlobalDeviceArray", "'localdata'")):
        _ = gda.localdata
