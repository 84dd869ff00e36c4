"""Axes by name that a thread maps to the mesh, and a sharded loader of batches."""

import contextlib
import functools
import threading
from typing import Mapping, Optional, Sequence, TypeVar, Union

import jax
import jax.numpy as jnp
import jax.random as jrandom
import numpy as np
from jax.experimental.global_device_array import GlobalDeviceArray
from jax.experimental.maps import Mesh
from jax.experimental.multihost_utils import broadcast_one_to_all
from jax.experimental.pjit import pjit, with_sharding_constraint
from jax.interpreters.pxla import PartitionSpec, thread_resources

T = TypeVar("T")
ResourceMapping = Mapping[str, Union[str, Sequence[str]]]


class _Holder(threading.local):
    def __init__(self):
        self.mapping: Optional[ResourceMapping] = None


_holder = _Holder()


@contextlib.contextmanager
def axis_mapping(mapping: ResourceMapping):
    before, _holder.mapping = _holder.mapping, mapping
    try:
        yield
    finally:
        _holder.mapping = before


def pspec_for(*axes: str) -> PartitionSpec:
    mapping = _holder.mapping or {}
    return PartitionSpec(*(mapping.get(axis) for axis in axes))


def auto_sharded(x: T, *axes: str) -> T:
    if _holder.mapping is None or thread_resources.env.physical_mesh.empty:
        return x
    return with_sharding_constraint(x, pspec_for(*axes))


def round_robin(items, process: int, count: int):
    return items[process::count]


class ShardedLoader:
    """Batches as global arrays, of which each device gets its rows only."""

    def __init__(self, data: np.ndarray, batch: int, mesh: Mesh):
        self.data, self.batch, self.mesh = data, batch, mesh

    def __iter__(self):
        for start in range(0, len(self.data), self.batch):
            wanted = []

            def read(indices, start=start, wanted=wanted):
                wanted.extend(indices)
                return [self.data[start : start + self.batch][index] for index in indices]

            shape = (self.batch,) + self.data.shape[1:]
            yield GlobalDeviceArray.from_batched_callback(
                shape, self.mesh, pspec_for("batch", "embed"), read
            )
            assert len(wanted) == len(self.mesh.local_devices)


def dropout(x: jnp.ndarray, rate: float, key: jrandom.KeyArray) -> jnp.ndarray:
    return jnp.where(jrandom.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def main():
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "model"))
    data = np.random.RandomState(0).normal(size=(32, 6)).astype(np.float32)
    seed = int(broadcast_one_to_all(jnp.array(7, dtype=jnp.int32)))
    assert round_robin([0, 1, 2, 3], 1, 2) == [1, 3]
    with mesh, axis_mapping({"batch": "data", "mlp": "model"}):

        @functools.partial(
            pjit,
            in_axis_resources=(pspec_for("embed", "mlp"), pspec_for("batch", "embed"), None),
            out_axis_resources=(None, pspec_for("batch", "mlp")),
        )
        def step(w, x, key):
            h = auto_sharded(jax.nn.gelu(x @ w), "batch", "mlp")
            return jnp.mean(h**2), dropout(h, 0.0, key)

        w = np.random.RandomState(1).normal(size=(6, 4)).astype(np.float32)
        for number, x in enumerate(ShardedLoader(data, 16, mesh)):
            loss, h = step(w, x, jrandom.PRNGKey(seed))
            expected = np.asarray(jax.nn.gelu(data[number * 16 : number * 16 + 16] @ w))
            np.testing.assert_allclose(float(loss), np.mean(expected**2), rtol=1e-4)
            np.testing.assert_allclose(np.asarray(h), expected, rtol=1e-4, atol=1e-5)
    assert auto_sharded(w, "embed", "mlp") is w


if __name__ == "__main__":
    main()
