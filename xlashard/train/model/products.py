"""Products of activations and weights, exact or in eight bits.

An eight-bit product scales both factors, rounds them, multiplies, and scales the result back; the
two products of its gradient are done the same way. int8 scales each row and column by its largest
value, as AQT does (Abdolrashidi et al. 2021, arXiv:2105.03536). fp8 rounds activations and weights
to float8_e4m3fn without a scale, and gradients to float8_e5m2 with one scale for the array: the
types that Micikevicius et al. 2022 (arXiv:2209.05433) give the two passes.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from xlashard.train.config.settings import ModelSettings

type _Kind = Literal["int8", "fp8"]


def product(spec: str, x: jax.Array, weight: jax.Array, model: ModelSettings) -> jax.Array:
    """Return the product of activations and a weight.

    Args:
        spec: Einsum of two factors, such as ``blw,wm->blm``. Each letter is in two of its three
            terms.
        x: Activations.
        weight: Weight, of the type of the activations.
        model: Type of the products.

    Returns:
        The product, of the type of the activations.
    """
    if model.quantized == "none":
        return jnp.einsum(spec, x, weight)
    return _quantized(spec, model.quantized, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _quantized(spec: str, kind: _Kind, x: jax.Array, weight: jax.Array) -> jax.Array:
    return _scaled_product(spec, _rounding(kind), (x, weight), ("value", "value"))


def _forward(
    spec: str, kind: _Kind, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _quantized(spec, kind, x, weight), (x, weight)


def _backward(
    spec: str, kind: _Kind, kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    (x, weight), rounded = kept, _rounding(kind)
    factors, out = spec.split("->")
    first, second = factors.split(",")
    roles = ("gradient", "value")
    dx = _scaled_product(f"{out},{second}->{first}", rounded, (gradient, weight), roles)
    dw = _scaled_product(f"{out},{first}->{second}", rounded, (gradient, x), roles)
    return dx, dw


_quantized.defvjp(_forward, _backward)


def _rounding(kind: _Kind) -> Any:
    return _to_int8 if kind == "int8" else round_to_fp8


def _to_int8(x: jax.Array, contracted: tuple[int, ...], role: str) -> tuple[jax.Array, Any]:
    """Return int8 values, and their scales with a size of 1 in the contracted dimensions."""
    del role
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=contracted, keepdims=True) / 127
    scale = jnp.where(scale == 0, 1, scale)
    return jnp.round(wide / scale).astype(jnp.int8), scale


def round_to_fp8(x: jax.Array, contracted: tuple[int, ...], role: str) -> tuple[jax.Array, Any]:
    """Return eight-bit floats, and the scale of the array for a gradient."""
    del contracted
    dtype = jnp.float8_e4m3fn if role == "value" else jnp.float8_e5m2
    most = float(jnp.finfo(dtype).max)
    if role == "value":
        return jnp.clip(x, -most, most).astype(dtype), None
    scale = jnp.max(jnp.abs(x.astype(jnp.float32)), keepdims=True) / most
    scale = jnp.where(scale == 0, 1, scale)
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


def _scaled_product(
    spec: str, rounded: Any, factors: tuple[jax.Array, jax.Array], roles: tuple[str, str]
) -> jax.Array:
    """Return the product of rounded factors, of the type of the second factor."""
    terms, out = spec.split("->")
    letters = terms.split(",")
    contracted = [x for x in letters[0] if x in letters[1] and x not in out]
    dims = [tuple(term.index(x) for x in contracted) for term in letters]
    values, scales = zip(
        *(rounded(x, at, role) for x, at, role in zip(factors, dims, roles, strict=True)),
        strict=True,
    )
    stored = jnp.int32 if values[0].dtype == jnp.int8 else jnp.float32
    result = jnp.einsum(spec, *values, preferred_element_type=stored).astype(jnp.float32)
    for term, scale in zip(letters, scales, strict=True):
        if scale is not None:
            result *= _spread(scale, term, out)
    return result.astype(factors[1].dtype)


def _spread(scale: jax.Array, term: str, out: str) -> jax.Array:
    """Return the scales of a factor, with the dimensions of the result."""
    order = [x for x in out if x in term]
    summed = tuple(i for i, x in enumerate(term) if x not in out)
    kept = jnp.squeeze(scale, summed)
    left = [x for x in term if x in out]
    kept = kept.transpose([left.index(x) for x in order])
    return jnp.expand_dims(kept, tuple(i for i, x in enumerate(out) if x not in term))
