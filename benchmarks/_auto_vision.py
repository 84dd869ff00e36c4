"""Programs on images for automatic shardings."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks._auto_program import (
    AutoProgram,
    Constrain,
    HandLayout,
    shape,
    training_state,
    training_step,
)
from xlashard import Mesh, P

BOTH = ("data", "model")
_EPSILON = 1e-5
_CLASSES = 1000


def convolve(x: jax.Array, filters: jax.Array, stride: int = 1) -> jax.Array:
    """Convolve images [B, X, Y, C] with filters [x, y, C, F]."""
    layout = ("NHWC", "HWIO", "NHWC")
    filters = filters.astype(x.dtype)
    return lax.conv_general_dilated(x, filters, (stride, stride), "SAME", dimension_numbers=layout)


def batch_norm(x: jax.Array, weights: Mapping[str, jax.Array]) -> jax.Array:
    """Normalise features by mean and variance over the batch, in float32."""
    wide = x.astype(jnp.float32)
    mean, square = wide.mean((0, 1, 2)), jnp.square(wide).mean((0, 1, 2))
    scale = weights["scale"] * lax.rsqrt(square - jnp.square(mean) + _EPSILON)
    return ((wide - mean) * scale + weights["bias"]).astype(x.dtype)


_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
"""Blocks and inner features of each stage of ResNet-50."""


def _norm_shapes(*sizes: int) -> dict[str, Any]:
    return {"scale": shape(*sizes), "bias": shape(*sizes)}


def _resnet_parameters() -> dict[str, Any]:
    stages: dict[str, Any] = {}
    before = 64
    for number, (blocks, inner) in enumerate(_STAGES):
        first = {
            "reduce": shape(1, 1, before, inner),
            "middle": shape(3, 3, inner, inner),
            "expand": shape(1, 1, inner, 4 * inner),
            "shortcut": shape(1, 1, before, 4 * inner),
            **{name: _norm_shapes(inner) for name in ("norm1", "norm2")},
            **{name: _norm_shapes(4 * inner) for name in ("norm3", "norm4")},
        }
        rest = {
            "reduce": shape(blocks - 1, 1, 1, 4 * inner, inner),
            "middle": shape(blocks - 1, 3, 3, inner, inner),
            "expand": shape(blocks - 1, 1, 1, inner, 4 * inner),
            **{name: _norm_shapes(blocks - 1, inner) for name in ("norm1", "norm2")},
            "norm3": _norm_shapes(blocks - 1, 4 * inner),
        }
        stages[f"stage{number}"] = {"first": first, "rest": rest}
        before = 4 * inner
    stem = {"filters": shape(7, 7, 3, 64), "norm": _norm_shapes(64)}
    return {"stem": stem, **stages, "head": shape(before, _CLASSES)}


def _bottleneck(x: jax.Array, weights: Mapping[str, Any], stride: int) -> jax.Array:
    y = jax.nn.relu(batch_norm(convolve(x, weights["reduce"]), weights["norm1"]))
    y = jax.nn.relu(batch_norm(convolve(y, weights["middle"], stride), weights["norm2"]))
    y = batch_norm(convolve(y, weights["expand"]), weights["norm3"])
    if "shortcut" in weights:
        x = batch_norm(convolve(x, weights["shortcut"], stride), weights["norm4"])
    return jax.nn.relu(x + y)


def _build_resnet(constrain: Constrain) -> Any:
    def block(x: jax.Array, weights: Mapping[str, Any]) -> tuple[jax.Array, None]:
        return constrain("images", _bottleneck(x, weights, 1)), None

    def loss(parameters: Any, batch: Any) -> jax.Array:
        x = constrain("images", batch["images"].astype(jnp.bfloat16))
        stem = parameters["stem"]
        x = jax.nn.relu(batch_norm(convolve(x, stem["filters"], 2), stem["norm"]))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for number in range(len(_STAGES)):
            stage = parameters[f"stage{number}"]
            x = _bottleneck(x, stage["first"], 2 if number else 1)
            x, _ = lax.scan(block, constrain("images", x), stage["rest"])
        features = constrain("features", x.mean((1, 2)))
        logits = (features @ parameters["head"].astype(x.dtype)).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return losses.mean()

    return training_step(loss)


def _images(batch: int, side: int, channels: int = 3) -> dict[str, Any]:
    return {
        "images": shape(batch, side, side, channels),
        "labels": shape(batch, dtype=jnp.int32),
    }


_ROWS = {"images": P(BOTH, None, None, None), "labels": P(BOTH)}


def _resnet_layouts(mesh: Mesh) -> Mapping[str, HandLayout]:
    del mesh
    inside = {"images": _ROWS["images"], "features": P(BOTH, None)}
    filters = P(None, None, None, BOTH)
    stacked = P(None, None, None, None, BOTH)
    spread = {"reduce": stacked, "middle": stacked, "expand": stacked, "shortcut": filters}
    spatial = {"images": P("data", "model", None, None), "labels": P("data")}
    return {
        "data": HandLayout(_ROWS, inside),
        "data + sharded moments": HandLayout(_ROWS, inside, spread),
        "data + rows of images": HandLayout(spatial, {"images": spatial["images"]}),
    }


RESNET = AutoProgram(
    "ResNet-50",
    _build_resnet,
    lambda: (training_state(_resnet_parameters()), _images(2048, 224)),
    _resnet_layouts,
    {
        "v5e-16": {"data": 4, "model": 4},
        "v6e-64": {"data": 16, "model": 4},
        "v5p-128": {"data": 16, "model": 4},
    },
)
