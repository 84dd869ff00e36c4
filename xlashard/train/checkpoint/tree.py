"""The arrays of a state by their paths: what is written down of them, and whether they fit."""

from collections.abc import Mapping
from typing import Any

import jax

from xlashard.errors import counted
from xlashard.train.checkpoint.about import setting, setting_changes
from xlashard.train.errors import CheckpointError
from xlashard.wording import typed

_LISTED = 4
"""Arrays and settings that an error shows at most, of each kind."""


def leaves_of(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as `parameters.layers.mlp.up`."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def described(state: Any) -> dict[str, str]:
    """The type of each array of a state by its path: `float32[8,16]`.

    Raises:
        CheckpointError: A leaf is no array.
    """
    types = {}
    for path, leaf in leaves_of(state).items():
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"{path} of the state is {leaf!r}, a {type(leaf).__name__}, and no array with a "
                f"place. Write, before the first step:\n"
                f"  xlashard.device_put({path.rpartition('.')[2]}, NamedSharding(mesh, P()))"
            )
        types[path] = typed(leaf.dtype, leaf.shape)
    return types


def misfits(saved: Mapping[str, str], wanted: Mapping[str, str], was: str, now: str) -> str:
    """Compares the arrays of a checkpoint with those that a run wants.

    Args:
        saved: Types by paths, of the checkpoint.
        wanted: Types by paths, of the run.
        was: The settings that the checkpoint was made with, as TOML.
        now: The settings of the run; empty where they are not known.

    Returns:
        What does not fit and what to write instead; empty if all fits.
    """
    different = [
        f"{path} is {saved[path]} there and {wanted[path]} here"
        for path in wanted
        if path in saved and saved[path] != wanted[path]
    ]
    lacking = [f"{path}, {wanted[path]}, is not there" for path in wanted if path not in saved]
    left = [f"{path}, {saved[path]}, is there only" for path in saved if path not in wanted]
    if not (different or lacking or left):
        return ""
    found = [line for kind in (different, lacking, left) for line in _first(kind)]
    return "\n".join([*(f"  {line}" for line in found), *_advice(was, now)])


def _first(lines: list[str]) -> list[str]:
    more = len(lines) - _LISTED
    return lines if more <= 0 else [*lines[:_LISTED], f"and so {counted(more, 'other array')}"]


def _advice(was: str, now: str) -> list[str]:
    changed = setting_changes(was, now) if now else {}
    # What a parameter's shape depends on stands in the model's table; should it not, all is shown.
    shaping = {k: v for k, v in changed.items() if k.partition(".")[0] == "model"} or changed
    if not shaping:
        return []
    words = [f"{key}={value}" for key in shaping if (value := setting(was, key)) is not None]
    return [
        f"The settings were others: {'; '.join(shaping.values())} now. Write:",
        "  --set " + " ".join(f"'{word}'" if '"' in word else word for word in words),
    ]
