"""Small states over eight devices, in which every number identifies its step."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from tests.core.array.cases import DEVICES
from xlashard import Mesh, NamedSharding, P, device_put
from xlashard.train.checkpoint import Checkpoints, RunMetadata

MESH = Mesh(np.array(DEVICES).reshape((4, 2) if len(DEVICES) > 1 else (1, 1)), ("x", "y"))
TALL = Mesh(np.array(DEVICES), ("x",))
HALF = Mesh(np.array(DEVICES[:4]).reshape((2, 2) if len(DEVICES) > 1 else (1, 1)), ("y", "x"))
ONE = Mesh(np.array(DEVICES[:6][-1:]).reshape(1, 1), ("x", "y"))

SETTINGS = '[run]\nname = "small"\n[model]\nwidth = 16\nmlp = 8\n[optimizer]\nb1 = 0.9\n'
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))


def metadata(step: int, **others: Any) -> RunMetadata:
    fields = {"data": {"seed": 7, "next": step}, "settings": SETTINGS, "mesh": {"x": 4, "y": 2}}
    return RunMetadata(step=step, **fields | others)


def values(step: int, width: int = 16) -> dict[str, Any]:
    """Return NumPy values of a state with named tuples, several dtypes, and an empty leaf."""
    rng = np.random.default_rng(step)
    parameters = {
        "layers": {"up": rng.standard_normal((width, 8), np.float32)},
        "half": rng.standard_normal(width).astype(jax.numpy.bfloat16),
        "empty": np.zeros((0, 4), np.float32),
    }
    return {
        "parameters": parameters,
        "optimizer": jax.tree.map(np.asarray, OPTIMIZER.init(parameters)),
        "step": np.int32(step),
    }


def placed(x: Any, mesh: Mesh) -> NamedSharding:
    """Return a sharding of the first dimension over `x` if there is one."""
    return NamedSharding(mesh, P("x") if x.ndim and x.shape[0] else P())


def state(step: int, mesh: Mesh = MESH, width: int = 16) -> Any:
    return jax.tree.map(lambda x: device_put(x, placed(x, mesh)), values(step, width))


def state_types(mesh: Mesh = MESH, width: int = 16) -> Any:
    """Return the target of a restore: shapes, dtypes, shardings."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed(x, mesh)),
        values(0, width),
    )


def check_same(got: Any, step: int) -> None:
    expected = values(step)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert ours.dtype == other.dtype and np.asarray(ours).tobytes() == other.tobytes()


def save(folder: Path, *steps: int, keep: int | None = None) -> None:
    with Checkpoints(folder, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(state(step), metadata(step))


def restore(folder: Path, *args: Any, **options: Any) -> Any:
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(*args or (state_types(),), **options)
