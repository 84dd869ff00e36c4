"""One of two processes with eight devices together: arrays of which each addresses a part.

It stops with an error where a result is wrong.
"""

import pickle
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from tests.core.processes import expect
from xlashard import FROM_GDA, Array, Mesh, NamedSharding, device_put, multihost, pjit
from xlashard.errors import ArgumentError, NotAddressableError, PlacementError, RefusedError
from xlashard.legacy import DeviceArray, GlobalDeviceArray, ShardedDeviceArray
from xlashard.legacy.arrays.shards import get_shard_indices, get_shard_indices_replica_ids
from xlashard.legacy.shardings.partition_spec import PartitionSpec as P

jax.distributed.initialize()

ME = jax.process_index()
DEVICES = np.array(jax.devices())
WHOLE = np.arange(32, dtype=np.float32).reshape(16, 2)
# In the second mesh each process has every other row.
MESHES = [
    Mesh(DEVICES.reshape(4, 2), ("x", "y")),
    Mesh(DEVICES.reshape(2, 4).T, ("x", "y")),
]
SPECS = [P("x"), P("y"), P("x", "y"), P(("y", "x")), P(None, "y"), P()]


def check_makers(mesh: Mesh, spec: Any) -> None:
    """Callbacks run for this process's devices only, in mesh order."""
    indices = get_shard_indices(WHOLE.shape, mesh, spec)
    local = [d for d in mesh.devices.flat if d.process_index == ME]
    assert mesh.local_devices == local and len(local) == 4 and len(indices) == 8
    asked: list[Any] = []

    def one(index: Any) -> np.ndarray:
        asked.append(index)
        return WHOLE[index]

    def batched(requests: Any) -> list[np.ndarray]:
        asked.append(requests)
        return [WHOLE[index] for index in requests]

    def on_devices(requests: Any) -> list[jax.Array]:
        asked.append(requests)
        return [jax.device_put(WHOLE[index], d) for index, ds in requests for d in ds]

    mine = [indices[d] for d in local]
    gdas = [GlobalDeviceArray.from_callback(WHOLE.shape, mesh, spec, one)]
    assert asked == mine, asked
    asked.clear()
    gdas.append(GlobalDeviceArray.from_batched_callback(WHOLE.shape, mesh, spec, batched))
    assert asked == [mine], asked
    asked.clear()
    make = GlobalDeviceArray.from_batched_callback_with_devices
    gdas.append(make(WHOLE.shape, mesh, spec, on_devices))
    assert sorted(d.id for _, ds in asked[0] for d in ds) == sorted(d.id for d in local)
    buffers = [jax.device_put(WHOLE[indices[d]], d) for d in local]
    gdas.append(GlobalDeviceArray(WHOLE.shape, mesh, spec, buffers))
    for gda in gdas:
        check_shards(gda, mesh, spec)
    # Every process leaves out its first device.
    expect(
        PlacementError,
        "3 arrays for 4 addressable devices",
        lambda: GlobalDeviceArray(WHOLE.shape, mesh, spec, buffers[1:]),
    )
    expect(
        PlacementError,
        r"device_buffers\[0\] is on .*local_devices\[0\]",
        lambda: GlobalDeviceArray(WHOLE.shape, mesh, spec, buffers[::-1]),
    )


def check_shards(gda: Any, mesh: Mesh, spec: Any) -> None:
    places = get_shard_indices_replica_ids(WHOLE.shape, mesh, spec)
    assert gda.shape == WHOLE.shape and gda.mesh == mesh and gda.mesh_axes == spec
    assert [s.device for s in gda.local_shards] == mesh.local_devices
    assert [s.device for s in gda.global_shards] == list(mesh.devices.flat)
    for shard in gda.global_shards:
        assert (shard.index, shard.replica_id) == places[shard.device]
        if shard.device.process_index != ME:
            assert shard.data is None
            continue
        assert isinstance(shard.data, DeviceArray)
        np.testing.assert_array_equal(shard.data, WHOLE[shard.index])
    for number, shard in enumerate(gda.addressable_shards):
        np.testing.assert_array_equal(gda.local_data(number), shard.data)
    assert not gda.is_fully_addressable
    assert not isinstance(gda, ShardedDeviceArray)


