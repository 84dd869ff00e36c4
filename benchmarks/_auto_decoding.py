"""Decoding step with cached keys and values, for automatic shardings.

Letters in shapes: B sequences, L cached positions, W width, H query heads, K key and value heads, D
features of a head, M hidden features, N layers, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._auto_program import BenchmarkProgram, Constrain, HandLayout, shape
from benchmarks._auto_transformers import Transformer, rms_norm, rotate
from xlashard import Mesh, P

_SIZES = Transformer(32, 4096, 32, 8, 14336, 128_256, 8192, 64)
"""Sizes of a decoder of 8 billion parameters, with the positions and sequences of the cache."""


def _arguments() -> tuple[Any, ...]:
    sizes = (_SIZES.layers, _SIZES.length, _SIZES.kv_heads, _SIZES.batch, _SIZES.head_size)
    cached = shape(*sizes, dtype=jnp.bfloat16)
    weights = jax.tree.map(lambda x: shape(*x.shape, dtype=jnp.bfloat16), _SIZES.parameters())
    return (
        {"keys": cached, "values": cached},
        weights,
        shape(_SIZES.batch, dtype=jnp.int32),
        shape(dtype=jnp.int32),
    )


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, position: jax.Array) -> jax.Array:
    """Return attention of queries [B, H, D] to the keys [L, K, B, D] of the positions so far."""
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    scores = jnp.einsum("bkgd,mkbd->bkgm", grouped, k, preferred_element_type=jnp.float32)
    seen = jnp.arange(k.shape[0]) <= position
    scores = jnp.where(seen, scores * q.shape[-1] ** -0.5, -1e30)
    shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgm,mkbd->bkgd", shares, v).reshape(q.shape)


def _build(constrain: Constrain) -> Any:
    def step(
        cache: Any, parameters: Any, tokens: jax.Array, position: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Return the cache with one more position, and the next tokens [B]."""

        # The cache is carried, not sliced by the scan, and its positions come first: an update in
        # place copies nothing else.
        def layer(carry: tuple[jax.Array, ...], one: tuple[Any, ...]) -> tuple[Any, None]:
            (x, keys, values), (weights, number) = carry, one
            normed = constrain("attention_input", rms_norm(x, weights["attention_norm"]))
            q, k, v = (
                jnp.einsum("bw,whd->bhd", normed, weights[name]) for name in ("wq", "wk", "wv")
            )
            q, k = (rotate(part[:, None], position[None])[:, 0] for part in (q, k))
            q, k, v = constrain("q", q), constrain("kv", k), constrain("kv", v)
            at = (number, position, 0, 0, 0)
            keys = jax.lax.dynamic_update_slice(keys, k.swapaxes(0, 1)[None, None], at)
            values = jax.lax.dynamic_update_slice(values, v.swapaxes(0, 1)[None, None], at)
            keys, values = constrain("cache", keys), constrain("cache", values)
            own_keys, own_values = (
                constrain("cached", jax.lax.dynamic_index_in_dim(whole, number, keepdims=False))
                for whole in (keys, values)
            )
            mixed = constrain("mixed", _attend(q, own_keys, own_values, position))
            out = jnp.einsum("bhd,hdw->bw", mixed, weights["wo"])
            x = constrain("stream", x + constrain("attention_output", out))
            normed = constrain("mlp_input", rms_norm(x, weights["mlp_norm"]))
            hidden = jax.nn.silu(normed @ weights["gate"]) * (normed @ weights["up"])
            out = constrain("mlp_output", constrain("hidden", hidden) @ weights["down"])
            return (constrain("stream", x + out), keys, values), None

        x = constrain("stream", jnp.take(parameters["embedding"], tokens, axis=0))
        layers = (parameters["layers"], jnp.arange(_SIZES.layers))
        (x, keys, values), _ = jax.lax.scan(layer, (x, cache["keys"], cache["values"]), layers)
        x = constrain("head_input", rms_norm(x, parameters["final_norm"]))
        logits = constrain("logits", x @ parameters["head"])
        return {"keys": keys, "values": values}, jnp.argmax(logits, axis=-1)

    return step


def _layouts(mesh: Mesh) -> Mapping[str, HandLayout]:
    del mesh
    return {
        "data": _layout(("data", "model"), None, None),
        "tensor, heads of the cache": _layout("data", "model", None),
        "tensor in two dimensions": _layout("data", "model", "data"),
        "tensor, positions of the cache": _positions_layout(),
    }


def _layout(rows: Any, heads: Any, width: Any) -> HandLayout:
    """Return a layout whose cache is sharded over sequences and heads.

    Args:
        rows: Mesh axes of the sequences.
        heads: Mesh axes of the heads, of the hidden features and of the vocabulary.
        width: Mesh axes of the width, over which products are summed.
    """
    # Weights that are sharded in both dimensions stay where they are, and activations move.
    stream = P(rows if width is None else None, width)
    cached = P(None, None, heads, rows, None)
    arguments = {
        **{name: P(None, width, heads, None) for name in ("wq", "wk", "wv")},
        "wo": P(None, heads, None, width),
        **{name: P(None, width, heads) for name in ("gate", "up")},
        "down": P(None, heads, width),
        "embedding": P(heads, width),
        "head": P(width, heads),
        **dict.fromkeys(("keys", "values"), cached),
    }
    inner = rows if width is None else None
    inside = {
        **dict.fromkeys(("stream", "attention_input", "mlp_input", "head_input"), stream),
        **dict.fromkeys(("attention_output", "mlp_output"), stream),
        **dict.fromkeys(("q", "kv", "mixed"), P(rows, heads, None)),
        **dict.fromkeys(("hidden", "logits"), P(inner, heads)),
        "cache": cached,
        "cached": P(None, heads, rows, None),
    }
    return HandLayout(arguments, inside)


def _positions_layout() -> HandLayout:
    """Return a layout whose cache is sharded over heads and positions."""
    tensor = _layout(None, "model", None)
    cached = P("data", "model", None, None)
    arguments = dict.fromkeys(("keys", "values"), P(None, *cached))
    inside = {"cache": P(None, *cached), "cached": cached}
    return HandLayout({**tensor.arguments, **arguments}, {**tensor.inside, **inside})


DECODE = BenchmarkProgram(
    "decoding step of 8B, 64 sequences of 8,192",
    _build,
    _arguments,
    _layouts,
    {
        "v5e-16": {"data": 4, "model": 4},
        "v6e-16": {"data": 4, "model": 4},
        "v5p-32": {"data": 4, "model": 4},
    },
)
