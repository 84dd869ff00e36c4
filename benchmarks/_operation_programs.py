"""Programs whose device times are published, as functions of their arrays.

Each does what its publisher's program does, in the same order, so that XLA fuses it alike.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from xlashard import P

_SOFTMAX_IN_BFLOAT16 = jax.lax.DotAlgorithmPreset.BF16_BF16_F32


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = False) -> jax.Array:
    """Mix values [B, K, H, D] by the softmax of scores in float32."""
    repeats = q.shape[-2] // k.shape[-2]
    if repeats > 1:
        k, v = (jnp.repeat(x, repeats, axis=-2) for x in (k, v))
    scores = _scores(q, k, causal=causal)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    weights /= jnp.sum(weights, axis=-1, keepdims=True)
    mixed = jnp.einsum(
        "bhqk,bkhd->bqhd",
        weights,
        v,
        precision=_SOFTMAX_IN_BFLOAT16,
        preferred_element_type=jnp.float32,
    )
    return mixed.astype(q.dtype)


def _scores(q: jax.Array, k: jax.Array, *, causal: bool) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    scores *= q.shape[-1] ** -0.5
    if not causal:
        return scores
    mask = jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
    return jnp.where(mask, scores, float(jnp.finfo(jnp.float32).min))


def attention_gradient(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of attention, given the maxima and sums of its scores."""
    peaks = q[..., 0].swapaxes(1, 2).astype(jnp.float32)[..., None]
    sums = q[..., 1].swapaxes(1, 2).astype(jnp.float32)[..., None]
    scores = _scores(q, k, causal=causal)
    weights = jnp.exp(scores - peaks) / sums
    dv = jnp.einsum("bhqk,bqhd->bkhd", weights.astype(v.dtype), q)
    slope = jnp.einsum("bqhd,bkhd->bhqk", q, v, preferred_element_type=jnp.float32)
    slope = weights * (slope - jnp.sum(slope * weights, axis=-1, keepdims=True))
    slope = (slope * q.shape[-1] ** -0.5).astype(q.dtype)
    return (
        jnp.einsum("bhqk,bkhd->bqhd", slope, k),
        jnp.einsum("bhqk,bqhd->bkhd", slope, q),
        dv,
    )


def cross_entropy(x: jax.Array, w: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the summed loss of logits x @ w [B, V], and their log-sum-exp [B]."""
    logits = x @ w
    chosen = jax.nn.one_hot(labels, w.shape[1], dtype=x.dtype)
    loss = jnp.sum(-chosen * jax.nn.log_softmax(logits, axis=-1), axis=-1, dtype=jnp.float32)
    return jnp.sum(loss), jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)


def cross_entropy_gradient(
    x: jax.Array, w: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of the loss to x and w, given its log-sum-exp."""
    lse = x[:, 0]
    chosen = jax.nn.one_hot(labels, w.shape[1], dtype=x.dtype)
    slope = -chosen + jnp.exp(x @ w - lse[:, None])
    return slope @ w.T, x.T @ slope


def gated_linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return silu(x @ w[:, 0]) * (x @ w[:, 1]), with one product for both."""
    y = jnp.einsum("...k,kjn->...jn", x, w)
    gate, value = jnp.split(jax.lax.collapse(y, -2).astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * value).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return x with mean 0 and variance 1 along its last dimension, times the scale."""
    y = x.astype(jnp.float32)
    y -= jnp.mean(y, -1, keepdims=True)
    y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-6)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def ragged_product(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return groups of rows of x [M, K] times their matrices w [G, K, N]."""
    product = jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)
    return product.astype(x.dtype)


def _along(
    body: Callable[[jax.Array], jax.Array], *, kept: bool
) -> Callable[[jax.Array], jax.Array]:
    """Run a collective along the mesh axis `ring`."""

    def run(x: jax.Array) -> jax.Array:
        out = P() if kept else P("ring")
        # Made for each trace, since it keeps the mesh of its first.
        return jax.shard_map(body, in_specs=P("ring"), out_specs=out, check_vma=False)(x)

    return run


def _shifted(x: jax.Array) -> jax.Array:
    size = jax.lax.axis_size("ring")
    return jax.lax.ppermute(x, "ring", [(n, (n + 1) % size) for n in range(size)])


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a @ b, in bfloat16 where the operands have a byte per element."""
    return jnp.dot(a, b, preferred_element_type=jnp.bfloat16 if a.dtype.itemsize == 1 else None)


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = False) -> jax.Array:
    """Mix values [B, K, H, D] by cuDNN."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


def cudnn_attention_gradient(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = False
) -> tuple[jax.Array, ...]:
    """Return the gradients of attention by cuDNN, after its forward pass."""
    _, gradients = jax.vjp(partial(cudnn_attention, causal=causal), q, k, v)
    return gradients(q)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "product": product,
    "copy": jnp.copy,
    "addition": jnp.add,
    "cuDNN attention": cudnn_attention,
    "causal cuDNN attention": partial(cudnn_attention, causal=True),
    "cuDNN attention, gradient": cudnn_attention_gradient,
    "causal cuDNN attention, gradient": partial(cudnn_attention_gradient, causal=True),
    "attention": attention,
    "causal attention": partial(attention, causal=True),
    "attention, gradient": attention_gradient,
    "causal attention, gradient": partial(attention_gradient, causal=True),
    "cross entropy": cross_entropy,
    "cross entropy, gradient": cross_entropy_gradient,
    "gated linear": gated_linear,
    "normalization": layer_norm,
    "ragged product": ragged_product,
    "shift": _along(_shifted, kept=False),
    "gather": _along(partial(jax.lax.all_gather, axis_name="ring", tiled=True), kept=True),
    "sum": _along(partial(jax.lax.psum, axis_name="ring"), kept=True),
    "sum in place": jax.jit(
        _along(partial(jax.lax.psum, axis_name="ring"), kept=False), donate_argnums=0
    ),
}
"""Programs by name. The arrays of the last four are sharded along the mesh axis `ring`."""
