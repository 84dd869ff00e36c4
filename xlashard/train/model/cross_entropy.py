"""Cross-entropy over a large vocabulary, of whose scores only a part is there at a time.

The parts of the vocabulary are done one after the other, with a running maximum and sum; the
backward pass computes the scores again. So the scores [B, L, V] are never held, and what the
gradient of the head takes on the wire does not grow with the number of parts: each has its own
piece of it.

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
    """Mean cross-entropy in nats per token.

    Args:
        x: Features of every position [B, L, W].
        head: The output matrix [W, V].
        wanted: The token that follows each position [B, L].
        parts: Into how many parts the vocabulary is cut; divides V.
        place: Lays activations out on a mesh.

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
    """The mean, and the logarithm of each position's sum of exponentials [B, L]."""

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
    """The gradients of features and head."""
    (logs, weight), (parts, place) = logs_and_weight, how

    def add(dx: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        own, scores, hits = _part(x, part, wanted, how)
        change = (jnp.exp(scores - logs[..., None]) - hits) * weight
        change = place(change.astype(x.dtype), _SCORES)
        dx = dx + _product("blv,wv->blw", change, own)
        # Of the head's type, in which its sum over the devices is taken.
        down = place(jnp.einsum("blw,blv->wv", x, change), ("embed", "vocab"))
        return place(dx, _STREAM), down.astype(head.dtype)

    dx, down = jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), _cut(head, parts, place))
    down = place(_joined(down, place), ("embed", "vocab"))
    return dx.astype(x.dtype), down


def _cut(head: jax.Array, parts: int, place: Place) -> tuple[jax.Array, jax.Array]:
    """The parts of the head [P, W, V / P], and the first token of each."""
    columns = head.shape[1] // parts
    # Each device that shares the vocabulary gives every part an equal piece of its own columns:
    # none of the head changes places, and all devices have as much to do for each part.
    cut = place(_parted(head, parts, place), (None, "embed", "vocab"))
    return cut, jnp.arange(parts) * (columns // _pieces(columns, place))


def _part(
    x: jax.Array, part: tuple[jax.Array, jax.Array], wanted: jax.Array, how: tuple[int, Place]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A part of the head, gathered; its scores [B, L, V / P]; where the wanted token is."""
    (own, first), (parts, place) = part, how
    own = place(own, (None, "vocab"))
    scores = place(_product("blw,wv->blv", x, own), _SCORES)
    return own, scores, wanted[..., None] == first + _offsets(own.shape[1], parts, place)


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _pieces(columns: int, place: Place) -> int:
    """How many pieces of the vocabulary, far from each other, a part with so many columns has."""
    devices = place.ways("vocab")
    return devices if columns % devices == 0 else 1


def _offsets(columns: int, parts: int, place: Place) -> jax.Array:
    """How far the token of each column of a part comes after that of its first [V / P]."""
    pieces = _pieces(columns, place)
    inside = jnp.arange(columns // pieces)
    if pieces == 1:
        return inside
    return (jnp.arange(pieces)[:, None] * (columns // pieces * parts) + inside).reshape(columns)


def _parted(head: jax.Array, parts: int, place: Place) -> jax.Array:
    """The columns of each part of the head [P, W, V / P]."""
    width, vocab = head.shape
    pieces = _pieces(vocab // parts, place)
    if pieces == 1:
        return head.reshape(width, parts, -1).transpose(1, 0, 2)
    return head.reshape(width, pieces, parts, -1).transpose(2, 0, 1, 3).reshape(parts, width, -1)


def _joined(down: jax.Array, place: Place) -> jax.Array:
    """What `_parted` has cut, with its columns in the order of the tokens again [W, V]."""
    parts, width, columns = down.shape
    pieces = _pieces(columns, place)
    if pieces == 1:
        return down.transpose(1, 0, 2).reshape(width, -1)
    return down.reshape(parts, width, pieces, -1).transpose(1, 2, 0, 3).reshape(width, -1)
