"""Programs on images for automatic shardings."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks._auto_program import (
    BenchmarkProgram,
    Constrain,
    HandLayout,
    Turn,
    shape,
    training_state,
    training_step,
)
from benchmarks._auto_transformers import attend
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


RESNET = BenchmarkProgram(
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

_PATCH, _LAYERS, _WIDTH, _HEADS = 14, 32, 1280, 16
_POSITIONS = (224 // _PATCH) ** 2 + 1


def _vit_parameters() -> dict[str, Any]:
    n, w, d = _LAYERS, _WIDTH, _WIDTH // _HEADS
    layers = {
        **{name: shape(n, w, _HEADS, d) for name in ("wq", "wk", "wv")},
        "wo": shape(n, _HEADS, d, w),
        "up": shape(n, w, 4 * w),
        "up_bias": shape(n, 4 * w),
        "down": shape(n, 4 * w, w),
        "down_bias": shape(n, w),
        "attention_norm": _norm_shapes(n, w),
        "mlp_norm": _norm_shapes(n, w),
    }
    return {
        "patches": shape(_PATCH, _PATCH, 3, w),
        "class": shape(1, 1, w),
        "positions": shape(_POSITIONS, w),
        "layers": layers,
        "final_norm": _norm_shapes(w),
        "head": shape(w, _CLASSES),
    }


def _layer_norm(x: jax.Array, weights: Mapping[str, jax.Array]) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    scale = lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + _EPSILON)
    return (centred * scale * weights["scale"] + weights["bias"]).astype(x.dtype)


def _build_vit(constrain: Constrain) -> Any:
    def layer(x: jax.Array, stored: Mapping[str, Any]) -> tuple[jax.Array, None]:
        weights = {
            name: w if isinstance(w, dict) else constrain(f"weights.{name}", w.astype(x.dtype))
            for name, w in stored.items()
        }
        normed = constrain("layer_input", _layer_norm(x, weights["attention_norm"]))
        q, k, v = (
            constrain("heads", jnp.einsum("blw,whd->blhd", normed, weights[name]))
            for name in ("wq", "wk", "wv")
        )
        mixed = constrain("heads", attend(q, k, v, causal=False))
        out = jnp.einsum("blhd,hdw->blw", mixed, weights["wo"])
        x = constrain("stream", x + constrain("layer_output", out))
        normed = constrain("layer_input", _layer_norm(x, weights["mlp_norm"]))
        hidden = jax.nn.gelu(normed @ weights["up"] + weights["up_bias"])
        out = constrain("layer_output", constrain("hidden", hidden) @ weights["down"])
        return constrain("stream", x + out + weights["down_bias"]), None

    def loss(parameters: Any, batch: Any) -> jax.Array:
        filters = parameters["patches"].astype(jnp.bfloat16)
        images = batch["images"].astype(jnp.bfloat16)
        layout = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(
            images, filters, (_PATCH, _PATCH), "VALID", dimension_numbers=layout
        )
        x = x.reshape(x.shape[0], -1, _WIDTH)
        first = jnp.broadcast_to(parameters["class"].astype(x.dtype), (x.shape[0], 1, _WIDTH))
        x = jnp.concatenate([first, x], axis=1) + parameters["positions"].astype(x.dtype)
        x, _ = lax.scan(jax.checkpoint(layer), constrain("stream", x), parameters["layers"])
        features = constrain("features", _layer_norm(x[:, 0], parameters["final_norm"]))
        logits = (features @ parameters["head"].astype(x.dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    return training_step(loss)


_VIT_WIDTH = {"wq": 0, "wk": 0, "wv": 0, "wo": 2, "up": 0, "down": 1}
_VIT_TENSOR = {
    **dict.fromkeys(("wq", "wk", "wv"), P(None, "model", None)),
    "wo": P("model", None, None),
    "up": P(None, "model"),
    "down": P("model", None),
}


def _vit_layout(batch: Any, tensor: bool, over: Any) -> HandLayout:
    """Return a layout of the vision transformer.

    Args:
        batch: Mesh axes of the images.
        tensor: Whether heads and hidden features are sharded over `model`.
        over: Mesh axes of the width of the stored weights; None to replicate it.
    """
    used = {
        name: spec if tensor else P(*(None for _ in spec)) for name, spec in _VIT_TENSOR.items()
    }
    stored = {
        name: P(*(over if at == _VIT_WIDTH[name] else axis for at, axis in enumerate(spec)))
        for name, spec in used.items()
    }
    inner = "model" if tensor else None
    inside = {
        **dict.fromkeys(("stream", "layer_input", "layer_output"), P(batch, None, None)),
        "heads": P(batch, None, inner, None),
        "hidden": P(batch, None, inner),
        "features": P(batch, None),
        **{f"weights.{name}": Turn(used[name], stored[name]) for name in used},
    }
    arguments = {name: P(None, *spec) for name, spec in stored.items()}
    rows = {"images": P(batch, None, None, None), "labels": P(batch)}
    return HandLayout({**arguments, **rows, "up_bias": P(None, inner)}, inside)


def _vit_layouts(mesh: Mesh) -> Mapping[str, HandLayout]:
    del mesh
    return {
        "data": _vit_layout(BOTH, tensor=False, over=None),
        "fsdp": _vit_layout(BOTH, tensor=False, over=BOTH),
        "hybrid fsdp": _vit_layout(BOTH, tensor=False, over="model"),
        "tensor": _vit_layout("data", tensor=True, over=None),
        "fsdp + tensor": _vit_layout("data", tensor=True, over="data"),
    }


VIT = BenchmarkProgram(
    "vision transformer of 257 positions, 0.6B",
    _build_vit,
    lambda: (training_state(_vit_parameters()), _images(2048, 224)),
    _vit_layouts,
    RESNET.meshes,
)

_SIDE, _FEATURES = 512, (64, 128, 256, 512, 1024)


def _double(before: int, after: int) -> dict[str, Any]:
    sizes = ((3, 3, before, after), (3, 3, after, after))
    filters = {f"filters{i}": shape(*size) for i, size in enumerate(sizes)}
    return {**filters, **{f"norm{i}": _norm_shapes(after) for i in range(2)}}


def _unet_parameters() -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for level, after in enumerate(_FEATURES):
        parameters[f"down{level}"] = _double(_FEATURES[level - 1] if level else 3, after)
    for level, after in enumerate(_FEATURES[:-1]):
        parameters[f"up{level}"] = {
            "widen": shape(1, 1, 2 * after, after),
            **_double(2 * after, after),
        }
    return {**parameters, "head": shape(1, 1, _FEATURES[0], 2)}


def _build_unet(constrain: Constrain) -> Any:
    def double(x: jax.Array, weights: Mapping[str, Any]) -> jax.Array:
        for i in range(2):
            x = constrain("images", convolve(x, weights[f"filters{i}"]))
            x = jax.nn.relu(batch_norm(x, weights[f"norm{i}"]))
        return constrain("images", x)

    def loss(parameters: Any, batch: Any) -> jax.Array:
        x = constrain("input", batch["images"].astype(jnp.bfloat16))
        kept = []
        for level in range(len(_FEATURES)):
            if level:
                kept.append(x)
                x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
            x = double(x, parameters[f"down{level}"])
        for level in reversed(range(len(_FEATURES) - 1)):
            weights = parameters[f"up{level}"]
            x = jnp.repeat(jnp.repeat(convolve(x, weights["widen"]), 2, axis=1), 2, axis=2)
            x = double(jnp.concatenate([kept.pop(), constrain("images", x)], axis=-1), weights)
        logits = convolve(x, parameters["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["masks"]).mean()

    return training_step(loss)


def _unet_arguments() -> tuple[Any, ...]:
    images = _images(32, _SIDE)["images"]
    masks = shape(32, _SIDE, _SIDE, dtype=jnp.int32)
    return training_state(_unet_parameters()), {"images": images, "masks": masks}


def _unet_layouts(mesh: Mesh) -> Mapping[str, HandLayout]:
    del mesh

    def layout(rows: Any, features: Any) -> HandLayout:
        images, masks = P("data", rows, None, None), P("data", rows, None)
        filters = ("filters0", "filters1", "widen")
        arguments = dict.fromkeys(filters, P(None, None, None, features))
        arguments |= dict.fromkeys(("scale", "bias"), P(features))
        inside = {"input": images, "images": P("data", rows, None, features)}
        return HandLayout({**arguments, "images": images, "masks": masks}, inside)

    return {
        "data": layout(None, None),
        "data + rows of images": layout("model", None),
        "data + features": layout(None, "model"),
    }


UNET = BenchmarkProgram(
    "U-Net on 32 images of 512 x 512",
    _build_unet,
    _unet_arguments,
    _unet_layouts,
    {
        "v5e-16": {"data": 4, "model": 4},
        "v6e-64": {"data": 16, "model": 4},
        "v5p-128": {"data": 16, "model": 4},
    },
)

_RAYS, _SAMPLES, _LEVELS, _ENTRIES, _GRID_FEATURES = 32_768, 64, 8, 2**18, 4
_CORNERS = np.array([[number >> dim & 1 for dim in range(3)] for number in range(8)])
_PRIMES = np.array([1, 2_654_435_761, 805_459_861], np.uint32)
_RESOLUTIONS = np.array([int(16 * 1.6**level) for level in range(_LEVELS)], np.float32)


def _radiance_arguments() -> tuple[Any, ...]:
    parameters = {
        "grid": shape(_LEVELS, _ENTRIES, _GRID_FEATURES),
        "density1": shape(_LEVELS * _GRID_FEATURES, 64),
        "density2": shape(64, 16),
        "color1": shape(16 + 3, 64),
        "color2": shape(64, 3),
    }
    batch = {name: shape(_RAYS, 3) for name in ("origin", "direction", "color")}
    return training_state(parameters), {**batch, "depth": shape(_RAYS, _SAMPLES)}


def _build_radiance(constrain: Constrain) -> Any:
    """Return a step of a radiance field with hash tables (Müller et al. 2022, arXiv:2201.05989)."""

    def interpolate(table: jax.Array, resolution: jax.Array, points: jax.Array) -> jax.Array:
        """Return the features [R, S, F] of points [R, S, 3] from the eight corners around each."""
        scaled = points * resolution
        base = jnp.floor(scaled)
        inner = (scaled - base)[..., None, :]
        places = (base[..., None, :] + _CORNERS).astype(jnp.uint32) * _PRIMES
        hashed = (places[..., 0] ^ places[..., 1] ^ places[..., 2]) % _ENTRIES
        shares = jnp.prod(jnp.where(_CORNERS == 1, inner, 1 - inner), axis=-1)
        return (jnp.take(table, hashed.astype(jnp.int32), axis=0) * shares[..., None]).sum(-2)

    def loss(parameters: Any, batch: Any) -> jax.Array:
        direction, depth = batch["direction"], batch["depth"]
        points = jax.nn.sigmoid(batch["origin"][:, None] + direction[:, None] * depth[..., None])
        levels = jax.vmap(interpolate, (0, 0, None))
        features = levels(parameters["grid"], jnp.asarray(_RESOLUTIONS), points)
        x = constrain("features", jnp.moveaxis(features, 0, 2)).reshape(_RAYS, _SAMPLES, -1)
        weights = {n: w.astype(jnp.bfloat16) for n, w in parameters.items() if n != "grid"}
        x = jax.nn.relu(x.astype(jnp.bfloat16) @ weights["density1"]) @ weights["density2"]
        seen_from = jnp.broadcast_to(direction[:, None], (_RAYS, _SAMPLES, 3)).astype(x.dtype)
        hidden = jax.nn.relu(jnp.concatenate([x, seen_from], axis=-1) @ weights["color1"])
        colors = jax.nn.sigmoid((hidden @ weights["color2"]).astype(jnp.float32))
        steps = jnp.diff(depth, axis=1, append=1e3)
        opaque = 1 - jnp.exp(-jax.nn.softplus(x[..., 0].astype(jnp.float32)) * steps)
        clear = jnp.concatenate([jnp.ones((_RAYS, 1)), 1 - opaque[:, :-1]], axis=1)
        shares = opaque * jnp.cumprod(clear, axis=1)
        return jnp.square((shares[..., None] * colors).sum(1) - batch["color"]).mean()

    return training_step(loss)


def _radiance_layouts(mesh: Mesh) -> Mapping[str, HandLayout]:
    del mesh

    def layout(rays: Any, grid: P, features: P) -> HandLayout:
        arguments = dict.fromkeys(("origin", "direction", "color", "depth"), P(rays, None))
        return HandLayout({**arguments, "grid": grid}, {"features": features})

    by_ray = P(BOTH, None, None, None)
    return {
        "rays": layout(BOTH, P(), by_ray),
        "rays + entries at rest": layout(BOTH, P(None, BOTH, None), by_ray),
        "rays + levels": layout("data", P("model", None, None), P("data", None, "model", None)),
        "rays + levels at rest": layout(BOTH, P("model", None, None), by_ray),
        "rays + features": layout("data", P(None, None, "model"), P("data", None, None, "model")),
    }


RADIANCE = BenchmarkProgram(
    "radiance field of 8 hash tables on 32,768 rays",
    _build_radiance,
    _radiance_arguments,
    _radiance_layouts,
    {
        "v5e-16": {"data": 4, "model": 4},
        "v6e-8": {"data": 4, "model": 2},
        "v5p-32": {"data": 4, "model": 4},
    },
)
