"""One of two processes with two devices each: a table of calls, by JAX and by this package.

What JAX accepts has the same result here: shape, dtype, sharding, committed, and the local shards.
NumPy arrays that JAX refuses are refused.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.core.processes import join_the_others

join_the_others()

from jax.experimental import multihost_utils  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding  # noqa: E402

import xlashard as xs  # noqa: E402
from xlashard import multihost  # noqa: E402
from xlashard.errors import ResourceError  # noqa: E402

P = PartitionSpec
LOCAL = jax.local_devices()
MESH = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
PAIRS = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
HERE = jax.sharding.Mesh(np.array(LOCAL), ("x",))
V = np.arange(32, dtype=np.float32).reshape(8, 4)
TARGETS: dict[str, Any] = {
    "global x": NamedSharding(MESH, P("x")),
    "global whole": NamedSharding(MESH, P()),
    "global b": NamedSharding(PAIRS, P("b")),
    "local x": NamedSharding(HERE, P("x")),
    "local whole": NamedSharding(HERE, P()),
    "one": SingleDeviceSharding(LOCAL[0]),
    "of process 0": SingleDeviceSharding(jax.devices()[0]),
    "device": LOCAL[1],
}
# Arrays that the first process alone has go to the other one: programs of both processes.
MOVES = {"global x", "global whole", "global b", "committed", "local x"}


def values(lib: Any) -> dict[str, Callable[[], Any]]:
    def spanning(target: str) -> Callable[[], Any]:
        return lambda: lib.make_array_from_callback(V.shape, TARGETS[target], V.__getitem__)

    return {
        "NumPy": V.copy,
        "number": lambda: 3.0,
        "scalar": lambda: np.float32(2),
        "uncommitted": lambda: jnp.asarray(V),
        "committed": lambda: lib.device_put(V, LOCAL[0]),
        "local x": lambda: lib.device_put(V, TARGETS["local x"]),
        "global x": spanning("global x"),
        "global whole": spanning("global whole"),
        "global b": spanning("global b"),
        "key": lambda: jax.random.key(1),
        "data of a key": lambda: jax.random.PRNGKey(1),
        "list": lambda: [1, 2],
    }


def facts(result: Any) -> list[Any]:
    found: list[Any] = []
    for x in jax.tree.leaves(result):
        if not isinstance(x, jax.Array):
            found.append((np.shape(x), np.asarray(x).tolist()))
            continue
        data = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        spec = getattr(x.sharding, "spec", type(x.sharding).__name__)
        shards = [np.asarray(shard.data).tolist() for shard in data.addressable_shards]
        found.append(
            (x.shape, str(x.dtype), str(spec), x.committed, x.sharding.num_devices, shards)
        )
    return found


def outcome(use: Callable[[], Any]) -> Any:
    try:
        return facts(use())
    except (Exception, StopIteration) as error:
        return error


FAULTS: list[str] = []
COUNT = 0


def compare(name: str, theirs: Callable[[], Any], ours: Callable[[], Any]) -> Any:
    """Compare the outcomes of a call, and return ours."""
    global COUNT
    right, found = outcome(theirs), outcome(ours)
    COUNT += not isinstance(right, Exception)
    if not isinstance(right, Exception) and found != right:
        FAULTS.append(f"{name}: {found!r:.300}; JAX: {right!r:.300}")
    return found


JAX, OURS = values(jax), values(xs)


def puts() -> None:
    for name in JAX:
        for target, where in TARGETS.items():
            if target == "of process 0" and name in MOVES:
                continue
            compare(
                f"device_put {name} to {target}",
                lambda name=name, where=where: jax.device_put(JAX[name](), where),
                lambda name=name, where=where: xs.device_put(OURS[name](), where),
            )


def programs() -> None:
    spanning = TARGETS["global x"]

    def call(lib: Any, value: Any, requested: Any, other: Any) -> Any:
        def f(a: Any, b: Any) -> Any:
            drawn = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
            a = jax.random.uniform(a, (4,)) if drawn else a * 2
            return a if other is None else a + b.sum()

        keywords = {} if requested is None else {"in_shardings": (requested, None)}
        return lib.jit(f, **keywords)(value, other)

    for name in JAX:
        for target in (None, "global x", "global whole", "local x", "one"):
            requested = None if target is None else TARGETS[target]
            for joined in (False, True):
                if name == "list" or (target == "global x" and not np.shape(JAX[name]())):
                    continue
                with_other = [
                    lambda lib=lib, made=made, requested=requested, joined=joined, name=name: call(
                        lib, made[name](), requested, made["global x"]() if joined else None
                    )
                    for lib, made in ((jax, JAX), (xs, OURS))
                ]
                found = compare(f"jit {name} in {target}, {joined=}", *with_other)
                if name == "NumPy" and requested is spanning:
                    assert isinstance(found, ResourceError), found


def makers() -> None:
    for target, where in TARGETS.items():
        if target == "device":
            continue

        def single_arrays(lib: Any, count: int | None, where: Any = where) -> Any:
            indices = where.addressable_devices_indices_map(V.shape)
            pieces = [lib.device_put(V[index], device) for device, index in indices.items()]
            return lib.make_array_from_single_device_arrays(V.shape, where, pieces[:count])

        for dtype in (None, np.float32):
            compare(
                f"callback {target} {dtype}",
                *[
                    lambda lib=lib, dtype=dtype, where=where: lib.make_array_from_callback(
                        V.shape, where, V.__getitem__, **({} if dtype is None else {"dtype": dtype})
                    )
                    for lib in (jax, xs)
                ],
            )
        for shape in (None, (8, 4), (4, 4), (16, 4)):
            for rows in (8, 4, 2):
                compare(
                    f"process_local {target} {shape} {rows}",
                    *[
                        lambda lib=lib, shape=shape, rows=rows, where=where: (
                            lib.make_array_from_process_local_data(where, V[:rows], shape)
                        )
                        for lib in (jax, xs)
                    ],
                )
        for count in (None, 1, 0):
            compare(
                f"single arrays {target} {count}",
                *[lambda lib=lib, count=count: single_arrays(lib, count) for lib in (jax, xs)],
            )


def call(
    function: Callable[..., Any],
    make: Callable[[], Any],
    positional: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    return function(make(), *positional, **keywords)


def collectives() -> None:
    """The functions of JAX take arrays of this package; those of the package do the same."""
    tables: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("process_allgather", (), {"tiled": False}),
        ("process_allgather", (), {"tiled": True}),
        ("broadcast_one_to_all", (), {}),
        ("assert_equal", (), {}),
        *[
            (f"{ends[0]}_array_to_{ends[1]}_array", (MESH, spec), {})
            for spec in (P("x"), P())
            for ends in (("host_local", "global"), ("global", "host_local"))
        ],
    ]
    for function, positional, keywords in tables:
        for name in JAX:
            uses = [
                partial(call, getattr(module, function), made[name], positional, keywords)
                for module, made in (
                    (multihost_utils, JAX),
                    (multihost_utils, OURS),
                    (multihost, OURS),
                )
            ]
            compare(f"{function} of JAX: {name}", uses[0], uses[1])
            # They leave keys on this process's device, and give numbers the dtype of devices.
            if not (function.startswith("global") and name in ("key", "number", "list")):
                compare(f"{function}: {name}", uses[0], uses[2])


warnings.simplefilter("ignore")
for part in (puts, programs, makers, collectives):
    part()
assert not FAULTS, "\n".join(FAULTS)
assert COUNT > 200, COUNT
print("both agree", COUNT)
