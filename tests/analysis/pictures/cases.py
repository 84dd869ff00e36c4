"""Pictures that every renderer must draw."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.analysis.pictures.pods import pod, pod_mesh
from tests.core.array.cases import Stripes
from xlashard import AbstractMesh, Mesh, NamedSharding, P

DEVICES = jax.devices()
MESH = Mesh(np.array(DEVICES).reshape(4, 2), ("data", "model"))
LONG_NAMES = AbstractMesh((4, 2, 2), ("expert_parallel_dimension", "fully_sharded", "tensor"))
HUGE = AbstractMesh((256, 256), ("data", "model"))


def struct(shape, dtype, mesh, *spec, **rest):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec), **rest))


PICTURES = {
    "rows and columns": (struct((8, 16), jnp.float32, MESH, "data", "model"), None),
    "copies in pinned memory": (
        struct((8, 16), jnp.bfloat16, MESH, "data", memory_kind="pinned_host"),
        None,
    ),
    "one dimension": ((16,), NamedSharding(MESH, P(("data", "model")))),
    "a scalar": (struct((), jnp.int32, MESH), None),
    "uneven, the last tiles empty": ((9, 4), NamedSharding(MESH, P(("data", "model")))),
    "hosts": ((64, 1024), pod({"data": 4, "model": 4}, ("data", "model"), 2)),
    "copies across hosts": (
        struct((64, 1024), jnp.bfloat16, pod_mesh({"data": 4, "model": 4}), "model"),
        None,
    ),
    "hosts side by side": ((8, 8), pod({"x": 4, "y": 4}, ("y", "x"), 2)),
    "three dimensions": (
        struct(
            (16, 64, 4096, 8),
            jnp.float32,
            pod_mesh({"data": 2, "fsdp": 2, "model": 4}, per_host=4),
            *("data", "fsdp", None, "model"),
        ),
        None,
    ),
    "four dimensions": ((8, 8, 8, 8), pod(dict.fromkeys("abcd", 2), tuple("abcd"), 4, per_host=16)),
    "many panels": ((64, 4, 4), pod({"a": 32, "b": 2, "c": 2}, tuple("abc"), 3, per_host=128)),
    "65,536 devices": (struct((65536, 65536), jnp.float32, HUGE, "data", "model"), None),
    "long names": (
        struct((64, 128, 64), jnp.int8, LONG_NAMES, LONG_NAMES.axis_names[:2], None, "tensor"),
        None,
    ),
    "left to the partitioner": ((8, 8), NamedSharding(MESH, P("model", P.UNCONSTRAINED))),
    "of a user's own": ((8, 2), Stripes(DEVICES[:4], (2, 0, 3, 1))),
}
