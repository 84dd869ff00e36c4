"""The era's `multihost_utils`, for any number of processes."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.core.processes import expect
from tests.legacy.removed import multihost_utils
from xlashard import Mesh, NamedSharding, device_put
from xlashard._jax.runtime.transfer import HandleType
from xlashard.legacy import jax_array
from xlashard.legacy.arrays.device_arrays import ShardedDeviceArray
from xlashard.legacy.arrays.gda import GlobalDeviceArray
from xlashard.legacy.shardings.partition_spec import PartitionSpec as P


def check_multihost_utils() -> None:
    check_gathering()
    check_host_local_and_global()
    check_the_rest()


def check_gathering() -> None:
    me, count = jax.process_index(), jax.process_count()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole = np.arange(32, dtype=np.float32).reshape(8, 4)
    x = device_put(whole, NamedSharding(mesh, P("data")))
    gda = GlobalDeviceArray.from_array(x)
    gather = multihost_utils.process_allgather
    # The value of a GlobalDeviceArray, and of an array that spans processes, is one array.
    for tiled in (False, True):
        assert np.array_equal(gather(gda, tiled), whole)
        if count > 1:
            assert np.array_equal(gather(x, tiled=tiled), whole)
    mine = np.full((2, 3), me, np.int32)
    assert gather(mine).shape == (count, 2, 3) and gather(mine)[:, 0, 0].tolist() == [*range(count)]
    assert gather(jnp.asarray(mine), tiled=True).shape == (2 * count, 3)
    tree = {"gda": gda, "step": me, "local": [mine, device_put(mine, jax.local_devices()[0])]}
    for tiled in (False, True):
        out = gather(tree, tiled)
        assert np.array_equal(out["gda"], whole) and out["step"].tolist() == [*range(count)]
        shape = (2 * count, 3) if tiled else (count, 2, 3)
        assert [leaf.shape for leaf in out["local"]] == [shape, shape]
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(out))
    assert gather({}) == {} and gather(None) is None


def check_host_local_and_global() -> None:
    count = jax.process_count()
    mesh = Mesh(np.array(jax.devices()).reshape(count, -1), ("host", "data"))
    local = {"x": np.ones((8, 4), np.float32) * jax.process_index(), "scale": np.float32(2)}
    specs = {"x": P(("host", "data")), "scale": None}
    for on, of_all in ((True, HandleType), (False, GlobalDeviceArray)):
        with jax_array(on):
            out = multihost_utils.host_local_array_to_global_array(local, mesh, specs)
            back = multihost_utils.global_array_to_host_local_array(out, mesh, specs)
        assert {type(leaf) for leaf in out.values()} == {of_all}
        assert out["x"].shape == (8 * count, 4) and out["scale"].shape == ()
        assert tuple(out["x"].sharding.spec) == (("host", "data"),)
        here = HandleType if on else ShardedDeviceArray
        assert {type(leaf) for leaf in back.values()} == {here}
        assert np.array_equal(back["x"], local["x"]) and back["scale"] == 2
    doubled = jax.vmap(
        lambda x: multihost_utils.host_local_array_to_global_array(x, mesh, P("data")) * 2
    )
    assert doubled(np.ones((3, 8), np.float32)).shape == (3, 8)


def check_the_rest() -> None:
    me, count = jax.process_index(), jax.process_count()
    multihost_utils.sync_global_devices("here")
    multihost_utils.assert_equal({"step": np.int32(7)}, "the steps")
    multihost_utils.assert_equal(7)
    value = multihost_utils.broadcast_one_to_all({"seed": np.uint32(me + 5)})
    assert value["seed"] == 5
    last = multihost_utils.broadcast_one_to_all(np.uint32(me), is_source=me == count - 1)
    assert last == count - 1
    if count > 1:
        expect(
            AssertionError,
            "the seeds.*in_tree",
            lambda: multihost_utils.assert_equal(np.int32(me), fail_message="the seeds"),
        )
