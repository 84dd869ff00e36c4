"""States over the four devices of a pod of two processes, and over the devices of one process."""

import functools
from typing import Any

import jax
import numpy as np

from xlashard import Array, Mesh, NamedSharding, P, make_array_from_callback
from xlashard.train.checkpoint import RunMetadata


@functools.cache
def mesh() -> Mesh:
    """Return all devices, once JAX has started."""
    return Mesh(np.array(jax.devices()).reshape(2, -1), ("process", "device"))


ROWS, COLUMNS = P(("process", "device")), P(None, "process")


def values(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "w": rng.standard_normal((8, 4096), np.float32),
        "b": rng.standard_normal(8).astype(jax.numpy.bfloat16),
        "step": np.asarray(step, np.int32),
    }


def place(name: str, spec: Any) -> NamedSharding:
    return NamedSharding(mesh(), spec if name == "w" else P())


def state(step: int, spec: Any = ROWS) -> dict[str, Array]:
    return {
        name: make_array_from_callback(x.shape, place(name, spec), lambda index, x=x: x[index])
        for name, x in values(step).items()
    }


def state_types(spec: Any = ROWS) -> dict[str, Any]:
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(name, spec))
        for name, x in values(0).items()
    }


def check(got: dict[str, Array], step: int, spec: Any = ROWS) -> None:
    for name, x in values(step).items():
        assert type(got[name]) is Array and got[name].sharding == place(name, spec)
        for shard in got[name].addressable_shards:
            assert np.asarray(shard.data).tobytes() == x[shard.index].tobytes(), name


def metadata(step: int) -> RunMetadata:
    return RunMetadata(step, {"next": step}, "", {"process": 2, "device": 2})
