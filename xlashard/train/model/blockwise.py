"""Attention and cross-entropy in blocks, without their full matrices of scores.

Blocks are processed one after the other with a running maximum and sum, and the backward pass
recomputes the scores. Attention visits the pairs of a query block and a visible key block: the
algorithm of FlashAttention-2 (Dao 2023, arXiv:2307.08691) in plain JAX, where XLA decides which
values stay in fast memory. Cross-entropy visits parts of the vocabulary; the traffic for the
gradient of the head does not grow with their number, because each part has its own slice of the
gradient.

Letters in shapes: B batch, L length, H query heads, K key and value heads, G = H / K, D features of
a head, n blocks of b positions, R = G · b rows of a block of queries, W width, V vocabulary,
P parts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from xlashard.train.model.layout import Layout, unplaced

_HIDDEN = -1e30


_SCORES = ("batch", "length", "vocab")


_STREAM = ("batch", "length", None)


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def blockwise_attention(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> jax.Array:
    """Return causal attention, computed block by block.

    Args:
        q: Queries [B, L, H, D].
        k: Keys [B, L, K, D].
        v: Values [B, L, K, D].
        block: Positions per block; divides L.

    Returns:
        Mixed values [B, L, H, D].

    Example:
        >>> import jax.numpy as jnp
        >>> one = jnp.ones((1, 8, 2, 4))
        >>> round(float(blockwise_attention(one, one, 3 * one, 4).max()), 3)
        3.0
    """
    return _forward(q, k, v, block)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, block: int
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    blocks = _queries(q, k.shape[2], block), _keys(k, block), _keys(v, block)
    rows, size = blocks[0].shape[-2], q.shape[-1]

    def pair(carry: tuple[Any, ...], numbers: jax.Array) -> tuple[tuple[Any, ...], None]:
        (sums, total, most), mixed, logs = carry
        i, j = numbers
        fresh = j == 0
        numbers, most = jax.lax.optimization_barrier((numbers, most))
        most = jnp.where(fresh, _HIDDEN, most)
        scores = _scores(_at(blocks[0], i), _at(blocks[1], j), numbers)
        higher = jnp.maximum(most, scores.max(-1))
        shares = jnp.exp(scores - higher[..., None])
        shrink = jnp.where(fresh, 0.0, jnp.exp(most - higher))
        total = total * shrink + shares.sum(-1)
        added = _product("bkrc,bkcd->bkrd", shares.astype(v.dtype), _at(blocks[2], j))
        sums = sums * shrink[..., None] + added
        mixed = _put(mixed, (sums / total[..., None]).astype(q.dtype), i)
        logs = _put(logs, higher + jnp.log(total), i)
        return ((sums, total, higher), mixed, logs), None

    one = jnp.zeros((*blocks[1].shape[1:3], rows), jnp.float32)
    running = (jnp.zeros((*one.shape, size), jnp.float32), one, one)
    logs = jnp.zeros((len(blocks[0]), *one.shape), jnp.float32)
    start = (running, jnp.zeros_like(blocks[0]), logs)
    (_, mixed, logs), _ = jax.lax.scan(pair, start, _pairs(len(blocks[0])))
    mixed = checkpoint_name(_from_queries(mixed, q.shape), "attention")
    return mixed, (q, k, v, mixed, checkpoint_name(logs, "attention"))


def _backward(
    block: int, kept: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, mixed, logs = kept
    heads = k.shape[2]
    queries, keys, values = _queries(q, heads, block), _keys(k, block), _keys(v, block)
    gradients = _queries(gradient, heads, block)
    # Row-wise correction of the gradient of the softmax.
    overlap = _queries(mixed, heads, block).astype(jnp.float32) * gradients.astype(jnp.float32)
    overlap = overlap.sum(-1)

    def pair(carry: tuple[Any, ...], numbers: jax.Array) -> tuple[tuple[Any, ...], None]:
        dq_block, dq, dk, dv = carry
        i, j = numbers
        q_i, k_j, dout = _at(queries, i), _at(keys, j), _at(gradients, i)
        numbers, logs_i = jax.lax.optimization_barrier((numbers, _at(logs, i)))
        shares = jnp.exp(_scores(q_i, k_j, numbers) - logs_i[..., None])
        towards = _product("bkrd,bkcd->bkrc", dout, _at(values, j))
        change = shares * (towards - _at(overlap, i)[..., None]) * q.shape[-1] ** -0.5
        change, shares = change.astype(q.dtype), shares.astype(q.dtype)
        dv = _put(dv, _at(dv, j) + _product("bkrc,bkrd->bkcd", shares, dout), j)
        dk = _put(dk, _at(dk, j) + _product("bkrc,bkrd->bkcd", change, q_i), j)
        own = _product("bkrc,bkcd->bkrd", change, k_j)
        dq_block = jnp.where(j == 0, 0.0, dq_block) + own
        return (dq_block, _put(dq, dq_block.astype(dq.dtype), i), dk, dv), None

    wide = jnp.zeros(keys.shape, jnp.float32)
    start = (jnp.zeros(queries.shape[1:], jnp.float32), jnp.zeros_like(queries), wide, wide)
    (_, dq, dk, dv), _ = jax.lax.scan(pair, start, _pairs(len(queries)))
    dk, dv = (_from_keys(x).astype(k.dtype) for x in (dk, dv))
    return _from_queries(dq, q.shape), dk, dv


blockwise_attention.defvjp(_forward, _backward)


def _pairs(count: int) -> jax.Array:
    """Return the pairs of query block and visible key block [count · (count + 1) / 2, 2]."""
    return jnp.asarray(np.stack(np.tril_indices(count), 1).astype(np.int32))


def _scores(q: jax.Array, k: jax.Array, numbers: jax.Array) -> jax.Array:
    """Return the masked scores [B, K, R, b] of one query block and one key block.

    `numbers` must pass through an optimization barrier together with a value that depends on the
    input. Otherwise JAX hoists the masks of all pairs out of the loop over layers: length² values,
    which blockwise attention avoids.
    """
    i, j = numbers
    rows, block = q.shape[-2], k.shape[-2]
    scores = _product("bkrd,bkcd->bkrc", q, k) * q.shape[-1] ** -0.5
    own = i * block + jnp.arange(rows)[:, None] % block
    return jnp.where(own >= j * block + jnp.arange(block), scores, _HIDDEN)


def _at(blocks: jax.Array, number: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(blocks, number, keepdims=False)


def _put(blocks: jax.Array, one: jax.Array, number: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(blocks, one, number, 0)


def _queries(x: jax.Array, heads: int, block: int) -> jax.Array:
    """Reshape [B, L, H, D] to [n, B, K, R, D]; the queries of a group share a block."""
    batch, length, all_heads, size = x.shape
    group, count = all_heads // heads, length // block
    x = x.reshape(batch, count, block, heads, group, size)
    return x.transpose(1, 0, 3, 4, 2, 5).reshape(count, batch, heads, group * block, size)


def _from_queries(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Invert `_queries`."""
    count, batch, heads, rows, size = x.shape
    block = shape[1] // count
    x = x.reshape(count, batch, heads, rows // block, block, size)
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(shape)


def _keys(x: jax.Array, block: int) -> jax.Array:
    """Reshape [B, L, K, D] to [n, B, K, b, D]."""
    batch, length, heads, size = x.shape
    return x.reshape(batch, length // block, block, heads, size).transpose(1, 0, 3, 2, 4)


def _from_keys(x: jax.Array) -> jax.Array:
    """Invert `_keys`."""
    count, batch, heads, block, size = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, count * block, heads, size)


def cross_entropy(
    x: jax.Array, head: jax.Array, targets: jax.Array, parts: int, place: Layout = unplaced
) -> jax.Array:
    """Return the mean cross-entropy in nats per token.

    Args:
        x: Features of every position [B, L, W].
        head: The output matrix [W, V].
        targets: Next token of each position [B, L].
        parts: Number of parts of the vocabulary; divides V.
        place: Constrains activations on a mesh.

    Returns:
        A float32 scalar.
    """

    @jax.custom_vjp
    def measure(x: jax.Array, head: jax.Array) -> jax.Array:
        return _measure(x, head, targets, parts, place)[0]

    def forward(x: jax.Array, head: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        value, logs = _measure(x, head, targets, parts, place)
        return value, (x, head, logs)

    def backward(kept: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, head, logs = kept
        return _gradients(x, head, targets, (logs, gradient / targets.size), (parts, place))

    measure.defvjp(forward, backward)
    return measure(x, head)


def _measure(
    x: jax.Array, head: jax.Array, targets: jax.Array, parts: int, place: Layout
) -> tuple[jax.Array, jax.Array]:
    """Return the mean loss, and the log-sum-exp of each position [B, L]."""

    def add(
        carry: tuple[jax.Array, ...], part: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, ...], None]:
        most, total, chosen = carry
        _, scores, hits = _part(x, part, targets, (parts, place))
        higher = jnp.maximum(most, scores.max(-1))
        total = total * jnp.exp(most - higher) + jnp.exp(scores - higher[..., None]).sum(-1)
        return (higher, total, chosen + jnp.where(hits, scores, 0.0).sum(-1)), None

    zero = jnp.zeros(targets.shape, jnp.float32)
    start = (zero + _HIDDEN, zero, zero)
    (most, total, chosen), _ = jax.lax.scan(add, start, _cut(head, parts, place))
    logs = most + jnp.log(total)
    return jnp.mean(logs - chosen), logs


def _gradients(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    logs_and_weight: tuple[jax.Array, jax.Array],
    how: tuple[int, Layout],
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of features and head."""
    (logs, weight), (parts, place) = logs_and_weight, how

    def add(dx: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        own, scores, hits = _part(x, part, targets, how)
        change = (jnp.exp(scores - logs[..., None]) - hits) * weight
        change = place(change.astype(x.dtype), _SCORES)
        dx = dx + _product("blv,wv->blw", change, own)
        # Of the head's type, so that devices sum the gradient in that type.
        down = place(jnp.einsum("blw,blv->wv", x, change), ("embed", "vocab"))
        return place(dx, _STREAM), down.astype(head.dtype)

    dx, down = jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), _cut(head, parts, place))
    down = place(_joined(down, place), ("embed", "vocab"))
    return dx.astype(x.dtype), down


def _cut(head: jax.Array, parts: int, place: Layout) -> tuple[jax.Array, jax.Array]:
    """Return the parts of the head [P, W, V / P], and the first token of each."""
    columns = head.shape[1] // parts
    # Each device over which the vocabulary is sharded contributes an equal slice of its columns to
    # every part: the head is not resharded, and the work of each part is balanced.
    cut = place(_parted(head, parts, place), (None, "embed", "vocab"))
    return cut, jnp.arange(parts) * (columns // _pieces(columns, place))


def _part(
    x: jax.Array, part: tuple[jax.Array, jax.Array], targets: jax.Array, how: tuple[int, Layout]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a part of the head, gathered; its scores [B, L, V / P]; the mask of the next token."""
    (own, first), (parts, place) = part, how
    own = place(own, (None, "vocab"))
    scores = place(_product("blw,wv->blv", x, own), _SCORES)
    return own, scores, targets[..., None] == first + _offsets(own.shape[1], parts, place)


def _pieces(columns: int, place: Layout) -> int:
    """Return the number of separate slices of the vocabulary in a part with so many columns."""
    devices = place.ways("vocab")
    return devices if columns % devices == 0 else 1


def _offsets(columns: int, parts: int, place: Layout) -> jax.Array:
    """Return the offset of each column's token from the first token of the part [V / P]."""
    pieces = _pieces(columns, place)
    inside = jnp.arange(columns // pieces)
    if pieces == 1:
        return inside
    return (jnp.arange(pieces)[:, None] * (columns // pieces * parts) + inside).reshape(columns)


def _parted(head: jax.Array, parts: int, place: Layout) -> jax.Array:
    """Split the head into parts [P, W, V / P]."""
    width, vocab = head.shape
    pieces = _pieces(vocab // parts, place)
    if pieces == 1:
        return head.reshape(width, parts, -1).transpose(1, 0, 2)
    return head.reshape(width, pieces, parts, -1).transpose(2, 0, 1, 3).reshape(parts, width, -1)


def _joined(down: jax.Array, place: Layout) -> jax.Array:
    """Invert `_parted`: restore the order of the tokens [W, V]."""
    parts, width, columns = down.shape
    pieces = _pieces(columns, place)
    if pieces == 1:
        return down.transpose(1, 0, 2).reshape(width, -1)
    return down.reshape(parts, width, pieces, -1).transpose(1, 2, 0, 3).reshape(width, -1)
