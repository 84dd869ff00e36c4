"""Training steps of decoders for automatic shardings, with their layouts."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks._auto_program import BenchmarkProgram, Constrain, HandLayout, Turn
from benchmarks._auto_transformers import Transformer, build_transformer
from xlashard import Mesh, P

BOTH = ("data", "model")

_TENSOR = {
    "wq": (None, "model", None),
    "wk": (None, "model", None),
    "wv": (None, "model", None),
    "wo": ("model", None, None),
    "gate": (None, "model"),
    "up": (None, "model"),
    "down": ("model", None),
}
"""Mesh axis of each dimension of a layer's weights when heads and hidden features are sharded."""

_WIDTH = {"wq": 0, "wk": 0, "wv": 0, "wo": 2, "gate": 0, "up": 0, "down": 1}
"""Dimension of a layer's weights that is the width."""

_MAJOR = {**_WIDTH, "down": 0}
"""Dimension of a layer's weights for FSDP alone: the major one, which reduces and scatters best."""


def _with_axes(spec: tuple[Any, ...], at: int, axes: Any) -> tuple[Any, ...]:
    return (*spec[:at], axes, *spec[at + 1 :])


def data_layout() -> HandLayout:
    """Return a layout that shards the batch alone."""
    rows = P(BOTH, None)
    inside = {"stream": P(BOTH, None, None), "logits": P(BOTH, None, None)}
    return HandLayout({"tokens": rows, "targets": rows}, inside)


def fsdp_layout(over: Any = BOTH) -> HandLayout:
    """Return a layout that shards batch and weights; a layer gathers its weights.

    Args:
        over: Mesh axes of the weights; the batch is sharded over all axes.
    """
    rows, stream = P(BOTH, None), P(BOTH, None, None)
    plain = {name: tuple(None for _ in spec) for name, spec in _TENSOR.items()}
    stored = {name: _with_axes(spec, _MAJOR[name], over) for name, spec in plain.items()}
    inside: dict[str, Any] = {
        f"weights.{name}": Turn(P(*plain[name]), P(*stored[name])) for name in plain
    }
    arguments = {name: P(None, *spec) for name, spec in stored.items()}
    arguments |= {"tokens": rows, "targets": rows}
    arguments |= {"embedding": P(None, over), "head": P(over, None)}
    # Each device looks up all tokens in its slice of the width, and sends features, not the table.
    inside |= {
        "looked_up_tokens": P("data" if over == "model" else None, None),
        "looked_up": P("data" if over == "model" else None, None, over),
        "weights.head": Turn(P(None, None), P(over, None)),
    }
    inside |= dict.fromkeys(("stream", "attention_input", "mlp_input", "head_input"), stream)
    inside |= dict.fromkeys(("q", "k", "v", "mixed"), P(BOTH, None, None, None))
    return HandLayout(arguments, {**inside, "hidden": stream, "logits": stream})


def tensor_layout(width: Any = "data") -> HandLayout:
    """Return Megatron's layout with sequence parallelism between the parts of a layer.

    Args:
        width: Mesh axes of the width of the weights; None without FSDP.
    """
    rows, stream = P("data", None), P("data", "model", None)
    stored = {name: _with_axes(spec, _WIDTH[name], width) for name, spec in _TENSOR.items()}
    arguments = {name: P(None, *spec) for name, spec in stored.items()}
    arguments |= {"tokens": rows, "targets": rows}
    arguments |= {"embedding": P("model", width), "head": P(width, "model")}
    inside: dict[str, Any] = {
        f"weights.{name}": Turn(P(*_TENSOR[name]), P(*stored[name])) for name in stored
    }
    inside |= {
        "weights.embedding": Turn(P("model", None), P("model", width)),
        "weights.head": Turn(P(None, "model"), P(width, "model")),
    }
    whole = P("data", None, None)
    inside |= dict.fromkeys(("stream", "attention_output", "mlp_output", "looked_up"), stream)
    inside |= dict.fromkeys(("attention_input", "mlp_input", "head_input"), whole)
    inside |= dict.fromkeys(("q", "k", "v", "mixed"), P("data", None, "model", None))
    inside |= dict.fromkeys(("hidden", "logits"), P("data", None, "model"))
    return HandLayout(arguments, inside)


def sequence_layout() -> HandLayout:
    """Return FSDP whose tokens are sharded along sequences, too; keys and values are gathered."""
    fsdp = fsdp_layout()
    spread, stream = P("data", "model"), P("data", "model", None)
    across, whole = P("data", "model", None, None), P("data", None, None, None)
    inside = {
        **{name: spec for name, spec in fsdp.inside.items() if name.startswith("weights.")},
        "looked_up_tokens": spread,
        **dict.fromkeys(("looked_up", "stream", "attention_input", "mlp_input"), stream),
        **dict.fromkeys(("head_input", "hidden", "logits", "mlp_output"), stream),
        **dict.fromkeys(("q", "mixed"), across),
        **dict.fromkeys(("k", "v"), whole),
    }
    return HandLayout({**fsdp.arguments, "tokens": spread, "targets": spread}, inside)


