"""Pytree prefixes, and paths of leaves in errors."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import jax

from xlashard.errors import (
    ArgumentError,
    GeometryError,
    OutOfMemoryError,
    PlacementError,
    XlashardError,
)


def broadcast_prefix(
    prefix: Any, tree: Any, is_entry: Callable[[Any], bool], name: str, tree_name: str
) -> list[Any]:
    """Return the entry of a prefix for each leaf of a tree.

    Args:
        prefix: Tree of entries with the structure of the upper part of `tree`.
        tree: The values.
        is_entry: Returns True for an entry. A leaf of the prefix that is no entry is returned, for
            the caller to refuse.
        name: Name of the prefix in errors.
        tree_name: Name of the tree in errors.

    Raises:
        ArgumentError: The structures differ; the message has the path.
    """
    if is_entry(prefix) or jax.tree_util.all_leaves([prefix]):
        return [prefix] * jax.tree.structure(tree).num_leaves
    entries, prefix_def = _one_level(prefix)
    children, tree_def = _one_level(tree)
    if prefix_def != tree_def:
        raise ArgumentError(
            f"{name} does not have the structure of {tree_name}: {name} is {_outline(prefix)}, "
            f"{tree_name} is {_outline(tree)}; give a tree like {tree_name}, or one entry for all "
            "of it"
        )
    found: list[Any] = []
    for (path, entry), (_, child) in zip(entries, children, strict=True):
        step = jax.tree_util.keystr(path)
        found += broadcast_prefix(entry, child, is_entry, name + step, tree_name + step)
    return found


def _one_level(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)


def _outline(tree: Any) -> str:
    if isinstance(tree, dict):
        return f"a dict with keys {sorted(map(repr, tree))}".replace('"', "")
    if isinstance(tree, list | tuple):
        return f"a {type(tree).__name__} of {len(tree)}"
    return f"a {type(tree).__name__}"


def leaf_path(tree: Any, number: int, name: str) -> str:
    """Return the path of a leaf as source code: `x['w'][0]`."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return name + jax.tree_util.keystr(paths[number][0])


def leaf_paths(tree: Any, name: str) -> list[str]:
    """Return the path of each leaf as source code."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [name + jax.tree_util.keystr(path) for path, _ in found]


def at_path(error: XlashardError, path: str) -> XlashardError:
    """Return an error with the path of a leaf in front; those of lower layers become ours."""
    if isinstance(error, GeometryError | PlacementError):
        return PlacementError(f"{path}: {error}")
    if isinstance(error, OutOfMemoryError):
        return OutOfMemoryError(f"{path}: {error}", bytes_per_device=error.bytes_per_device)
    if not isinstance(type(error).__init__, FunctionType):
        return type(error)(f"{path}: {error}")
    return error
