"""The tree functions and keys that `jax` and `jax.tree_util` had besides today's."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from xlashard.legacy.modules.entry import Entry, members


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


class GetitemKeyPathEntry(NamedTuple):
    """The step of a path from a node to its child that `node[key]` is.

    Example:
        >>> GetitemKeyPathEntry("w").pprint()
        "['w']"
    """

    key: Any

    def pprint(self) -> str:
        """Return the step as code."""
        return f"[{self.key!r}]"


class AttributeKeyPathEntry(NamedTuple):
    """The step of a path from a node to its child that `node.key` is.

    Example:
        >>> AttributeKeyPathEntry("weight").pprint()
        '.weight'
    """

    key: str

    def pprint(self) -> str:
        """Return the step as code."""
        return f".{self.key}"


KEY_PATHS: dict[type, Callable[[Any], Sequence[Any]]] = {}
"""The handlers that programs have registered, by the type of the node."""


def register_keypaths(ty: type, handler: Callable[[Any], Sequence[Any]]) -> None:
    """Register the steps from nodes of a type to their children.

    JAX's registry takes the keys of a type together with the type, so paths in messages go on
    with the numbers of the children.

    Args:
        ty: The type of the nodes.
        handler: Returns for a node one key path entry per child.
    """
    KEY_PATHS[ty] = handler


def _trees(*names: str) -> dict[str, str]:
    return {name: f"jax.tree.{name.removeprefix('tree_')}" for name in names}


ENTRIES: tuple[Entry, ...] = (
    *members(
        "jax",
        "0.6.0",
        "jax.tree_util",
        _trees(
            *("tree_flatten", "tree_leaves", "tree_map", "tree_structure", "tree_transpose"),
            *("tree_unflatten",),
        ),
    ),
    *members("jax", "0.6.0", "jax.tree_util", {"treedef_is_leaf": "jax.tree_util.treedef_is_leaf"}),
    *members("jax", "0.3.16", __name__, {"tree_multimap": "jax.tree.map"}),
    *members("jax.tree_util", "0.3.16", __name__, {"tree_multimap": "jax.tree.map"}),
    *members("jax.tree_util", "0.7.0", __name__, {"build_tree": "jax.tree.unflatten"}),
    *members(
        "jax.tree_util",
        "0.4.26",
        __name__,
        {
            "AttributeKeyPathEntry": "jax.tree_util.GetAttrKey",
            "GetitemKeyPathEntry": "jax.tree_util.DictKey",
        },
    ),
    Entry(
        "jax.tree_util.register_keypaths",
        "0.4.26",
        "differs",
        f"{__name__}:register_keypaths",
        "jax.tree_util.register_pytree_with_keys",
        "The keys of a type come into the paths of messages only by the function of today.",
    ),
)
