"""Read, build and convert tree definitions without calling the constructors of users' classes.

A class may check its arrays as it is constructed: shapes that must agree, a dtype. Unflattened with
numbers, shardings or paths it raises an error of its own, so definitions are built node by node.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from xlashard.support.formatting import shortened

type TreeDef = Any


def make_node(node_data: tuple[type, Any] | None, children: Iterable[TreeDef]) -> TreeDef:
    """Return the tree of a node of a registered class, from its `node_data()`; None for a leaf.

    Raises:
        RuntimeError: If the class is not registered, or the number of children differs.
    """
    return jax.tree_util.PyTreeDef.from_node_data_and_children(
        jax.tree_util.default_registry, node_data, list(children)
    )


def in_default_registry(tree: TreeDef) -> TreeDef:
    """Return a tree of JAX's internal registry as a tree of `jax.tree_util`.

    A tree with a node that only the internal registry has is returned unchanged.
    """
    try:
        built = _in_default_registry(tree)
        # JAX builds any named tuple as one, also a class that is registered with other leaves.
        if built == tree:
            return built
        return jax.tree_util.tree_structure(tree.unflatten([0] * tree.num_leaves))
    except Exception:  # of a user's class: of any kind
        return tree


def _in_default_registry(tree: TreeDef) -> TreeDef:
    if tree.num_nodes == tree.num_leaves == 1:  # A node without children has no leaves.
        return _LEAF
    return make_node(tree.node_data(), map(_in_default_registry, tree.children()))


_LEAF = jax.tree_util.tree_structure(0)


def split_leaves(tree: TreeDef, leaves: Sequence[Any]) -> list[tuple[TreeDef, Sequence[Any]]]:
    """Return the children of a tree, each with its own leaves."""
    parts, start = [], 0
    for child in tree.children():
        end = start + child.num_leaves
        parts.append((child, leaves[start:end]))
        start = end
    return parts


def child_keys(tree: TreeDef) -> list[Any]:
    """Return the keys of the children of a tree; positions where its class refuses placeholders."""
    children = tree.children()
    node = _unflatten_one_level(tree, [object() for _ in children])
    flat, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [path[0] for path, _ in flat]


def outline(tree: TreeDef, leaves: Sequence[Any]) -> Any:
    """Return a tree with leaves that are no arrays: paths, types, shardings.

    A node whose class refuses the leaves is a tuple of its children.
    """
    try:
        return tree.unflatten(leaves)
    except Exception:  # of a user's class: of any kind
        parts = [outline(*part) for part in split_leaves(tree, leaves)]
        return _unflatten_one_level(tree, parts)


def shortest_prefix(tree: TreeDef, leaves: Sequence[Any]) -> Any:
    """Return the prefix of a tree that has one entry for all equal leaves of a node."""
    if tree.num_leaves and all([leaf == leaves[0] for leaf in leaves]):
        return leaves[0]
    parts = [shortest_prefix(*part) for part in split_leaves(tree, leaves)]
    return _unflatten_one_level(tree, parts)


def _unflatten_one_level(tree: TreeDef, children: Sequence[Any]) -> Any:
    leaf = make_node(None, ())
    try:
        return make_node(tree.node_data(), [leaf] * len(children)).unflatten(children)
    except Exception:  # of a user's class: of any kind
        return tuple(children)


def leaf_paths(tree: Any, name: str) -> list[str]:
    """Return the path of each leaf as source code, by position in nodes that name no keys."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [name + _FLAT_INDEX.sub(r"[\1]", jax.tree_util.keystr(path)) for path, _ in flat]


_FLAT_INDEX = re.compile(r"\[<flat index (\d+)>\]")


def find_tree_difference(path: str, expected: TreeDef, actual: TreeDef) -> tuple[str, str, str]:
    """Return the path of the first node that differs in two trees, and what each has there.

    Args:
        path: The path of both roots.
        expected: A tree.
        actual: Another one.
    """
    kinds, keys = [], []
    for tree in (expected, actual):
        kind, data = tree.node_data() or (None, None)
        kinds.append(kind)
        keys.append(list(data or ()) if kind is dict else data)
    if kinds[0] is not kinds[1]:
        return path, _describe_node(expected), _describe_node(actual)
    children = expected.children(), actual.children()
    if kinds[0] is dict:
        missing = [key for key in keys[0] if key not in keys[1]]
        new = [key for key in keys[1] if key not in keys[0]]
        if missing or new:
            return path, _describe_keys(missing, new), _describe_keys(new, missing)
        names = [f"[{key!r}]" for key in keys[0]]
    else:
        if len(children[0]) != len(children[1]) or keys[0] != keys[1]:
            return path, _describe_node(expected), _describe_node(actual)
        fields = getattr(kinds[0], "_fields", None)
        names = [f".{name}" for name in fields] if fields else []
        names = names or [f"[{i}]" for i in range(len(children[0]))]
    for name, one, other in zip(names, *children, strict=True):
        if one != other:
            return find_tree_difference(path + name, one, other)
    return path, _describe_node(expected), _describe_node(actual)


def _describe_keys(own: Sequence[Any], others: Sequence[Any]) -> str:
    """Describe the keys that one of two dicts has alone."""
    if not own:
        return f"no {_list_keys(others)}"
    return f"the {'key' if len(own) == 1 else 'keys'} {_list_keys(own)}"


def _list_keys(keys: Sequence[Any]) -> str:
    shown = ", ".join(repr(key) for key in keys[:_SHOWN])
    return f"{shown} and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else shown


_SHOWN = 4


def _describe_node(tree: Any) -> str:
    """Describe the root of a tree: `a list of 3`, `an array`, `None`."""
    kind, data = tree.node_data() or (None, None)
    if kind in (None, type(None)):
        return "an array" if tree.num_leaves else "None"
    count = len(tree.children())
    if kind in (dict, list, tuple):
        return f"a {kind.__name__} of {count}"
    text = "" if data is None else f" ({shortened(repr(data))})"
    return f"{kind.__name__} of {count}{text}"
