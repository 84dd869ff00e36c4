"""Selective scan like that of Mamba (Gu and Dao 2023, arXiv:2312.00752) for automatic shardings.

Letters in shapes: B batch, L length, W width, I inner features, S state, R rank of the time step, N
layers, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks._auto_program import (
    BenchmarkProgram,
    Constrain,
    HandLayout,
    Turn,
    shape,
    training_state,
    training_step,
)
from benchmarks._auto_transformers import rms_norm
from xlashard import Mesh, P

BOTH = ("data", "model")
_LAYERS, _WIDTH, _INNER, _STATE, _RANK, _VOCAB = 48, 2048, 4096, 16, 128, 50_432
_BATCH, _LENGTH, _CHUNK, _TAPS = 64, 2048, 256, 4

_SHAPES = {
    "norm": (_WIDTH,),
    "into": (_WIDTH, 2, _INNER),
    "taps": (_TAPS, _INNER),
    "select": (_INNER, _RANK + 2 * _STATE),
    "pace": (_RANK, _INNER),
    "decay": (_INNER, _STATE),
    "skip": (_INNER,),
    "out": (_INNER, _WIDTH),
}
_INNER_DIMENSION = {"into": 2, "taps": 1, "select": 0, "pace": 1, "decay": 0, "skip": 0, "out": 0}


def _arguments() -> tuple[Any, ...]:
    layers = {name: shape(_LAYERS, *sizes) for name, sizes in _SHAPES.items()}
    table = shape(_VOCAB, _WIDTH)
    tokens = shape(_BATCH, _LENGTH, dtype=jnp.int32)
    parameters = {"embedding": table, "layers": layers, "final_norm": shape(_WIDTH)}
    return training_state(parameters), {"tokens": tokens, "targets": tokens}


def _mix_over_time(x: jax.Array, weights: Mapping[str, jax.Array], constrain: Constrain) -> Any:
    """Return the outputs [B, L, I] of a state [B, I, S] that decays at a selected pace."""
    selected = constrain("selected", x @ weights["select"])
    pace, keys, queries = jnp.split(selected, [_RANK, _RANK + _STATE], axis=-1)
    pace = jax.nn.softplus((pace @ weights["pace"]).astype(jnp.float32))
    rates = -jnp.exp(weights["decay"].astype(jnp.float32))

    def combine(first: tuple[jax.Array, ...], second: tuple[jax.Array, ...]) -> Any:
        return first[0] * second[0], second[0] * first[1] + second[1]

    def chunk(state: jax.Array, one: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x, pace, keys, queries = one
        decays = jnp.exp(pace[..., None] * rates)
        inputs = (pace * x.astype(jnp.float32))[..., None] * keys[:, :, None].astype(jnp.float32)
        decays, sums = jax.lax.associative_scan(combine, (decays, inputs), axis=1)
        states = constrain("states", decays * state[:, None] + sums)
        out = jnp.einsum("blis,bls->bli", states, queries.astype(jnp.float32))
        return states[:, -1], out.astype(x.dtype)

    def chunks(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(_BATCH, _LENGTH // _CHUNK, _CHUNK, -1), 1, 0)

    parts = tuple(map(chunks, (x, pace, keys, queries)))
    start = jnp.zeros((_BATCH, _INNER, _STATE), jnp.float32)
    _, out = jax.lax.scan(jax.checkpoint(chunk), constrain("state", start), parts)
    return jnp.moveaxis(out, 0, 1).reshape(x.shape)


def _build(constrain: Constrain) -> Any:
    def layer(x: jax.Array, stored: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
        weights = {
            name: constrain(f"weights.{name}", w.astype(jnp.bfloat16)) for name, w in stored.items()
        }
        normed = constrain("layer_input", rms_norm(x, weights["norm"]))
        both = jnp.einsum("blw,wgi->gbli", normed, weights["into"])
        inner, gate = constrain("inner", both[0]), constrain("inner", both[1])
        padded = jnp.pad(inner, ((0, 0), (_TAPS - 1, 0), (0, 0)))
        shifted = [padded[:, i : i + _LENGTH] * weights["taps"][i] for i in range(_TAPS)]
        inner = constrain("inner", jax.nn.silu(sum(shifted)))
        mixed = _mix_over_time(inner, weights, constrain) + inner * weights["skip"]
        mixed = constrain("inner", mixed * jax.nn.silu(gate))
        return constrain("stream", x + constrain("layer_output", mixed @ weights["out"])), None

    def loss(parameters: Any, batch: Any) -> jax.Array:
        table = parameters["embedding"].astype(jnp.bfloat16)
        lookup = constrain("weights.embedding", table)
        tokens = constrain("looked_up_tokens", batch["tokens"])
        x = constrain("stream", constrain("looked_up", jnp.take(lookup, tokens, axis=0)))
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, parameters["layers"])
        x = constrain("head_input", rms_norm(x, parameters["final_norm"]))
        head = constrain("weights.head", table)
        logits = constrain("logits", jnp.einsum("blw,vw->blv", x, head)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    return training_step(loss)


def _data() -> HandLayout:
    rows, stream = P(BOTH, None), P(BOTH, None, None)
    names = ("stream", "layer_input", "inner", "selected", "head_input", "logits")
    states = {"states": P(BOTH, None, None, None), "state": P(BOTH, None, None)}
    return HandLayout({"tokens": rows, "targets": rows}, {**dict.fromkeys(names, stream), **states})


def _fsdp(over: Any) -> HandLayout:
    """Return a layout whose layers gather their weights; the widest dimension is sharded."""
    at = {"into": 0, "out": 0, "select": 0, "pace": 1}
    sizes = {name: len(_SHAPES[name]) for name in at}
    stored = {n: P(*(over if i == at[n] else None for i in range(sizes[n]))) for n in at}
    data = _data()
    inside = {
        **data.inside,
        **{f"weights.{n}": Turn(P(*(None for _ in spec)), spec) for n, spec in stored.items()},
        "looked_up_tokens": P("data" if over == "model" else None, None),
        "looked_up": P("data" if over == "model" else None, None, over),
        "weights.head": Turn(P(None, None), P(None, over)),
    }
    arguments = {name: P(None, *spec) for name, spec in stored.items()}
    return HandLayout({**data.arguments, **arguments, "embedding": P(None, over)}, inside)


def _tensor(width: Any, parts: Any) -> HandLayout:
    """Return a layout that shards the inner features.

    Args:
        width: Mesh axes of the width of the weights; None without FSDP.
        parts: Mesh axes of the length between the parts of a layer.
    """
    stored = {
        name: P(*("model" if i == at else None for i in range(len(_SHAPES[name]))))
        for name, at in _INNER_DIMENSION.items()
    }
    used = dict(stored)
    stored |= {"into": P(width, None, "model"), "out": P("model", width)}
    rows, stream = P("data", None), P("data", parts, None)
    inside = {
        **{f"weights.{n}": Turn(used[n], stored[n]) for n in ("into", "out")},
        **dict.fromkeys(("stream", "layer_output", "looked_up"), stream),
        **dict.fromkeys(("layer_input", "selected", "head_input"), P("data", None, None)),
        **dict.fromkeys(("inner", "logits"), P("data", None, "model")),
        "states": P("data", None, "model", None),
        "state": P("data", "model", None),
        **dict.fromkeys(
            ("weights.embedding", "weights.head"), Turn(P("model", None), P("model", width))
        ),
    }
    arguments = {name: P(None, *spec) for name, spec in stored.items()}
    arguments |= {"tokens": rows, "targets": rows, "embedding": P("model", width)}
    return HandLayout(arguments, inside)


def _layouts(mesh: Mesh) -> Mapping[str, HandLayout]:
    del mesh
    return {
        "data": _data(),
        "fsdp": _fsdp(BOTH),
        "hybrid fsdp": _fsdp("model"),
        "tensor": _tensor(None, None),
        "fsdp + tensor": _tensor("data", "model"),
    }


SELECTIVE_SCAN = BenchmarkProgram(
    "selective scan, 1.4B",
    _build,
    _arguments,
    _layouts,
    {
        "v5e-64": {"data": 16, "model": 4},
        "v6e-64": {"data": 16, "model": 4},
        "v5p-128": {"data": 16, "model": 4},
    },
)
