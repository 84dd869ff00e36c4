"""`xlashard.Array` as an annotation: its types, and the errors of the type checker."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, assert_type

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

import xlashard
from xlashard import Array, NamedSharding, P, Shard, Sharding

MESH = xlashard.Mesh(np.array(jax.devices()), ("data",))
ROWS = NamedSharding(MESH, P("data"))
NUMBERS = np.arange(32, dtype=np.float32).reshape(8, 4)


def scaled(x: Array, by: float = 2.0) -> Array:
    return x * by


def of_jax(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


def of_anything(x: ArrayLike) -> jax.Array:
    return jnp.asarray(x)


def properties(x: Array) -> None:
    assert_type(x.shape, tuple[int, ...])
    assert_type(x.dtype, np.dtype[Any])
    assert_type(x.ndim, int)
    assert_type(x.size, int)
    assert_type(x.nbytes, int)
    assert_type(x.weak_type, bool)
    assert_type(x.committed, bool)
    assert_type(x.sharding, Sharding)
    assert_type(x.T, Array)
    assert_type(x.mT, Array)
    assert_type(x.real, Array)
    assert_type(x.imag, Array)
    assert_type(x.is_fully_replicated, bool)
    assert_type(len(x.devices()), int)
    assert_type(x.addressable_shards, list[Shard])
    assert_type(x.addressable_shards[0].index, tuple[slice, ...])
    assert_type(x.addressable_shards[0].replica_id, int)
    assert_type(x.addressable_data(0), Array)
    assert_type(x.block_until_ready(), Array)
    assert_type(x.to_jax(), jax.Array)
    assert_type(Array.from_jax(x.to_jax()), Array)
    assert_type(x.is_deleted(), bool)


def operators(x: Array, n: np.ndarray, y: jax.Array) -> None:
    assert_type(-x, Array)
    assert_type(abs(x), Array)
    assert_type(x + 1, Array)
    assert_type(x + x, Array)
    assert_type(x + n, Array)
    assert_type(x + y, Array)
    assert_type(2.0 - x, Array)
    assert_type(x @ x.T, Array)
    assert_type(x**2, Array)
    assert_type(x // 2, Array)
    assert_type(divmod(x, 2), tuple[Array, Array])
    assert_type(x == 3, Array)
    assert_type(x < x, Array)
    assert_type((x > 1) & (x < 9), Array)
    assert_type(round(x, 2), Array)
    assert_type(3.0 in x.ravel(), bool)
    x += 1
    assert_type(x, Array)
    assert_type(float(x[0, 0]), float)
    assert_type(int(x[0, 0]), int)
    assert_type(bool(x[0, 0] > 0), bool)
    assert_type(len(x), int)


def refused_operators(x: Array) -> None:
    x + "text"  # pyright: ignore[reportOperatorIssue, reportUnusedExpression]
    x @ [1, 2]  # pyright: ignore[reportOperatorIssue, reportUnusedExpression]
    print({x})  # pyright: ignore[reportUnhashable]
    x.shape = (4, 8)  # pyright: ignore[reportAttributeAccessIssue]


def indexing(x: Array) -> None:
    assert_type(x[0], Array)
    assert_type(x[1:, None, ..., ::2], Array)
    assert_type(x[x > 0], Array)
    assert_type([row for row in x], list[Array])
    assert_type(iter(x), Iterator[Array])
    assert_type(reversed(x), Iterator[Array])
    first, *rest = x
    assert_type(first, Array)
    assert_type(rest, list[Array])
    assert_type(x.at[0].set(1), Array)
    assert_type(x.at[:, 1].add(x[:, 1], mode="drop"), Array)
    assert_type(x.at[0].get(mode="fill", fill_value=0), Array)
    assert_type(x.at[0].apply(jnp.sin), Array)
    assert_type(x.at[0].min(np.float32(3)), Array)


def refused_updates(x: Array) -> None:
    x.at[0].sett(1)  # pyright: ignore[reportAttributeAccessIssue]
    x.at[0].set()  # pyright: ignore[reportCallIssue]
    x.at[0].add(1, fill=0)  # pyright: ignore[reportCallIssue]


def methods(x: Array, mask: Array) -> None:
    assert_type(x.sum(axis=0, keepdims=True), Array)
    assert_type(x.sum((0, 1), dtype=jnp.float32, where=mask), Array)
    assert_type(x.mean(), Array)
    assert_type(x.std(ddof=1), Array)
    assert_type(x.max(axis=-1, initial=0), Array)
    assert_type(x.argmax(axis=1), Array)
    assert_type(x.reshape(4, -1), Array)
    assert_type(x.reshape((4, -1), order="F"), Array)
    assert_type(x.transpose(1, 0).swapaxes(0, 1).ravel().squeeze(), Array)
    assert_type(x.astype(jnp.bfloat16), Array)
    assert_type(x.astype("int32"), Array)
    assert_type(x.nonzero(size=3), tuple[Array, ...])
    assert_type(x.clip(0, 1), Array)
    assert_type(x.take(np.arange(2), axis=0), Array)
    assert_type(x.dot(x.T), Array)
    assert_type(x.item(0), Any)
    assert_type(x.tobytes(), bytes)


def refused_methods(x: Array) -> None:
    x.sum(axs=0)  # pyright: ignore[reportCallIssue]
    x.sum(axis="0")  # pyright: ignore[reportArgumentType]
    x.reshape("4")  # pyright: ignore[reportArgumentType]
    x.astype()  # pyright: ignore[reportCallIssue]
    x.swapaxes(0)  # pyright: ignore[reportCallIssue]
    x.clip(0, 1, 2)  # pyright: ignore[reportCallIssue]
    x.summ()  # pyright: ignore[reportAttributeAccessIssue]
    x.to_jax(1)  # pyright: ignore[reportCallIssue]


def where_jax_wants_its_own(x: Array, xs: Sequence[Array]) -> None:
    assert_type(of_jax(x), jax.Array)
    assert_type(of_anything(x), jax.Array)
    assert_type(jnp.where(x > 3, x, 0), jax.Array)
    jnp.concatenate([x, x])
    jnp.stack(list(xs))
    np.asarray(x)
    jax.tree.map(scaled, {"x": x})
    any_array: jax.Array = x
    assert isinstance(any_array, Array)
    assert_type(any_array, Array)
    scaled(of_jax(x))  # pyright: ignore[reportArgumentType]
    scaled(NUMBERS)  # pyright: ignore[reportArgumentType]


class State(NamedTuple):
    weights: Array
    step: Array


def placing(tree: dict[str, Any], shardings: dict[str, Any], state: State) -> None:
    assert_type(xlashard.device_put(NUMBERS, ROWS), Array)
    assert_type(xlashard.device_put(1.0), Array)
    assert_type(xlashard.device_put(jnp.ones(8), jax.devices()[0]), Array)
    assert_type(xlashard.device_put({"w": NUMBERS}, ROWS), dict[str, Array])
    assert_type(xlashard.device_put([NUMBERS, NUMBERS]), list[Array])
    assert_type(xlashard.device_put((NUMBERS, 1.0)), tuple[Array, ...])
    assert_type(xlashard.device_put(state, ROWS, donate=True), State)
    print(xlashard.device_put({"layer": {"w": NUMBERS}}, ROWS)["layer"]["w"].sharding)
    print(xlashard.device_put(tree, shardings)["w"].sharding)
    assert_type(xlashard.make_array_from_callback((8, 4), ROWS, lambda i: NUMBERS[i]), Array)
    devices = jax.local_devices()
    assert_type(xlashard.device_put_sharded([NUMBERS, NUMBERS], devices), Array)
    assert_type(xlashard.device_put_sharded([{"w": NUMBERS}], devices), dict[str, Array])
    assert_type(xlashard.device_put_replicated(1.0, devices), Array)
    assert_type(xlashard.device_put_replicated({"w": NUMBERS}, devices), dict[str, Array])
    print(xlashard.device_put_replicated(state, devices).weights.sharding)
    xlashard.device_put(NUMBERS, places=ROWS)  # pyright: ignore[reportCallIssue]


def shardings(named: NamedSharding, x: Array) -> None:
    assert_type(named.spec, xlashard.PartitionSpec)
    assert_type(named.shard_shape((8, 4)), tuple[int, ...])
    assert_type(x.sharding.is_fully_replicated, bool)
    as_jax: jax.sharding.NamedSharding = named
    if isinstance(x.sharding, NamedSharding):
        assert_type(x.sharding.spec, xlashard.PartitionSpec)
    jax.device_put(x, as_jax)


def run() -> None:
    """Run everything except for type errors."""
    x = xlashard.device_put(NUMBERS, ROWS)
    properties(x)
    operators(x, NUMBERS, x.to_jax())
    indexing(x)
    methods(x, x > 3)
    state = State(x, x[0])
    where = NamedSharding(MESH, P())
    assert xlashard.device_put(State(x, x), where).weights.sharding == where
    shardings(ROWS, x)
    assert scaled(x).shape == state.weights.shape
