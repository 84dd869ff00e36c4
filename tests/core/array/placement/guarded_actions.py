"""User actions that may transfer something, with JAX's API and with ours."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xlashard
from tests.core.array.cases import DEVICES, MESH
from xlashard import Array, P

V = np.arange(16, dtype=np.float32).reshape(8, 2)


@dataclass(frozen=True)
class Side:
    """API of one of the two libraries.

    Attributes:
        api: The module.
        jit: Its compiled addition.
        sharding: Returns its sharding for a spec.
        make: Puts a value on devices and returns its array.
        constrain: Its sharding constraint.
        from_dlpack: Its reader of other libraries' arrays.
    """

    api: Any
    jit: Any
    sharding: Callable[..., Any]
    make: Callable[..., Any]
    constrain: Any
    from_dlpack: Any

    @property
    def rows(self) -> Any:
        return self.sharding(MESH, P(("x", "y")))

    @property
    def everywhere(self) -> Any:
        return self.sharding(MESH, P())


JAX = Side(
    jax,
    jax.jit(lambda a, b: a + b),
    jax.sharding.NamedSharding,
    jax.device_put,
    jax.lax.with_sharding_constraint,
    jax.dlpack.from_dlpack,
)
OURS = Side(
    xlashard,
    xlashard.pjit(lambda a, b: a + b),
    xlashard.NamedSharding,
    lambda *args: Array.from_jax(jax.device_put(*args)),
    xlashard.with_sharding_constraint,
    xlashard.from_dlpack,
)

type Maker = Callable[[Side], Any]
type Action = Callable[[Side, Any], Any]


def nothing(s: Side) -> None:
    return None


def rows(s: Side) -> Any:
    return s.make(V, JAX.rows)


def copies(s: Side) -> Any:
    return s.make(V, JAX.everywhere)


def one(s: Side) -> Any:
    return s.make(V, DEVICES[0])


def free(s: Side) -> Any:
    return s.make(V)


def scalar(s: Side) -> Any:
    return s.make(np.float32(3), JAX.everywhere)


def keys(s: Side) -> Any:
    return jax.random.split(jax.random.key(0), 8)


def _read_twice(s: Side) -> Any:
    x = rows(s)
    np.asarray(x)
    return x


def _from_callback(s: Side, sharding: Any) -> Any:
    return s.api.make_array_from_callback(V.shape, sharding, lambda index: V[index])


ACTIONS: dict[str, tuple[Maker, Action]] = {
    "put NumPy on rows": (nothing, lambda s, x: s.api.device_put(V, s.rows)),
    "put NumPy everywhere": (nothing, lambda s, x: s.api.device_put(V, s.everywhere)),
    "put NumPy on a device": (nothing, lambda s, x: s.api.device_put(V, DEVICES[1])),
    "put NumPy anywhere": (nothing, lambda s, x: s.api.device_put(V)),
    "put a number": (nothing, lambda s, x: s.api.device_put(1.0)),
    "put rows everywhere": (rows, lambda s, x: s.api.device_put(x, s.everywhere)),
    "put rows on a device": (rows, lambda s, x: s.api.device_put(x, DEVICES[0])),
    "put copies on rows": (copies, lambda s, x: s.api.device_put(x, s.rows)),
    "put one on rows": (one, lambda s, x: s.api.device_put(x, s.rows)),
    "put one on another": (one, lambda s, x: s.api.device_put(x, DEVICES[1])),
    "put rows on rows": (rows, lambda s, x: s.api.device_put(x, s.rows)),
    "put rows anew": (rows, lambda s, x: s.api.device_put(x, s.rows, may_alias=False)),
    "put an array nowhere": (free, lambda s, x: s.api.device_put(x)),
    "put keys": (keys, lambda s, x: s.api.device_put(x, s.rows)),
    "to_device": (one, lambda s, x: x.to_device(DEVICES[1])),
    "get rows": (rows, lambda s, x: s.api.device_get(x)),
    "get one": (one, lambda s, x: s.api.device_get(x)),
    "asarray of rows": (rows, lambda s, x: np.asarray(x)),
    "asarray of copies": (copies, lambda s, x: np.asarray(x)),
    "asarray of one": (one, lambda s, x: np.asarray(x)),
    "asarray again": (_read_twice, lambda s, x: np.asarray(x)),
    "float": (scalar, lambda s, x: float(x)),
    "bool": (scalar, lambda s, x: bool(x)),
    "item": (scalar, lambda s, x: x.item()),
    "format": (scalar, lambda s, x: f"{x:.2f}"),
    "tolist": (rows, lambda s, x: x.tolist()),
    "tobytes": (rows, lambda s, x: x.tobytes()),
    "repr": (rows, lambda s, x: repr(x)),
    "memoryview": (one, lambda s, x: memoryview(x)),
    "copy_to_host_async": (rows, lambda s, x: x.copy_to_host_async()),
    "pickle": (rows, lambda s, x: pickle.dumps(x)),
    "unpickle": (lambda s: pickle.dumps(rows(s)), lambda s, x: pickle.loads(x)),
    "copy": (rows, lambda s, x: copy.copy(x)),
    "deepcopy": (rows, lambda s, x: copy.deepcopy(x)),
    "iterate over rows": (rows, lambda s, x: list(x)),
    "iterate over one": (one, lambda s, x: list(x)),
    "a shard by index": (rows, lambda s, x: x[0:1]),
    "all shards": (rows, lambda s, x: [np.asarray(d.data) for d in x.addressable_shards]),
    "add arrays": (rows, lambda s, x: x + x),
    "add NumPy": (rows, lambda s, x: x + V),
    "sum": (rows, lambda s, x: x.sum()),
    "sin": (rows, lambda s, x: jnp.sin(x)),
    "call on arrays": (rows, lambda s, x: s.jit(x, x)),
    "call on NumPy": (rows, lambda s, x: s.jit(x, V)),
    "call on a number": (rows, lambda s, x: s.jit(x, 1.0)),
    "call on an array elsewhere": (lambda s: (rows(s), free(s)), lambda s, x: s.jit(*x)),
    "constrain": (rows, lambda s, x: s.constrain(x, s.everywhere)),
    "from a callback": (nothing, lambda s, x: _from_callback(s, s.rows)),
    "from a callback, copies": (nothing, lambda s, x: _from_callback(s, s.everywhere)),
    "from local data": (
        nothing,
        lambda s, x: s.api.make_array_from_process_local_data(s.rows, V),
    ),
    "from single arrays": (
        rows,
        lambda s, x: s.api.make_array_from_single_device_arrays(
            V.shape, s.rows, [shard.data for shard in x.addressable_shards]
        ),
    ),
    "to DLPack": (one, lambda s, x: np.from_dlpack(x)),
    "from DLPack": (nothing, lambda s, x: s.from_dlpack(V)),
}
