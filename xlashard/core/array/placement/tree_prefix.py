"""Prefixes of trees: one entry for each leaf, without calling constructors of users' classes."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax

from xlashard._jax.tree_definitions import child_keys, split_leaves
from xlashard.errors import ArgumentError, XlashardError
from xlashard.support.lazily import dataclass


@dataclass(frozen=True, eq=False)
class TreeNode:
    """A node of a tree, given by its definition.

    Attributes:
        definition: The structure below the node.
        leaves: The leaves below it.
    """

    definition: Any
    leaves: Sequence[Any]

    @classmethod
    def of(cls, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> "TreeNode":
        """Flatten a tree."""
        leaves, definition = jax.tree.flatten(tree, is_leaf)
        return cls(definition, leaves)

    @property
    def is_leaf(self) -> bool:
        """Return True for a leaf."""
        return self.definition.node_data() is None

    @property
    def kind(self) -> type:
        """Return the class of the node, or of the leaf."""
        return type(self.leaves[0]) if self.is_leaf else self.definition.node_data()[0]

    @cached_property
    def keys(self) -> list[Any]:
        """Return the keys of the children."""
        return child_keys(self.definition)

    @property
    def children(self) -> "list[TreeNode]":
        """Return the children."""
        return [TreeNode(*part) for part in split_leaves(self.definition, self.leaves)]

    def has_same_keys(self, other: "TreeNode") -> bool:
        """Return True if another node has the same class and children of the same keys."""
        if self.is_leaf or other.is_leaf or self.kind is not other.kind:
            return False
        # As text: keys of a user's node may lack an equality.
        return list(map(str, self.keys)) == list(map(str, other.keys))


@dataclass(frozen=True, eq=False)
class PrefixMismatch:
    """Node of a prefix that does not fit the node of a tree.

    Attributes:
        prefix: The node of the prefix.
        tree: The node of the tree.
        name: Name of the whole prefix.
        tree_name: Name of the whole tree.
        steps: Path of both nodes as source code.
    """

    prefix: TreeNode
    tree: TreeNode
    name: str
    tree_name: str
    steps: str


def _structure_error(at: PrefixMismatch) -> ArgumentError:
    name, tree_name = at.name + at.steps, at.tree_name + at.steps
    return ArgumentError(
        f"{name} does not have the structure of {tree_name}: {name} is {_outline(at.prefix)}, "
        f"{tree_name} is {_outline(at.tree)}; give a tree like {tree_name}, or one entry for all "
        "of it"
    )


def _outline(node: TreeNode) -> str:
    kind = node.kind
    if issubclass(kind, dict) and not node.is_leaf:
        return f"a dict with keys {sorted(repr(key.key) for key in node.keys)}".replace('"', "")
    if issubclass(kind, list | tuple):
        return f"a {kind.__name__} of {len(node.keys)}"
    return f"a {kind.__name__}"


def broadcast_prefix(
    prefix: Any, tree: Any, is_entry: Callable[[Any], bool], name: str, tree_name: str
) -> list[Any]:
    """Return the entry of a prefix for each leaf of a tree.

    Args:
        prefix: Tree of entries with the structure of the upper part of `tree`.
        tree: The values.
        is_entry: Returns True for an entry. A leaf of the prefix that is no entry is returned, for
            the caller to refuse.
        name: Name of the whole prefix in errors.
        tree_name: Name of the whole tree in errors.

    Raises:
        ArgumentError: The structures differ; the message has the path.
    """
    if is_entry(prefix) or jax.tree_util.all_leaves([prefix]):
        return [prefix] * jax.tree.structure(tree).num_leaves
    return spread_prefix(TreeNode.of(prefix, is_entry), TreeNode.of(tree), name, tree_name)


def spread_prefix(
    prefix: TreeNode,
    tree: TreeNode,
    name: str,
    tree_name: str,
    error: Callable[[PrefixMismatch], XlashardError] = _structure_error,
    path: tuple[tuple[TreeNode, int], ...] = (),
) -> list[Any]:
    """Return the leaf of a prefix for each leaf of a tree.

    Args:
        prefix: The root of the prefix.
        tree: The root of the tree.
        name: Name of the whole prefix in errors.
        tree_name: Name of the whole tree in errors.
        error: Returns the error for the first node that does not fit.
        path: The nodes above both, each with the position of the child on the path.

    Raises:
        ArgumentError: The structures differ; the message has the path.
    """
    if prefix.is_leaf:
        return [prefix.leaves[0]] * len(tree.leaves)
    if prefix.definition == tree.definition:
        return list(prefix.leaves)
    if not prefix.has_same_keys(tree):
        steps = jax.tree_util.keystr(tuple([node.keys[number] for node, number in path]))
        raise error(PrefixMismatch(prefix, tree, name, tree_name, steps))
    spread: list[Any] = []
    for number, pair in enumerate(zip(prefix.children, tree.children, strict=True)):
        spread += spread_prefix(*pair, name, tree_name, error, (*path, (tree, number)))
    return spread
