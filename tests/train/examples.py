"""Small runs that several tests share."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from tests.auto.examples import find_layouts
from xlashard.auto import planner
from xlashard.train.config.schema import read
from xlashard.train.config.settings import Settings

MIXED = {
    "run": {"name": "small"},
    "devices": {"emulate": 8},
    "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
    "sharding": {
        "rules": {
            "batch": ["data", "fsdp"],
            "vocab": "tensor",
            "embed": "fsdp",
            "heads": "tensor",
            "kv_heads": "tensor",
            "mlp": "tensor",
        }
    },
    "model": {"layers": 2, "width": 32, "heads": 8, "kv_heads": 2, "mlp": 64, "length": 32},
    "optimizer": {"learning_rate": 3e-3, "warmup": 5},
    "training": {"steps": 4, "batch": 8, "eval_every": 2, "eval_batches": 1, "log_every": 1},
    "generation": {"bytes": 8},
}

WHOLE = dict.fromkeys(("batch", "vocab", "embed", "heads", "kv_heads", "mlp", "layers"), ())


def settings(*words: str, **tables: Any) -> Settings:
    """Return the mixed run with other tables and single settings."""
    return read(Settings, MIXED | tables, words)


def shallow(*words: str) -> Settings:
    """Return the mixed run with a single layer, for tests independent of the model."""
    return settings("model.layers=1", *words)


def over(mesh: dict[str, int], **rules: Sequence[str] | str) -> dict[str, Any]:
    """Return tables for another mesh, on which only the given rules shard anything."""
    count = int(np.prod(list(mesh.values())))
    return {"devices": {"emulate": count}, "mesh": mesh, "sharding": {"rules": WHOLE | rules}}


MESHES = {
    "one device": over({"data": 1}),
    "data": over({"data": 8}, batch="data"),
    "fsdp": over({"fsdp": 8}, batch="fsdp", embed="fsdp"),
    "tensor": over({"tensor": 8}, vocab="tensor", heads="tensor", mlp="tensor"),
    "mixed": {},
}


def choose_layout(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make automatic layouts choose the layout of a name."""
    monkeypatch.setattr(planner, "plan_program", functools.partial(named_layout, name=name))


def named_layout(program: Any, name: str) -> Any:
    """Return the layout of a name that a search considers, without its proof."""
    problem = program.problem()
    layouts = {layout.name: layout for layout in find_layouts(problem)}
    if any(problem.donated):
        return layouts[name]
    # The arguments of an evaluation are fixed, so its search has other names.
    return layouts.get(name) or next(iter(layouts.values()))


def devices(count: int) -> list[Any]:
    return jax.devices()[:count]
