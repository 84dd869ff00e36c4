"""One of two processes with two devices each: partial results of a sum over both processes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from tests.core.processes import join_the_others

join_the_others()

from tests.core.array.across_processes import DEVICES, ME  # noqa: E402
from xlashard import (  # noqa: E402
    Array,
    Mesh,
    NamedSharding,
    P,
    device_put,
    jit,
    make_array_from_callback,
    make_array_from_single_device_arrays,
    reshard_plan,
)
from xlashard.errors import PlacementError, UnreducedError  # noqa: E402

MESH = Mesh(np.array(DEVICES).reshape(2, 2), ("p", "d"), axis_types=(AxisType.Explicit,) * 2)
V = np.arange(8, dtype=np.float32).reshape(4, 2)


def on(*entries: object, **reductions: object) -> NamedSharding:
    return NamedSharding(MESH, P(*entries, **reductions))


U = on("d", unreduced={"p"})


def check(x: Array, v: np.ndarray) -> None:
    assert x.addressable_shards
    for shard in x.addressable_shards:
        assert shard.device.process_index == ME
        np.testing.assert_array_equal(shard.data, v[shard.index])


def raises(error: type[Exception], action: object) -> None:
    try:
        action()
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


local = [d for d in MESH.devices.flat if d.process_index == ME]
halves = np.split(V, 2)
pieces = [device_put(halves[i] * (1 + ME), d) for i, d in enumerate(local)]
x = make_array_from_single_device_arrays(V.shape, U, pieces)
raises(UnreducedError, lambda: np.asarray(x))
raises(PlacementError, lambda: make_array_from_callback(V.shape, U, lambda index: V[index]))

for target in (on(), on("d"), on("p"), on(("p", "d")), on(None, "p")):
    check(device_put(x, target), V * 3)
    with jax.set_mesh(MESH):
        check(jit(lambda y, spec=target.spec: jax.sharding.reshard(y, spec))(x), V * 3)
assert reshard_plan(x, on("d")).bytes_moved == 4 * 16

partial = device_put(V, U)  # a host value is split into partial results
raises(UnreducedError, lambda: np.asarray(partial))
check(device_put(partial, on("d")), V)

with jax.set_mesh(MESH):
    a = device_put(V, on("p"))
    product = jit(lambda a: jnp.einsum("ab,ac->bc", a, a, out_sharding=P(unreduced={"p"})))(a)
    assert product.sharding.spec.unreduced == {"p"}
    raises(UnreducedError, lambda: np.asarray(product))
    check(device_put(product, on()), V.T @ V)
    check(device_put(jit(lambda y: y + y)(product), on()), 2 * V.T @ V)
print("all agree")
