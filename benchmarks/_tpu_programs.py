"""Twelve typical training and serving programs, for a mesh of any size.

Each provides a function, its arguments as shapes with shardings on the axes `data` and `model`,
and the other options of `pjit` or `jax.jit`. Sizes grow with the mesh, so that the size of a shard
stays constant and small.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from xlashard import Mesh, NamedSharding, P

WIDTH = 256
"""Features per device."""


@dataclass(frozen=True)
class TpuProgram:
    """Function with its arguments.

    Attributes:
        fun: The function to compile.
        arguments: Shapes with shardings.
        options: Further arguments of `pjit` and of `jax.jit`.
    """

    fun: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


class Shapes:
    """Factory of arguments on a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.rows = 8 * mesh.shape["data"]
        self.columns = WIDTH * mesh.shape["model"]

    def sharding(self, *spec: Any) -> NamedSharding:
        """Return a sharding over mesh axes."""
        return NamedSharding(self.mesh, P(*spec))

    def of(self, shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.bfloat16) -> Any:
        """Return a shape with a sharding."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding(*spec))

    def weights(self) -> dict[str, Any]:
        """Return the weights of two layers, inner features sharded over `model`."""
        return {
            "up": self.of((WIDTH, self.columns), None, "model"),
            "down": self.of((self.columns, WIDTH), "model", None),
        }

    def batch(self, *more: int) -> Any:
        """Return a batch sharded over `data`."""
        return self.of((self.rows, *more, WIDTH), "data")


def matmul(make: Shapes) -> TpuProgram:
    """Row-sharded times column-sharded, without communication."""
    return TpuProgram(
        lambda x, w: jax.nn.gelu(x @ w),
        (make.batch(), make.of((WIDTH, make.columns), None, "model")),
    )


def contraction(make: Shapes) -> TpuProgram:
    """Contraction over a sharded dimension, with a replicated result."""
    x = make.of((make.rows, make.columns), "data", "model")
    w = make.of((make.columns, WIDTH), "model", None)
    return TpuProgram(jnp.matmul, (x, w), {"out_shardings": make.sharding("data", None)})


def mlp(weights: Any, x: Any) -> Any:
    return jax.nn.relu(x @ weights["up"]) @ weights["down"]


def mlp_gradients(make: Shapes) -> TpuProgram:
    """Gradients of two layers, summed over `data`."""

    def loss(weights: Any, x: Any) -> Any:
        return jnp.square(mlp(weights, x).astype(jnp.float32)).mean()

    return TpuProgram(jax.value_and_grad(loss), (make.weights(), make.batch()))


def attention(make: Shapes) -> TpuProgram:
    """Causal attention, heads sharded over `model`."""
    heads, length = 2 * make.mesh.shape["model"], 128

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / 64**0.5
        mask = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1).astype(v.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    one = make.of((make.rows, length, heads, 64), "data", None, "model", None)
    return TpuProgram(attend, (one, one, one))


def remat_scan(make: Shapes) -> TpuProgram:
    """Gradients through a scan over rematerialised layers."""

    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        return x + mlp(weights, x), None

    def loss(layers: Any, x: Any) -> Any:
        out, _ = lax.scan(jax.checkpoint(layer), x, layers)
        return out.astype(jnp.float32).sum()

    layers = {
        "up": make.of((4, WIDTH, make.columns), None, None, "model"),
        "down": make.of((4, make.columns, WIDTH), None, "model", None),
    }
    return TpuProgram(jax.grad(loss), (layers, make.batch()))


def embedding_loss(make: Shapes) -> TpuProgram:
    """Embedding table sharded by vocabulary: lookup, product, and gradient of the loss."""
    words = 128 * make.mesh.shape["model"]

    def loss(table: Any, tokens: Any) -> Any:
        hidden = jnp.take(table, tokens[:, :-1], axis=0)
        scores = jnp.einsum("bld,vd->blv", hidden, table).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()

    table = make.of((words, WIDTH), "model", None)
    tokens = make.of((make.rows, 33), "data", dtype=jnp.int32)
    return TpuProgram(jax.value_and_grad(loss), (table, tokens))


def convolution(make: Shapes) -> TpuProgram:
    """Images sharded over `data`, filters over `model`, and max pooling."""

    def convolve(images: Any, filters: Any) -> Any:
        layout = ("NHWC", "HWIO", "NHWC")
        out = lax.conv_general_dilated(images, filters, (1, 1), "SAME", dimension_numbers=layout)
        return lax.reduce_window(out, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    images = make.of((make.rows, 16, 16, 32), "data")
    filters = make.of((3, 3, 32, 64 * make.mesh.shape["model"]), None, None, None, "model")
    return TpuProgram(convolve, (images, filters))


def ordering(make: Shapes) -> TpuProgram:
    """Sort of rows, and top k of each row."""

    def order(x: Any) -> Any:
        return jnp.sort(x, axis=-1), lax.top_k(x, 4), jnp.argmax(x, axis=-1)

    return TpuProgram(order, (make.of((make.rows, 512), "data", dtype=jnp.float32),))


def indexing(make: Shapes) -> TpuProgram:
    """Scatter-add to rows, and gather of rows."""

    def update(table: Any, rows: Any, values: Any) -> Any:
        added = table.at[rows].add(values)
        return added, jnp.take_along_axis(added, rows[:, None], axis=1)

    table = make.of((512, make.columns), None, "model", dtype=jnp.float32)
    rows = make.of((512,), dtype=jnp.int32)
    values = make.of((512, make.columns), None, "model", dtype=jnp.float32)
    return TpuProgram(update, (table, rows, values))


def collectives(make: Shapes) -> TpuProgram:
    """Each kind of collective, hand-written in a `shard_map`."""
    count = make.mesh.shape["model"]
    turn = [(i, (i + 1) % count) for i in range(count)]

    def send(x: Any) -> Any:
        summed = lax.psum(x, "data")
        gathered = lax.all_gather(x, "model", axis=1, tiled=True)
        scattered = lax.psum_scatter(gathered, "model", scatter_dimension=1, tiled=True)
        turned = lax.ppermute(scattered, "model", turn)
        return turned + lax.all_to_all(summed, "model", 1, 1, tiled=True)

    spec = P("data", "model")
    mapped = jax.shard_map(send, mesh=make.mesh, in_specs=spec, out_specs=spec)
    return TpuProgram(mapped, (make.of((make.rows, make.columns), *spec),))


def adam_step(make: Shapes) -> TpuProgram:
    """Adam step on a donated state."""
    optimizer = optax.adamw(1e-3)
    weights = make.weights()
    # A moment is sharded as its weight; leaves without a weight are replicated.
    moments = optax.tree_map_params(
        optimizer,
        lambda moment, weight: make.of(moment.shape, *weight.sharding.spec, dtype=moment.dtype),
        jax.eval_shape(optimizer.init, weights),
        weights,
        transform_non_params=lambda other: make.of(other.shape, dtype=other.dtype),
    )

    def step(state: Any, x: Any) -> Any:
        weights, moments = state

        def loss(weights: Any) -> Any:
            return jnp.square(mlp(weights, x).astype(jnp.float32)).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    return TpuProgram(step, ((weights, moments), make.batch()), {"donate_argnums": 0})


def control_flow(make: Shapes) -> TpuProgram:
    """Random numbers in a while loop with a data-dependent end, with a branch."""

    def walk(seed: Any, x: Any) -> Any:
        def more(carried: Any) -> Any:
            number, _, x = carried
            return (number < 20) & (x.mean() < 1e6)

        def body(carried: Any) -> Any:
            number, key, x = carried
            key, own = jax.random.split(key)
            kept = jax.random.bernoulli(own, 0.9, x.shape)
            grown = lax.cond(number % 2 == 0, lambda x: x * 2, jnp.sin, jnp.where(kept, x, 0))
            return number + 1, key, grown

        return lax.while_loop(more, body, (0, jax.random.key(seed), x))[2]

    x = make.of((make.rows, WIDTH), "data", dtype=jnp.float32)
    seed = make.of((), dtype=jnp.uint32)
    return TpuProgram(walk, (seed, x))


PROGRAMS: Mapping[str, Callable[[Shapes], TpuProgram]] = {
    made.__name__.replace("_", " "): made
    for made in (
        *(matmul, contraction, mlp_gradients, attention, remat_scan, embedding_loss),
        *(convolution, ordering, indexing, collectives, adam_step, control_flow),
    )
}
"""Programs by name."""


def program(name: str, mesh: Mesh) -> TpuProgram:
    """Return a program for a mesh with the axes `data` and `model`."""
    return PROGRAMS[name](Shapes(mesh))
