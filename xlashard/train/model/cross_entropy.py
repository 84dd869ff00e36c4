"""Cross-entropy over a large vocabulary without the full matrix of scores.

Parts of the vocabulary are processed one after the other with a running maximum and sum, and the
backward pass recomputes the scores, so the scores [B, L, V] never exist at once. The traffic for
the gradient of the head does not grow with the number of parts, because each part has its own
slice of the gradient.

Letters in shapes: B batch, L length, W width, V vocabulary, P parts.
"""

import functools

import jax
import jax.numpy as jnp

from xlashard.train.model.layout import Place, unplaced

_LEAST = -1e30
_SCORES = ("batch", "length", "vocab")
_STREAM = ("batch", "length", None)


def cross_entropy(
    x: jax.Array, head: jax.Array, wanted: jax.Array, parts: int, place: Place = unplaced
) -> jax.Array:
    """Return the mean cross-entropy in nats per token.

    Args:
        x: Features of every position [B, L, W].
        head: The output matrix [W, V].
        wanted: Next token of each position [B, L].
        parts: Number of parts of the vocabulary; divides V.
        place: Constrains activations on a mesh.

    Returns:
        A float32 scalar.
    """

    @jax.custom_vjp
    def measure(x: jax.Array, head: jax.Array) -> jax.Array:
        return _measure(x, head, wanted, parts, place)[0]

    def forward(x: jax.Array, head: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        value, logs = _measure(x, head, wanted, parts, place)
        return value, (x, head, logs)

    def backward(kept: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, head, logs = kept
        return _gradients(x, head, wanted, (logs, gradient / wanted.size), (parts, place))

    measure.defvjp(forward, backward)
    return measure(x, head)


def _measure(
    x: jax.Array, head: jax.Array, wanted: jax.Array, parts: int, place: Place
) -> tuple[jax.Array, jax.Array]:
    """Return the mean loss, and the log-sum-exp of each position [B, L]."""

    def add(
        carry: tuple[jax.Array, ...], part: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, ...], None]:
        most, total, chosen = carry
        _, scores, hits = _part(x, part, wanted, (parts, place))
        higher = jnp.maximum(most, scores.max(-1))
        total = total * jnp.exp(most - higher) + jnp.exp(scores - higher[..., None]).sum(-1)
        return (higher, total, chosen + jnp.where(hits, scores, 0.0).sum(-1)), None

    zero = jnp.zeros(wanted.shape, jnp.float32)
    start = (zero + _LEAST, zero, zero)
    (most, total, chosen), _ = jax.lax.scan(add, start, _cut(head, parts, place))
    logs = most + jnp.log(total)
    return jnp.mean(logs - chosen), logs


def _gradients(
    x: jax.Array,
    head: jax.Array,
    wanted: jax.Array,
    logs_and_weight: tuple[jax.Array, jax.Array],
    how: tuple[int, Place],
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of features and head."""
    (logs, weight), (parts, place) = logs_and_weight, how

    def add(dx: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        own, scores, hits = _part(x, part, wanted, how)
        change = (jnp.exp(scores - logs[..., None]) - hits) * weight
        change = place(change.astype(x.dtype), _SCORES)
        dx = dx + _product("blv,wv->blw", change, own)
        # Of the head's type, so that devices sum the gradient in that type.
        down = place(jnp.einsum("blw,blv->wv", x, change), ("embed", "vocab"))
        return place(dx, _STREAM), down.astype(head.dtype)

    dx, down = jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), _cut(head, parts, place))
    down = place(_joined(down, place), ("embed", "vocab"))
    return dx.astype(x.dtype), down


def _cut(head: jax.Array, parts: int, place: Place) -> tuple[jax.Array, jax.Array]:
    """Return the parts of the head [P, W, V / P], and the first token of each."""
    columns = head.shape[1] // parts
    # Each device over which the vocabulary is sharded contributes an equal slice of its columns to
    # every part: the head is not resharded, and the work of each part is balanced.
    cut = place(_parted(head, parts, place), (None, "embed", "vocab"))
    return cut, jnp.arange(parts) * (columns // _pieces(columns, place))


def _part(
    x: jax.Array, part: tuple[jax.Array, jax.Array], wanted: jax.Array, how: tuple[int, Place]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a part of the head, gathered; its scores [B, L, V / P]; the mask of the next token."""
    (own, first), (parts, place) = part, how
    own = place(own, (None, "vocab"))
    scores = place(_product("blw,wv->blv", x, own), _SCORES)
    return own, scores, wanted[..., None] == first + _offsets(own.shape[1], parts, place)


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _pieces(columns: int, place: Place) -> int:
    """Return the number of separate slices of the vocabulary in a part with so many columns."""
    devices = place.ways("vocab")
    return devices if columns % devices == 0 else 1


def _offsets(columns: int, parts: int, place: Place) -> jax.Array:
    """Return the offset of each column's token from the first token of the part [V / P]."""
    pieces = _pieces(columns, place)
    inside = jnp.arange(columns // pieces)
    if pieces == 1:
        return inside
    return (jnp.arange(pieces)[:, None] * (columns // pieces * parts) + inside).reshape(columns)


def _parted(head: jax.Array, parts: int, place: Place) -> jax.Array:
    """Split the head into parts [P, W, V / P]."""
    width, vocab = head.shape
    pieces = _pieces(vocab // parts, place)
    if pieces == 1:
        return head.reshape(width, parts, -1).transpose(1, 0, 2)
    return head.reshape(width, pieces, parts, -1).transpose(2, 0, 1, 3).reshape(parts, width, -1)


def _joined(down: jax.Array, place: Place) -> jax.Array:
    """Invert `_parted`: restore the order of the tokens [W, V]."""
    parts, width, columns = down.shape
    pieces = _pieces(columns, place)
    if pieces == 1:
        return down.transpose(1, 0, 2).reshape(width, -1)
    return down.reshape(parts, width, pieces, -1).transpose(1, 2, 0, 3).reshape(width, -1)
