"""The tree functions that `jax` and `jax.tree_util` had besides today's."""

from collections.abc import Callable
from typing import Any

import jax


def tree_multimap(
    f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Calls a function with the leaves at each place of several trees.

    Args:
        f: The function.
        tree: The first tree, which says what the places are.
        *rest: The others.
        is_leaf: Says of a node of the first tree whether it is a leaf.

    Returns:
        A tree of the results.
    """
    return jax.tree.map(f, tree, *rest, is_leaf=is_leaf)


def build_tree(treedef: Any, xs: Any) -> Any:
    """A tree of a structure and a nesting of its leaves that has the same form.

    Args:
        treedef: The structure.
        xs: The leaves.
    """
    return treedef.from_iterable_tree(xs)
