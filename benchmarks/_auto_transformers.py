"""Decoder for automatic shardings: dense, with grouped queries, with experts.

Letters in shapes: B batch, L length, W width, H query heads, K key and value heads, G = H / K, D
features of a head, M hidden features, N layers, V vocabulary, E experts, C places of an expert, R
rank of an adapter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks._auto_program import Constrain, shape, training_state, training_step

_EPSILON = 1e-5


@dataclass(frozen=True)
class Transformer:
    """Sizes of a decoder.

    Attributes:
        layers: N.
        width: W.
        heads: H.
        kv_heads: K.
        mlp: M.
        vocab: V.
        length: L.
        batch: B.
        head_size: D.
        experts: E; 0 for a dense model.
        active: Experts per token.
        query_rows: Queries of a sequence that attend at once; 0 for all.
        rank: Rank of adapters of queries and values; 0 to train all parameters.
        keeps_products: Whether products are kept for the backward pass, not computed again.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    length: int
    batch: int
    head_size: int = 128
    experts: int = 0
    active: int = 2
    query_rows: int = 0
    rank: int = 0
    keeps_products: bool = False

    def parameters(self) -> dict[str, Any]:
        """Return the shapes of the parameters, the layers' stacked."""
        n, w, d = self.layers, self.width, self.head_size
        several = (self.experts,) if self.experts else ()
        layers = {
            "attention_norm": shape(n, w),
            "wq": shape(n, w, self.heads, d),
            "wk": shape(n, w, self.kv_heads, d),
            "wv": shape(n, w, self.kv_heads, d),
            "wo": shape(n, self.heads, d, w),
            "mlp_norm": shape(n, w),
            "gate": shape(n, *several, w, self.mlp),
            "up": shape(n, *several, w, self.mlp),
            "down": shape(n, *several, self.mlp, w),
        }
        if several:
            layers["router"] = shape(n, w, self.experts)
        return {
            "embedding": shape(self.vocab, w),
            "layers": layers,
            "final_norm": shape(w),
            "head": shape(w, self.vocab),
        }

    def arguments(self) -> tuple[Any, ...]:
        """Return the shapes of state and batch."""
        tokens = shape(self.batch, self.length, dtype=jnp.int32)
        batch = {"tokens": tokens, "targets": tokens}
        if not self.rank:
            return training_state(self.parameters()), batch
        frozen = jax.tree.map(lambda x: shape(*x.shape, dtype=jnp.bfloat16), self.parameters())
        return training_state(self.adapters()), frozen, batch

    def adapters(self) -> dict[str, Any]:
        """Return the shapes of the adapters."""
        n, heads = self.layers, {"wq": self.heads, "wv": self.kv_heads}
        into = {f"{name}_in": shape(n, self.width, self.rank) for name in heads}
        out = {f"{name}_out": shape(n, self.rank, h, self.head_size) for name, h in heads.items()}
        return {"layers": into | out}


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Divide by the root mean square over the features, in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + _EPSILON)
    return (wide * scale).astype(x.dtype) * weight.astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotate the features of each head [B, L, H, D] by the positions [L]."""
    half = x.shape[-1] // 2
    speeds = 500_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (positions.astype(jnp.float32)[:, None] * speeds)[:, None, :]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool = True) -> jax.Array:
    """Return attention [B, L, H, D] of queries [B, L, H, D], keys and values [B, L, K, D]."""
    batch, length, heads, size = q.shape
    q = q.reshape(batch, length, k.shape[2], -1, size)
    scores = jnp.einsum("blkgd,bmkd->bkglm", q, k, preferred_element_type=jnp.float32)
    scores = scores * size**-0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
    shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkglm,bmkd->blkgd", shares, v).reshape(batch, length, heads, size)


def _project(
    x: jax.Array, weights: Mapping[str, jax.Array], name: str, constrain: Constrain
) -> jax.Array:
    """Return heads [B, L, H, D], with the change of an adapter if the weights have one."""
    out = jnp.einsum("blw,whd->blhd", x, weights[name])
    if f"{name}_in" in weights:
        low = constrain("adapted", jnp.einsum("blw,wr->blr", x, weights[f"{name}_in"]))
        out = out + jnp.einsum("blr,rhd->blhd", low, weights[f"{name}_out"])
    return constrain("projected", out)


def _attention(
    x: jax.Array, weights: Mapping[str, jax.Array], sizes: Transformer, constrain: Constrain
) -> jax.Array:
    normed = constrain("attention_input", rms_norm(x, weights["attention_norm"]))
    positions = jnp.arange(x.shape[1])
    q, k, v = (_project(normed, weights, name, constrain) for name in ("wq", "wk", "wv"))
    q, k = constrain("q", rotate(q, positions)), constrain("k", rotate(k, positions))
    v = constrain("v", v)
    if sizes.query_rows:
        mixed = _attend_in_parts(q, k, v, sizes.query_rows, constrain)
    else:
        mixed = attend(q, k, v)
    mixed = constrain("mixed", constrain("attended", mixed))
    return constrain("attention_output", jnp.einsum("blhd,hdw->blw", mixed, weights["wo"]))


def _mlp(x: jax.Array, weights: Mapping[str, jax.Array], constrain: Constrain) -> jax.Array:
    normed = constrain("mlp_input", rms_norm(x, weights["mlp_norm"]))
    gate, up = normed @ weights["gate"], normed @ weights["up"]
    hidden = constrain("hidden", jax.nn.silu(gate) * up)
    return constrain("mlp_output", hidden @ weights["down"])


def _experts(
    x: jax.Array, weights: Mapping[str, jax.Array], sizes: Transformer, constrain: Constrain
) -> jax.Array:
    """Send the tokens of a sequence to places of their experts by products with masks."""
    normed = constrain("mlp_input", rms_norm(x, weights["mlp_norm"]))
    scores = jnp.einsum("blw,we->ble", normed, weights["router"]).astype(jnp.float32)
    best, chosen = jax.lax.top_k(jax.nn.softmax(scores), sizes.active)
    capacity = int(1.25 * sizes.active * x.shape[1] / sizes.experts)
    picks = jax.nn.one_hot(chosen, sizes.experts, dtype=jnp.float32)
    flat = picks.reshape(x.shape[0], -1, sizes.experts)
    places = ((jnp.cumsum(flat, axis=1) - 1) * flat).reshape(picks.shape).sum(-1)
    slots = jax.nn.one_hot(places.astype(jnp.int32), capacity, dtype=jnp.float32)
    combine = jnp.einsum("bla,blae,blac->blec", best, picks, slots)
    combine = constrain("combine", combine.astype(x.dtype))
    dispatch = constrain("dispatch", (combine > 0).astype(x.dtype))
    inputs = constrain("dispatched", jnp.einsum("blec,blw->becw", dispatch, normed))
    inputs = constrain("expert_inputs", inputs)
    gate = jnp.einsum("becw,ewm->becm", inputs, weights["gate"])
    up = jnp.einsum("becw,ewm->becm", inputs, weights["up"])
    hidden = constrain("hidden", jax.nn.silu(gate) * up)
    outputs = constrain("expert_outputs", jnp.einsum("becm,emw->becw", hidden, weights["down"]))
    outputs = constrain("collected", outputs)
    return constrain("mlp_output", jnp.einsum("blec,becw->blw", combine, outputs))


def _attend_in_parts(
    q: jax.Array, k: jax.Array, v: jax.Array, rows: int, constrain: Constrain
) -> jax.Array:
    """Return causal attention, some queries after the others.

    A part has queries from all over the sequence, so that each has the same work.
    """
    batch, length, heads, size = q.shape
    parts = length // rows

    def attend_part(carry: None, one: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        queries, positions = one
        scores = jnp.einsum("brkgd,bmkd->bkgrm", queries, k, preferred_element_type=jnp.float32)
        seen = positions[:, None] >= jnp.arange(length)
        scores = constrain("scores", jnp.where(seen, scores * size**-0.5, -1e30))
        shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return carry, jnp.einsum("bkgrm,bmkd->brkgd", shares, v)

    queries = q.reshape(batch, rows, parts, k.shape[2], -1, size)
    queries = constrain("queries", jnp.moveaxis(queries, 2, 0))
    positions = jnp.arange(length).reshape(rows, parts).T
    _, mixed = jax.lax.scan(jax.checkpoint(attend_part), None, (queries, positions))
    mixed = constrain("mixed_parts", mixed)
    return jnp.moveaxis(mixed, 0, 2).reshape(batch, length, heads, size)


def build_transformer(sizes: Transformer, constrain: Constrain) -> Any:
    """Return a training step of a decoder."""

    def layer(x: jax.Array, stored: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
        weights = {
            name: constrain(f"weights.{name}", w.astype(jnp.bfloat16)) for name, w in stored.items()
        }
        x = constrain("stream", x + _attention(x, weights, sizes, constrain))
        if sizes.experts:
            x = x + _experts(x, weights, sizes, constrain)
        else:
            x = x + _mlp(x, weights, constrain)
        return constrain("stream", x), None

    policy = None
    if sizes.keeps_products:
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def adapted_loss(adapters: Any, frozen: Any, batch: Any) -> jax.Array:
        return loss({**frozen, "layers": frozen["layers"] | adapters["layers"]}, batch)

    def loss(parameters: Any, batch: Any) -> jax.Array:
        table = constrain("weights.embedding", parameters["embedding"].astype(jnp.bfloat16))
        tokens = constrain("looked_up_tokens", batch["tokens"])
        x = constrain("stream", constrain("looked_up", jnp.take(table, tokens, axis=0)))
        x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, parameters["layers"])
        x = constrain("head_input", rms_norm(x, parameters["final_norm"]))
        head = constrain("weights.head", parameters["head"].astype(jnp.bfloat16))
        logits = constrain("logits", jnp.einsum("blw,wv->blv", x, head))
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["targets"]
        )
        return losses.mean()

    return training_step(adapted_loss if sizes.rank else loss)
