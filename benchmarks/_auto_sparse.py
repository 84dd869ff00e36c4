"""Programs with lookups, sums and searches by index, for automatic shardings."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._auto_program import (
    BenchmarkProgram,
    Constrain,
    HandLayout,
    shape,
    training_state,
    training_step,
)
from xlashard import Mesh, P

BOTH = ("data", "model")
_MESHES = {
    "v5e-64": {"data": 16, "model": 4},
    "v6e-64": {"data": 16, "model": 4},
    "v5p-128": {"data": 16, "model": 4},
}

_TABLES, _ROWS, _FEATURES, _DENSE = 64, 2**19, 128, 13
_CLICKS = 65_536
_BOTTOM = (_DENSE, 512, 256, _FEATURES)
_TOP = (_FEATURES + (_TABLES + 1) * _TABLES // 2, 1024, 1024, 512, 1)


def _mlp_shapes(sizes: tuple[int, ...]) -> list[Any]:
    return [{"weight": shape(*pair), "bias": shape(pair[1])} for pair in pairwise(sizes)]


def _mlp(x: jax.Array, layers: Any) -> jax.Array:
    for number, layer in enumerate(layers):
        x = x @ layer["weight"].astype(x.dtype) + layer["bias"].astype(x.dtype)
        x = jax.nn.relu(x) if number < len(layers) - 1 else x
    return x


def _recommender_arguments() -> tuple[Any, ...]:
    parameters = {
        "tables": shape(_TABLES, _ROWS, _FEATURES),
        "bottom": _mlp_shapes(_BOTTOM),
        "top": _mlp_shapes(_TOP),
    }
    batch = {
        "numbers": shape(_CLICKS, _DENSE),
        "categories": shape(_CLICKS, _TABLES, dtype=jnp.int32),
        "clicked": shape(_CLICKS),
    }
    return training_state(parameters), batch


def _build_recommender(constrain: Constrain) -> Any:
    def loss(parameters: Any, batch: Any) -> jax.Array:
        rows = constrain("rows", batch["categories"])
        take = jax.vmap(lambda table, rows: jnp.take(table, rows, axis=0), (0, 1), 1)
        looked_up = constrain("looked_up", take(parameters["tables"], rows)).astype(jnp.bfloat16)
        dense = _mlp(batch["numbers"].astype(jnp.bfloat16), parameters["bottom"])
        looked_up = constrain("features", looked_up)
        features = jnp.concatenate([dense[:, None], looked_up], axis=1)
        products = jnp.einsum("bsf,btf->bst", features, features)
        above = np.triu_indices(_TABLES + 1, 1)
        crossed = constrain("crossed", products[:, above[0], above[1]])
        out = _mlp(jnp.concatenate([dense, crossed], axis=1), parameters["top"])[:, 0]
        losses = optax.sigmoid_binary_cross_entropy(out.astype(jnp.float32), batch["clicked"])
        return losses.mean()

    return training_step(loss)


def _recommender_layouts(mesh: Mesh) -> Mapping[str, HandLayout]:
    del mesh
    rows = P(BOTH, None)
    batch = {"numbers": rows, "categories": rows, "clicked": P(BOTH)}
    inside = {"features": P(BOTH, None, None), "crossed": rows}

    def layout(tables: P, looked_up: P, numbers: P) -> HandLayout:
        arguments = {**batch, "tables": tables}
        return HandLayout(arguments, {**inside, "looked_up": looked_up, "rows": numbers})

    return {
        "data": HandLayout(batch, {**inside, "looked_up": P(BOTH, None, None)}),
        "tables": layout(P(BOTH, None, None), P(None, BOTH, None), P(None, BOTH)),
        "rows": layout(P(None, BOTH, None), P(BOTH, None, None), P(None, None)),
        "columns": layout(P(None, None, BOTH), P(None, None, BOTH), P(None, None)),
    }


RECOMMENDER = BenchmarkProgram(
    "recommender with 64 tables of 524,288 rows",
    _build_recommender,
    _recommender_arguments,
    _recommender_layouts,
    _MESHES,
)

_NODES, _EDGES, _INPUT, _WIDTH, _LAYERS, _CLASSES = 262_144, 4_194_304, 128, 512, 4, 64


def _graph_arguments() -> tuple[Any, ...]:
    n, w = _LAYERS, _WIDTH
    layers = {"message": shape(n, 2 * w, w), "update": shape(n, 2 * w, w), "scale": shape(n, w)}
    parameters = {"encoder": shape(_INPUT, w), "layers": layers, "decoder": shape(w, _CLASSES)}
    batch = {
        "nodes": shape(_NODES, _INPUT),
        "senders": shape(_EDGES, dtype=jnp.int32),
        "receivers": shape(_EDGES, dtype=jnp.int32),
        "labels": shape(_NODES, dtype=jnp.int32),
    }
    return training_state(parameters), batch


def _build_graph(constrain: Constrain) -> Any:
    def loss(parameters: Any, batch: Any) -> jax.Array:
        senders, receivers = batch["senders"], batch["receivers"]

        def layer(x: jax.Array, stored: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
            weights = {name: w.astype(jnp.bfloat16) for name, w in stored.items()}
            sources = constrain("sources", x)
            pairs = [
                constrain("ends", jnp.take(sources, at, axis=0)) for at in (senders, receivers)
            ]
            messages = jax.nn.relu(jnp.concatenate(pairs, axis=-1) @ weights["message"])
            messages = constrain("messages", messages)
            sums = constrain("sums", jax.ops.segment_sum(messages, receivers, _NODES))
            sums = constrain("nodes", sums)
            new = jnp.concatenate([x, sums], axis=-1) @ weights["update"]
            return constrain("nodes", x + jax.nn.relu(new) * weights["scale"]), None

        x = batch["nodes"].astype(jnp.bfloat16) @ parameters["encoder"].astype(jnp.bfloat16)
        x, _ = jax.lax.scan(jax.checkpoint(layer), constrain("nodes", x), parameters["layers"])
        logits = (x @ parameters["decoder"].astype(x.dtype)).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return losses.mean()

    return training_step(loss)


def _graph_layouts(mesh: Mesh) -> Mapping[str, HandLayout]:
    del mesh

    def layout(nodes: Any, edges: Any, width: Any) -> HandLayout:
        """Return a layout with mesh axes of nodes, of edges and of the features in between."""
        arguments = {
            "nodes": P(nodes, None),
            "labels": P(nodes),
            **dict.fromkeys(("senders", "receivers"), P(edges)),
            **dict.fromkeys(("message", "update"), P(None, None, width)),
            "encoder": P(None, width),
            "scale": P(None, width),
            "decoder": P(width, None),
        }
        inside = {
            "nodes": P(nodes, width),
            **dict.fromkeys(("sources", "sums"), P(None, width)),
            **dict.fromkeys(("ends", "messages"), P(edges, width)),
        }
        return HandLayout(arguments, inside)

    return {
        "edges": layout(None, BOTH, None),
        "nodes + edges": layout(BOTH, BOTH, None),
        "edges + features": layout(None, "data", "model"),
        "nodes + edges + features": layout("data", "data", "model"),
        "features": layout(None, None, BOTH),
    }


GRAPH = BenchmarkProgram(
    "graph of 262,144 nodes and 4,194,304 edges",
    _build_graph,
    _graph_arguments,
    _graph_layouts,
    _MESHES,
)

_SMALL_MESHES = {
    "v5e-16": {"data": 4, "model": 4},
    "v6e-8": {"data": 4, "model": 2},
    "v5p-32": {"data": 4, "model": 4},
}
_QUERIES, _VECTORS, _SIZE, _BEST = 2048, 1_048_576, 256, 64


def _neighbor_arguments() -> tuple[Any, ...]:
    parameters = {
        "database": shape(_VECTORS, _SIZE, dtype=jnp.bfloat16),
        "into": shape(_SIZE, 4 * _SIZE, dtype=jnp.bfloat16),
        "out": shape(4 * _SIZE, _SIZE, dtype=jnp.bfloat16),
    }
    queries = shape(_QUERIES, _SIZE, dtype=jnp.bfloat16)
    return {"hits": shape(_VECTORS, dtype=jnp.int32)}, parameters, {"queries": queries}


def _build_neighbors(constrain: Constrain) -> Any:
    def step(state: Any, parameters: Any, batch: Any) -> tuple[Any, tuple[jax.Array, ...]]:
        """Return how often each vector was among the best, and the best of each query."""
        embedded = jax.nn.gelu(batch["queries"] @ parameters["into"]) @ parameters["out"]
        embedded = constrain("embedded", embedded)
        scores = constrain("scores", (embedded @ parameters["database"].T).astype(jnp.float32))
        best, places = jax.lax.top_k(scores, _BEST)
        hits = state["hits"].at[places.ravel()].add(1)
        return {"hits": hits}, (best, places)

    return step


def _neighbor_layouts(mesh: Mesh) -> Mapping[str, HandLayout]:
    del mesh

    def layout(queries: Any, vectors: Any, hits: Any = None) -> HandLayout:
        arguments = {"database": P(vectors, None), "queries": P(queries, None), "hits": P(hits)}
        return HandLayout(arguments, {"embedded": P(queries, None), "scores": P(queries, vectors)})

    return {
        "vectors": layout(None, BOTH),
        "vectors and hits": layout(None, BOTH, BOTH),
        "queries": layout(BOTH, None),
        "queries over data, vectors over model": layout("data", "model"),
        "queries over model, vectors over data": layout("model", "data"),
    }


NEIGHBORS = BenchmarkProgram(
    "best 64 of 1,048,576 vectors for 2,048 queries",
    _build_neighbors,
    _neighbor_arguments,
    _neighbor_layouts,
    _SMALL_MESHES,
)

_USERS, _ITEMS, _RANK = 65_536, 16_384, 64
_RATINGS = {"users": 64, "items": 256}
"""Most ratings of a user and of an item; others are zero."""


def _alternating_arguments() -> tuple[Any, ...]:
    counts = {"users": _USERS, "items": _ITEMS}
    factors = {name: shape(count, _RANK) for name, count in counts.items()}
    batch: dict[str, Any] = {}
    for name, count in counts.items():
        batch[f"rated_{name}"] = shape(count, _RATINGS[name], dtype=jnp.int32)
        batch[f"ratings_{name}"] = shape(count, _RATINGS[name])
    return factors, batch


def _build_alternating(constrain: Constrain) -> Any:
    def solve(factors: jax.Array, batch: Any, name: str) -> jax.Array:
        """Return the factors of one side that fit its ratings best, given those of the other."""
        ratings = batch[f"ratings_{name}"]
        table = constrain("table", factors)
        rated = jnp.take(table, batch[f"rated_{name}"], axis=0)
        rated = constrain(f"rated_{name}", rated * (ratings != 0)[..., None])
        matrices = jnp.einsum("unr,uns->urs", rated, rated) + 0.1 * jnp.eye(_RANK)
        right = jnp.einsum("unr,un->ur", rated, ratings)[..., None]
        matrices = constrain(f"matrices_{name}", matrices)
        return constrain(name, jnp.linalg.solve(matrices, right)[..., 0])

    def step(factors: Any, batch: Any) -> tuple[Any, jax.Array]:
        users = solve(factors["items"], batch, "users")
        items = solve(users, batch, "items")
        rated = jnp.take(constrain("table", items), batch["rated_users"], axis=0)
        ratings = batch["ratings_users"]
        errors = jnp.where(ratings != 0, jnp.einsum("unr,ur->un", rated, users) - ratings, 0)
        return {"users": users, "items": items}, jnp.square(errors).sum()

    return step


def _alternating_layouts(mesh: Mesh) -> Mapping[str, HandLayout]:
    del mesh

    def layout(users: Any, items: Any, width: Any = None) -> HandLayout:
        rows = {"users": users, "items": items}
        arguments = {name: P(axes, width) for name, axes in rows.items()}
        inside: dict[str, P] = {"table": P(None, width)}
        for name, axes in rows.items():
            arguments |= {f"{kind}_{name}": P(axes, None) for kind in ("rated", "ratings")}
            inside |= {name: P(axes, None), f"matrices_{name}": P(axes, None, None)}
            inside[f"rated_{name}"] = P(axes, None, width)
        return HandLayout(arguments, inside)

    return {
        "rows": layout(BOTH, BOTH),
        "rows over data": layout("data", "data"),
        "users": layout(BOTH, None),
        "users over both, items over model": layout(BOTH, "model"),
        "rows and factors": layout("data", "data", "model"),
    }


ALTERNATING = BenchmarkProgram(
    "alternating least squares of 65,536 users and 16,384 items",
    _build_alternating,
    _alternating_arguments,
    _alternating_layouts,
    _SMALL_MESHES,
)