def _exchange_layout() -> HandLayout:
    """Return `sequence_layout` with an exchange of positions for heads around attention."""
    sequence = sequence_layout()
    across, heads = P("data", "model", None, None), P("data", None, "model", None)
    inside = {
        **sequence.inside,
        **dict.fromkeys(("projected", "mixed"), across),
        **dict.fromkeys(("q", "k", "v", "attended"), heads),
    }
    return HandLayout(sequence.arguments, inside)


def _dense_layouts(sizes: Transformer, mesh: Mesh) -> Mapping[str, HandLayout]:
    tensor = {"fsdp + tensor": tensor_layout(), "tensor": tensor_layout(None)}
    if sizes.batch % mesh.size:
        return {"fsdp + sequence": sequence_layout(), **tensor}
    return {
        "data": data_layout(),
        "fsdp": fsdp_layout(),
        "hybrid fsdp": fsdp_layout("model"),
        "wide hybrid fsdp": fsdp_layout("data"),
        **tensor,
    }


def _expert_layouts(sizes: Transformer, mesh: Mesh) -> Mapping[str, HandLayout]:
    del sizes, mesh
    return {
        "fsdp": _expert_layout(None, BOTH, BOTH),
        "expert + fsdp": _expert_layout("model", "data", "data"),
    }


def _expert_layout(experts: Any, width: Any, batch: Any) -> HandLayout:
    """Return FSDP of attention with experts over mesh axes.

    Args:
        experts: Mesh axes of the experts.
        width: Mesh axes of the width of the experts' weights.
        batch: Mesh axes of the batch where tokens are with their experts.
    """
    stored = {name: P(experts, width, None) for name in ("gate", "up")}
    stored["down"] = P(experts, None, width)
    sent, own = P(BOTH, None, None, None), P(batch, experts, None, None)
    fsdp = fsdp_layout()
    inside = {
        **fsdp.inside,
        **{f"weights.{name}": Turn(P(experts, None, None), spec) for name, spec in stored.items()},
        **dict.fromkeys(("dispatched", "collected", "combine", "dispatch"), sent),
        **dict.fromkeys(("expert_inputs", "hidden", "expert_outputs"), own),
    }
    arguments = {name: P(None, *spec) for name, spec in stored.items()}
    return HandLayout({**fsdp.arguments, **arguments}, inside)


def _program(title: str, sizes: Transformer, layouts: Any, meshes: Any) -> BenchmarkProgram:
    def build(constrain: Constrain) -> Any:
        return build_transformer(sizes, constrain)

    return BenchmarkProgram(title, build, sizes.arguments, partial(layouts, sizes), meshes)


_OF_64 = {
    "v5e-64": {"data": 16, "model": 4},
    "v6e-64": {"data": 16, "model": 4},
    "v5p-128": {"data": 16, "model": 4},
}
_EXPERTS_OF_64 = {name: {"data": 8, "model": 8} for name in _OF_64}
_OF_256 = {
    "v5e-256": {"data": 32, "model": 8},
    "v6e-256": {"data": 32, "model": 8},
    "v5p-256": {"data": 32, "model": 4},
}

DENSE_1B = _program(
    "dense transformer, 1B",
    Transformer(16, 2048, 16, 16, 8192, 32_000, 2048, 64),
    _dense_layouts,
    {"v5e-16": {"data": 4, "model": 4}, "v6e-64": _OF_64["v6e-64"], "v5p-128": _OF_64["v5p-128"]},
)
GROUPED_8B = _program(
    "grouped-query transformer, 8B",
    Transformer(32, 4096, 32, 8, 14336, 128_256, 4096, 64),
    _dense_layouts,
    _OF_64,
)
GROUPED_70B = _program(
    "grouped-query transformer, 70B",
    Transformer(80, 8192, 64, 8, 28672, 128_256, 4096, 128),
    _dense_layouts,
    _OF_256,
)
MOE = _program(
    "mixture of 32 experts, 20B",
    Transformer(24, 2048, 16, 16, 4096, 32_000, 2048, 128, experts=32),
    _expert_layouts,
    _EXPERTS_OF_64,
)


def _long_layouts(sizes: Transformer, mesh: Mesh) -> Mapping[str, HandLayout]:
    del sizes, mesh
    sequence = sequence_layout()
    parts = P(None, "data", "model", None, None, None)
    inside = {
        **sequence.inside,
        **dict.fromkeys(("queries", "mixed_parts"), parts),
        "scores": P("data", None, None, "model", None),
    }
    return {
        "sequence, keys gathered": HandLayout(sequence.arguments, inside),
        "sequence, heads exchanged": _exchange_layout(),
        "fsdp + tensor": tensor_layout(),
    }


LONG = _program(
    "sequences of 65,536 tokens, 3B",
    Transformer(16, 4096, 32, 8, 11008, 32_000, 65_536, 8, query_rows=512),
    _long_layouts,
    _EXPERTS_OF_64,
)
LORA = _program(
    "adapters of rank 16 on a frozen 8B",
    Transformer(32, 4096, 32, 8, 14336, 128_256, 2048, 64, rank=16),
    _dense_layouts,
    {
        "v5e-16": {"data": 4, "model": 4},
        "v6e-64": {"data": 16, "model": 4},
        "v5p-128": {"data": 16, "model": 4},
    },
)
