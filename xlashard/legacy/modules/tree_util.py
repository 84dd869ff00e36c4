"""`jax.tree_util`, and the tree functions of `jax`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from xlashard.legacy.modules.entry import Entry, members


def tree_multimap(
    f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Map a function over the leaves of several pytrees.

    Args:
        f: The function.
        tree: The first pytree, which determines the structure.
        *rest: The other pytrees.
        is_leaf: Returns True for nodes of the first pytree to treat as leaves.

    Returns:
        A tree of the results.
    """
    return jax.tree.map(f, tree, *rest, is_leaf=is_leaf)


def build_tree(treedef: Any, xs: Any) -> Any:
    """Return the pytree of a structure and a nested sequence of its leaves.

    Args:
        treedef: The structure.
        xs: The leaves, nested like the structure.
    """
    return treedef.from_iterable_tree(xs)


class GetitemKeyPathEntry(NamedTuple):
    """Key path entry of the child `node[key]`.

    Example:
        >>> GetitemKeyPathEntry("w").pprint()
        "['w']"
    """

    key: Any

    def pprint(self) -> str:
        """Return the entry as code."""
        return f"[{self.key!r}]"


class AttributeKeyPathEntry(NamedTuple):
    """Key path entry of the child `node.key`.

    Example:
        >>> AttributeKeyPathEntry("weight").pprint()
        '.weight'
    """

    key: str

    def pprint(self) -> str:
        """Return the entry as code."""
        return f".{self.key}"


KEY_PATHS: dict[type, Callable[[Any], Sequence[Any]]] = {}
"""The registered handlers, by node type."""


def register_keypaths(ty: type, handler: Callable[[Any], Sequence[Any]]) -> None:
    """Register the key path entries of a node type.

    JAX registers key paths together with the type, so its messages keep using child numbers.

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
        "JAX's messages use the keys only if they are registered with today's function.",
    ),
)