def check_values(mesh: Mesh, spec: Any) -> None:
    """Addressable values are read; for others the error names the call that gathers them."""
    gda = GlobalDeviceArray.from_callback(WHOLE.shape, mesh, spec, lambda index: WHOLE[index])
    here = {tuple((cut.start, cut.stop) for cut in s.index) for s in gda.local_shards}
    everywhere = {tuple((cut.start, cut.stop) for cut in s.index) for s in gda.global_shards}
    if here == everywhere:
        np.testing.assert_array_equal(gda, WHOLE)
        assert len(pickle.loads(pickle.dumps(gda)).global_shards) == 8
    else:
        for read in (lambda: np.asarray(gda), lambda: gda._value, lambda: pickle.dumps(gda)):
            expect(NotAddressableError, "process_allgather.*tiled=True", read)
    np.testing.assert_array_equal(multihost.process_allgather(gda, tiled=True), WHOLE)
    np.testing.assert_array_equal(multihost_utils.process_allgather(gda, tiled=True), WHOLE)
    assert repr(gda).startswith("GlobalDeviceArray(shape=(16, 2), dtype=float32, global_mesh_shape")
    expect(RefusedError, "to_array", lambda: gda == gda)
    expect(RefusedError, "FROM_GDA", lambda: jax.pmap(lambda x: x)(gda))
    assert not gda.to_array().is_deleted()
    gda.delete()
    expect(RuntimeError, "has been deleted", lambda: gda.local_shards)


def check_pjit(mesh: Mesh) -> None:
    """Call pjit with specs or their own shardings, beside NumPy values; donated, in a loop."""

    def make(spec: Any) -> GlobalDeviceArray:
        return GlobalDeviceArray.from_callback(WHOLE.shape, mesh, spec, lambda i: WHOLE[i])

    gda = make(P("x", "y"))
    with mesh:
        double = pjit(lambda x: x * 2, in_axis_resources=P("x", "y"), out_axis_resources=P("y"))
        out = double(gda)
        assert isinstance(out, Array) and out.sharding == NamedSharding(mesh, P("y").today)
        check_shards(GlobalDeviceArray.from_array(out / 2), mesh, P("y"))
        mixed = pjit(
            lambda a, b, scale: (a @ b.T) * scale,
            in_axis_resources=(FROM_GDA, P("y"), None),
            out_axis_resources=None,
        )
        product = mixed(gda, make(P("y")), np.float32(2))
        np.testing.assert_array_equal(product, 2 * WHOLE @ WHOLE.T)
        step = pjit(
            lambda x: x + 1, in_axis_resources=P("x"), out_axis_resources=P("x"), donate_argnums=0
        )
        state = make(P("x"))
        for _ in range(3):
            before, state = state, GlobalDeviceArray.from_array(step(state))
            assert before.is_deleted()
        np.testing.assert_array_equal(multihost.process_allgather(state, tiled=True), WHOLE + 3)
    total = jax.jit(jnp.sum)(gda)
    assert float(total) == WHOLE.sum()
    local = Mesh(np.array(jax.local_devices()), ("d",))
    expect(ArgumentError, "mesh", lambda: GlobalDeviceArray(WHOLE.shape, None, P(), [total]))
    moved = device_put(gda, NamedSharding(mesh, P().today))
    np.testing.assert_array_equal(moved, WHOLE)
    here = GlobalDeviceArray.from_callback((4,), local, P("d"), lambda i: np.arange(4)[i])
    assert here.is_fully_addressable and np.asarray(here).tolist() == [0, 1, 2, 3]


def check_saving(mesh: Mesh, folder: Path) -> None:
    """Orbax saves the Array behind it."""
    gda = GlobalDeviceArray.from_callback(WHOLE.shape, mesh, P("x"), lambda i: WHOLE[i])
    with ocp.StandardCheckpointer() as saver:
        saver.save(folder / "state", {"w": gda})
        saver.wait_until_finished()
        like = {"w": jax.ShapeDtypeStruct(gda.shape, gda.dtype, sharding=gda.to_jax().sharding)}
        back = saver.restore(folder / "state", like)
    check_shards(GlobalDeviceArray.from_array(back["w"]), mesh, P("x"))


def main() -> None:
    for mesh in MESHES:
        for spec in SPECS:
            check_makers(mesh, spec)
            check_values(mesh, spec)
        check_pjit(mesh)
    check_saving(MESHES[0], Path(sys.argv[1]))
    print("all as it should be")


main()
