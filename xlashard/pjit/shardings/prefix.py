"""Expands a prefix of a tree: one resource for each leaf of the arguments or of the result."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from xlashard.errors import ResourceError, counted
from xlashard.lazily import dataclass
from xlashard.pjit.shardings.resources import Resource, ResourceTree


def expand(
    resources: ResourceTree, treedef: Any, path_of: Callable[[Sequence[Any]], str]
) -> list[Resource]:
    """Return one resource for each leaf of a tree, from a prefix of the tree.

    Args:
        resources: The prefix.
        treedef: The structure of the full tree.
        path_of: Returns the path of a subtree as code: `state['params']`.

    Raises:
        ResourceError: With the first place where the prefix does not fit, and why.
    """
    if treedef == resources.treedef:
        return list(resources.leaves)
    full = treedef.unflatten([_FullLeaf()] * treedef.num_leaves)
    prefix = resources.tree()
    if type(full) in (tuple, list) and type(prefix) in (tuple, list):
        # A list and a tuple of arguments are interchangeable.
        prefix = type(full)(prefix)
    out: list[Resource] = []
    _expand(prefix, full, (), out, _Naming(resources.what, path_of))
    return out


class _FullLeaf:
    """An array in a full tree."""


@dataclass(frozen=True)
class _Naming:
    what: str
    path_of: Callable[[Sequence[Any]], str]


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    """Return `(key, child)` pairs of a node; None for a leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node or isinstance(x, _FullLeaf | Resource)
    )
    if len(flat) == 1 and not flat[0][0]:
        return None
    return [(path[0] if path else None, child) for path, child in flat]


def _expand(
    prefix: Any, full: Any, path: tuple[Any, ...], out: list[Resource], naming: _Naming
) -> None:
    if isinstance(prefix, Resource):
        out.extend([prefix] * len(jax.tree_util.tree_leaves(full)))
        return
    if isinstance(full, _FullLeaf):
        raise ResourceError(
            f"{naming.what} has a {_kind(prefix)} for {naming.path_of(path)}, which is an array: "
            "give one sharding there",
            path=naming.path_of(path),
        )
    if type(prefix) is not type(full):
        raise ResourceError(
            f"{naming.what} has a {_kind(prefix)} where {naming.path_of(path)} is a {_kind(full)}: "
            f"give a {_kind(full)} of the same structure, or one sharding for all of it",
            path=naming.path_of(path),
        )
    entries, targets = _children(prefix) or [], _children(full) or []
    keys, expected = [str(k) for k, _ in entries], [str(k) for k, _ in targets]
    if keys != expected:
        raise ResourceError(
            _key_mismatch(naming, path, (keys, expected), _kind(full)), path=naming.path_of(path)
        )
    for (key, entry), (_, target) in zip(entries, targets, strict=True):
        _expand(entry, target, (*path, key), out, naming)


def _key_mismatch(
    naming: _Naming, path: tuple[Any, ...], keys: tuple[list[str], list[str]], kind: str
) -> str:
    given, expected = keys
    place = naming.path_of(path)
    if kind in ("tuple", "list"):
        return (
            f"{naming.what} has {counted(len(given), 'entry', 'entries')} for {place}, which has "
            f"{len(expected)}: give one for each, or one sharding for all"
        )
    missing = [k for k in expected if k not in given]
    surplus = [k for k in given if k not in expected]
    parts, advice = [], []
    if missing:
        parts.append(f"lacks {', '.join(missing)}")
        advice.append(f"give a sharding for {', '.join(missing)}, or one for all of {place}")
    if surplus:
        parts.append(f"has {', '.join(surplus)} too many")
        advice.append(f"leave {', '.join(surplus)} out")
    return (
        f"{naming.what} does not fit {place}: it {' and '.join(parts) or 'differs in order'}: "
        f"{'; '.join(advice) or 'give them in the order ' + ', '.join(expected)}"
    )


def _kind(node: Any) -> str:
    return type(node).__name__
