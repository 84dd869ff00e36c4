"""`jax.util`, `jax.tree_util`, and the tree functions of `jax`."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from xlashard._jax.legacy_api import util
from xlashard.legacy.modules.entry import Entry, differs, moved, works, works_in

prod = math.prod


def as_hashable_function(closure: Any) -> Any:
    """Return a decorator that makes functions with equal keys equal.

    Args:
        closure: The key.
    """
    return lambda f: util.HashableFunction(f, closure)


def split_dict(dct: Mapping[Any, Any], names: Iterable[Any]) -> list[Any]:
    """Return the values of all keys of a mapping, in a given order.

    Args:
        dct: The mapping.
        names: The keys.

    Raises:
        KeyError: A key is missing in `dct` or in `names`.
    """
    rest = dict(dct)
    values = [rest.pop(name) for name in names]
    if rest:
        raise KeyError(next(iter(rest)))  # no-catalogue: the era's own error: the key alone
    return values


def split_merge(predicate: Any, xs: Iterable[Any]) -> Any:
    """Partition a sequence, and return both parts and a function that merges such parts.

    Args:
        predicate: True for elements of the first part.
        xs: The elements.
    """
    xs = list(xs)
    chosen = [bool(predicate(x)) for x in xs]
    yes = [x for x, c in zip(xs, chosen, strict=True) if c]
    no = [x for x, c in zip(xs, chosen, strict=True) if not c]
    return yes, no, functools.partial(_merged, chosen)


def _merged(chosen: list[bool], new_yes: Iterable[Any], new_no: Iterable[Any]) -> list[Any]:
    yes, no = iter(new_yes), iter(new_no)
    return [next(yes if c else no) for c in chosen]


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


_OF_TREES = {
    __name__: (
        ("tree_multimap", "0.3.16", "jax.tree.map"),
        ("build_tree", "0.7.0", "jax.tree.unflatten"),
        ("AttributeKeyPathEntry", "0.4.26", "jax.tree_util.GetAttrKey"),
        ("GetitemKeyPathEntry", "0.4.26", "jax.tree_util.DictKey"),
    )
}

ENTRIES: tuple[Entry, ...] = (
    *works(
        "jax",
        "0.6.0",
        "jax.tree_util",
        tree_flatten="jax.tree.flatten",
        tree_leaves="jax.tree.leaves",
        tree_map="jax.tree.map",
        tree_structure="jax.tree.structure",
        tree_transpose="jax.tree.transpose",
        tree_unflatten="jax.tree.unflatten",
    ),
    *moved("jax", "0.6.0", "jax.tree_util", "treedef_is_leaf"),
    *works("jax", "0.3.16", __name__, tree_multimap="jax.tree.map"),
    *works_in("jax.tree_util", _OF_TREES),
    *differs(
        "jax.tree_util",
        "0.4.26",
        __name__,
        register_keypaths=(
            "jax.tree_util.register_pytree_with_keys",
            "JAX's messages use the keys only if they are registered with today's function.",
        ),
    ),
    Entry("jax.util", "0.8.0", "works", __name__, "import functools"),
    *works(
        "jax.util",
        "0.7.0",
        __name__,
        as_hashable_function="functools.partial",
        split_dict="[mapping[name] for name in names]",
        split_merge="[x for x in xs if predicate(x)]",
    ),
    *works(
        "jax.util",
        "0.7.0",
        "xlashard._jax.legacy_api:util",
        HashableFunction="functools.partial",
        cache="functools.lru_cache",
        safe_map="[f(x, y) for x, y in zip(xs, ys, strict=True)]",
        safe_zip="zip(xs, ys, strict=True)",
        split_list="xs[:n], xs[n:]",
        subvals="[new.get(n, x) for n, x in enumerate(xs)]",
        toposort="graphlib.TopologicalSorter",
        unzip2="tuple(zip(*pairs, strict=True))",
        wrap_name="f'{transform}({name})'",
        wraps="functools.wraps",
    ),
    *works("jax._src.util", "0.4.14", prod="math.prod"),
)
